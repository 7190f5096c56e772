"""Losses on images that are not trained on."""

import torch

from namm.datasets.batches import Images, in_chunks
from namm.numerics import generator
from namm.training.objectives import Objective
from namm.training.settings import TrainSettings
from namm.training.tally import Tally


@torch.no_grad()
def validate(
    objective: Objective,
    images: tuple[Images, ...],
    settings: TrainSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Mean of every term as `val/…`, in evaluation mode and with the same random draws every time."""
    tally = Tally()
    objective.eval()
    streams = [in_chunks(each, settings.batch_size) for each in images]
    for k, rows in enumerate(zip(*streams, strict=False)):
        n = min(len(row) for row in rows)
        batch = tuple(row[:n].to(device, dtype) for row in rows)
        draws = objective.draw(batch, generator(settings.seed, "validation", k, device=device))
        tally.add(objective.forward(*batch, *draws), weight=n)
    objective.train()
    return {f"val/{name}": float(mean) for name, mean in tally.means().items()}
