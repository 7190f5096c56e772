"""The stage `map`: learn g and f on the data and measure what they do to held-out images."""

from pathlib import Path

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.batches import Images, in_chunks
from namm.evaluation.quality import ratio, total_variation
from namm.evaluation.verdict import judge_map
from namm.experiments.engine import build
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.stages import Outcome, Work
from namm.experiments.engine.stages.data import images_file
from namm.maps import MirrorMap
from namm.numerics import arithmetic, at_least_float32, generator
from namm.training.train_map import train_map
from namm.training.trainer import TrainResult

TRAINING = "training"
"""The training's folder in a stage: checkpoints, log and, at its end, the maps as `mirror`."""
CHUNK = 64
"""Images measured at a time."""


def make_map(work: Work) -> Outcome:
    """Train the map, or go on training it, and measure it on the validation images."""
    settings, rule = work.settings.map, build.rule_of(work.settings.data, work.needs.__getitem__)
    with open_store(images_file(work.needs["data"])) as store:
        mirror, trained = learn_map(
            work.settings, rule, store["train"], store["val"], work.folder / TRAINING, progress=work.progress
        )
        figures = measure(mirror, rule, store["val"], settings.sigma_max, settings.train.seed)
    verdict = judge_map(figures)
    results = {"steps": trained.steps, "images": trained.images, **figures, "verdict": verdict.outcome}
    return Outcome(results, (f"{TRAINING}/mirror",), trained.compute_seconds, verdict.as_json())


def learn_map(
    settings: Settings, rule: Constraint, data: Images, held_out: Images, folder: Path, *, progress: bool = True
) -> tuple[MirrorMap, TrainResult]:
    """The map that `settings` describe, trained on `data` for `rule`, or trained further, and what that took."""
    mirror = build.mirror(settings.map, data.shape[1])
    trained = train_map(
        mirror,
        data,
        rule,
        noise=build.noise(settings.map),
        weights=build.weights(settings.map.weights),
        regulariser=build.regulariser(settings.map),
        settings=settings.map.train,
        validation=held_out,
        folder=folder,
        progress=progress,
    )
    return mirror, trained


def mirror_folder(folder: Path) -> Path:
    """Where the stage keeps its maps, for `MirrorMap.load`."""
    return folder / TRAINING / "mirror"


@torch.no_grad()
def measure(mirror: MirrorMap, constraint: Constraint, images: Images, sigma: float, seed: int) -> dict[str, float]:
    """What g and f do, in plain float32, to images x (N, C, H, W) that they were not trained on, z ~ N(0, I).

    Returns:
        distance_data: mean ℓ(x), the floor.
        distance_noise: mean ℓ(x + σ z), what noise alone does.
        distance_map: mean ℓ(f(g(x) + σ z)), what f makes of it.
        distance_cycle: mean ℓ(f(g(x))).
        cycle_error: mean |x − f(g(x))| / mean |x|.
        total_variation, spread: Total variation and standard deviation of f(g(x) + σ z) over those of x; a map that
            keeps the rule by smoothing images shows here.
    """
    device = next(mirror.parameters()).device
    chunks = []
    for k, rows in enumerate(in_chunks(images, CHUNK)):
        x = rows.to(device)
        z = torch.randn(rows.shape, generator=generator(seed, "measure", k)).to(x)
        with arithmetic("fp32", device):
            y = mirror.to_mirror(x)
            there_and_back, mapped = (at_least_float32(mirror.to_data(each)) for each in (y, y + sigma * z))
        figures = {
            "distance_data": constraint(x),
            "distance_noise": constraint(x + sigma * z),
            "distance_map": constraint(mapped),
            "distance_cycle": constraint(there_and_back),
            "error": _mean(x - there_and_back),
            "size": _mean(x),
            "variation": total_variation(mapped),
            "variation_data": total_variation(x),
            "spread": mapped.flatten(1).std(1),
            "spread_data": x.flatten(1).std(1),
        }
        chunks.append(figures)
    mean = {name: float(torch.cat([chunk[name] for chunk in chunks]).double().mean()) for name in chunks[0]}
    return {
        **{name: mean[name] for name in ("distance_data", "distance_noise", "distance_map", "distance_cycle")},
        "cycle_error": ratio(mean["error"], mean["size"]),
        "total_variation": ratio(mean["variation"], mean["variation_data"]),
        "spread": ratio(mean["spread"], mean["spread_data"]),
        "measured_on": images.shape[0],
    }


def _mean(x: Tensor) -> Tensor:
    """Mean |x| of each image."""
    return x.abs().flatten(1).mean(1)
