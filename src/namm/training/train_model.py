"""Training a generative model on mirror images: the public call `train_model` (paper Sec. 3.2).

    y = g(x), once for all images, kept in float32;      the model's mean and scale from y;      then min E loss(y)

With `IdentityMap` in place of g this trains a plain model on plain data.
"""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from namm.datasets.batches import Images, check_images, check_values, map_images
from namm.distributed import process_state
from namm.errors import CheckpointError, DataError, UsageError
from namm.generative.base import DrawsNoise, GenerativeModel, Standardised, evaluating
from namm.maps import Mirror
from namm.reading import REASON, damage_as
from namm.training.checkpoint import describe_network, fingerprint, weights_digest
from namm.training.objectives import Losses, Objective
from namm.training.settings import SCORE_SETTINGS, TrainSettings
from namm.training.trainer import RESULT, TrainResult, rehearse, train
from namm.weights_file import read_weights, require_finite, write_weights

MODEL = "model.safetensors"  # the trained state, in the training's folder
AVERAGE = "model-{decay}.safetensors"  # the same with another average of the weights
REMAKE = "the command that trained it writes it again, from its last checkpoint."


class ModelObjective(Objective):
    """The loss of a generative model; a batch is (y,)."""

    def __init__(self, model: GenerativeModel) -> None:
        super().__init__()
        self.model = model

    @property
    def has_kernels(self) -> bool:
        """Whether the model has kernels of its own."""
        return bool(getattr(self.model, "has_kernels", False))

    def draw(self, batch: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
        """What the model draws; nothing for a model that draws inside its loss, from torch's own generator."""
        return self.model.draw(batch[0], generator) if isinstance(self.model, DrawsNoise) else ()

    def forward(self, *tensors: Tensor) -> Losses:
        """y and the draws -> loss."""
        return {"loss": self.model.loss(*tensors)}


def train_model(
    model: GenerativeModel,
    data: Images,
    mirror: Mirror,
    *,
    settings: TrainSettings = SCORE_SETTINGS,
    validation: Images | None = None,
    folder: str | Path | None = None,
    snapshots: Collection[int] = (),
    progress: bool = True,
) -> TrainResult:
    """Learn the distribution of g(x); `model` is trained in place and ends with averaged weights.

    Args:
        model: `Diffusion`, or an `nn.Module` of your own with the methods of `GenerativeModel`. Its statistics are set
            to those of g(x).
        data: Images x (N, C, H, W): a tensor, a NumPy array or an HDF5 data set.
        mirror: The trained pair of maps, of which g is used, or `IdentityMap()`. Moved to the device trained on.
        settings: Budget, batch, rate, seed and the rest; the paper's by default.
        validation: Held-out images x.
        folder: Where to keep checkpoints, logs and, at the end, the model's state as `model.safetensors`; see `train`.
            With further averages (`TrainSettings.averages`) also as `model-DECAY.safetensors` for each.
        snapshots: Steps, besides the milestones, after which the averaged weights are kept in the folder.
        progress: Show a progress bar.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} cannot be trained: it is not a torch.nn.Module.")
    processes = process_state()
    for images, name in ((data, "data"), (validation, "validation")):
        if images is None:
            continue
        check_images(images, name)
        if tuple(images.shape[1:]) != tuple(model.sample_shape):
            raise DataError(
                f"{name} are images of {tuple(images.shape[1:])} but the model makes {tuple(model.sample_shape)}: "
                "they must agree."
            )
    check_values(data)
    objective = ModelObjective(model)
    place = None if folder is None else Path(folder)
    unfinished = place is None or not (place / RESULT).exists()
    if unfinished and isinstance(objective.model, Standardised):  # else the loss may need statistics: `train` rehearses
        rehearse(objective, (data,), settings, processes.device, world=processes.num_processes, title="model")
    y = mirror_images(mirror, data, processes.device)
    held_out = None if validation is None else (mirror_images(mirror, validation, processes.device),)
    model.fit_statistics(y)
    about = _describe(model, mirror, data)
    result = train(
        objective,
        (y,),
        settings,
        validation=held_out,
        folder=place,
        description=about,
        snapshots=snapshots,
        title="model",
        progress=progress,
    )
    result = replace(result, averages=result.averages_of("model"))
    if place is not None and processes.is_main_process:
        states = {AVERAGE.format(decay=decay): average for decay, average in result.averages.items()}
        for name, state in {MODEL: {}, **states}.items():
            if not (place / name).exists():
                write_weights(place / name, {**model.state_dict(), **state}, {"model": type(model).__name__})
    processes.wait_for_everyone()
    return result


def mirror_images(mirror: Mirror, data: Images, device: torch.device) -> np.ndarray:
    """g(x) of all images, (N, C, H, W), as `map_images` keeps them."""
    with evaluating(mirror.to(device)) if isinstance(mirror, nn.Module) else nullcontext():
        return map_images(mirror.to_mirror, data, device, "g")


def _describe(model: nn.Module, mirror: Mirror, data: Images) -> dict[str, Any]:
    """What tells one training of a model from another."""
    return {
        "model": {**describe_network(model), "settings": model.extra_repr()},
        "networks": {name: describe_network(child) | _frozen(child) for name, child in model.named_children()},
        "mirror": {
            "class": type(mirror).__name__,
            "weights": weights_digest(mirror) if isinstance(mirror, nn.Module) else "none",
        },
        "data": fingerprint(data),
    }


def _frozen(network: nn.Module) -> dict[str, str]:
    """Which weights a network has that training does not change, such as a teacher's; nothing for any other."""
    fixed = [not weight.requires_grad for weight in network.parameters()]
    return {"weights": weights_digest(network)} if fixed and all(fixed) else {}


def load_model(model: nn.Module, folder: str | Path, decay: float | None = None) -> None:
    """Give `model` the weights and statistics that `train_model` left in `folder`.

    With `decay`, one of the training's `averages`, the weights of that average.
    """
    path = Path(folder) / (MODEL if decay is None else AVERAGE.format(decay=decay))
    if not path.exists() and decay is not None:
        raise CheckpointError(f"{path} is not there: {decay} is none of the averages of a training that ended there.")
    with damage_as(CheckpointError, f"{path} cannot be loaded into this {type(model).__name__}: {REASON}"):
        model.load_state_dict(read_weights(path, "the model", f"delete it, and {REMAKE}")[0])
    require_finite(model, str(path))
    model.eval()
