"""Training a generative model on mirror images: the public call `train_model` (paper Sec. 3.2).

    y = g(x), once for all images, in float32;      the model's mean and scale from y;      then min E loss(y)

With `IdentityMap` in place of g this trains a plain model on plain data.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import PartialState
from safetensors.torch import save
from torch import Tensor, nn

from namm.datasets.batches import Images, check_images, describe, in_chunks
from namm.errors import DataError, UsageError
from namm.files import write_atomically
from namm.generative.base import DrawsNoise, GenerativeModel, evaluating
from namm.maps import Mirror
from namm.training.identity import describe_network, fingerprint, weights_digest
from namm.training.objectives import Losses, Objective
from namm.training.settings import SCORE_SETTINGS, TrainSettings
from namm.training.trainer import TrainResult, train

CHUNK = 64  # images mapped at a time


class ModelObjective(Objective):
    """The loss of a generative model; a batch is (y,)."""

    def __init__(self, model: GenerativeModel) -> None:
        super().__init__()
        self.model = model

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
        progress: Show a progress bar.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} cannot be trained: it is not a torch.nn.Module.")
    processes = PartialState(cpu=not torch.cuda.is_available())
    for images, name in ((data, "data"), (validation, "validation")):
        if images is not None:
            _check_fit(images, model, name)
    y = mirror_images(mirror, data, processes.device)
    held_out = None if validation is None else (mirror_images(mirror, validation, processes.device),)
    model.fit_statistics(y)
    result = train(
        ModelObjective(model),
        (y,),
        settings,
        validation=held_out,
        folder=folder,
        description=_describe(model, mirror, data),
        title="model",
        progress=progress,
    )
    if folder is not None and processes.is_main_process:
        _save(model, Path(folder) / "model.safetensors")
    processes.wait_for_everyone()
    return result


@torch.no_grad()
def mirror_images(mirror: Mirror, data: Images, device: torch.device) -> Images:
    """g(x) of all images: float32, (N, C, H, W), in memory, or in a temporary file if it would fill half of that."""
    if not isinstance(mirror, nn.Module):
        return _map_into(_room(tuple(data.shape)), mirror, data, device)
    with evaluating(mirror.to(device)):
        return _map_into(_room(tuple(data.shape)), mirror, data, device)


def _map_into(y: np.ndarray, mirror: Mirror, data: Images, device: torch.device) -> np.ndarray:
    done = 0
    for x in in_chunks(data, CHUNK):
        mapped = mirror.to_mirror(x.to(device))
        if mapped.shape != x.shape:
            raise DataError(
                f"g turns an image of {tuple(x.shape[1:])} into {tuple(mapped.shape[1:])}: it must keep the shape."
            )
        if not torch.isfinite(mapped).all():
            raise DataError(f"g(x) is not finite for images {done} to {done + len(x) - 1}; x: {describe(x)}.")
        y[done : done + len(x)] = mapped.cpu().numpy()
        done += len(x)
    return y


def _room(shape: tuple[int, ...]) -> np.ndarray:
    """An array for mirror images; the file behind a large one disappears with it."""
    if 4 * np.prod(shape, dtype=np.int64) <= psutil.virtual_memory().available // 2:
        return np.empty(shape, np.float32)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def _check_fit(images: Images, model: GenerativeModel, name: str) -> None:
    check_images(images, name)
    if tuple(images.shape[1:]) != tuple(model.sample_shape):
        raise DataError(
            f"{name} are images of {tuple(images.shape[1:])} but the model makes {tuple(model.sample_shape)}: "
            "they must agree."
        )


def _describe(model: nn.Module, mirror: Mirror, data: Images) -> dict[str, Any]:
    """What tells one training of a model from another."""
    return {
        "model": {**describe_network(model), "settings": model.extra_repr()},
        "networks": {name: describe_network(child) for name, child in model.named_children()},
        "mirror": {
            "class": type(mirror).__name__,
            "weights": weights_digest(mirror) if isinstance(mirror, nn.Module) else "none",
        },
        "data": fingerprint(data),
    }


def _save(model: nn.Module, path: Path) -> None:
    """Write the state of the model, for `model.load_state_dict(safetensors.torch.load_file(path))`."""
    if not path.exists():
        write_atomically(path, save({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}))
