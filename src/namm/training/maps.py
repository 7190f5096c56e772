"""Training a mirror map: the public calls `train_map` (paper Eq. 1) and `finetune_map` (Eq. 7)."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from namm.constraints import Constraint
from namm.datasets.batches import Images, check_images, to_tensor
from namm.errors import DataError
from namm.files import rename_durably
from namm.maps import ICNN, MirrorMap
from namm.training.identity import describe_network, fingerprint, weights_digest
from namm.training.objectives import (
    FinetuneObjective,
    MapObjective,
    NoiseLevel,
    Regulariser,
    UniformNoise,
    Weights,
    identity_regulariser,
)
from namm.training.settings import TrainSettings
from namm.training.trainer import TrainResult, train

CHECKED = 256  # images on which a constraint is tried before any training


def train_map(
    mirror: MirrorMap,
    data: Images,
    constraint: Constraint,
    *,
    noise: NoiseLevel = UniformNoise(0.1),
    weights: Weights = Weights(),
    regulariser: Regulariser = identity_regulariser,
    settings: TrainSettings = TrainSettings(),
    validation: Images | None = None,
    folder: str | Path | None = None,
    floor_limit: float | None = 0.1,
    progress: bool = True,
) -> TrainResult:
    """Learn g and f on data that obey `constraint`; `mirror` is trained in place and ends with averaged weights.

    Before anything is spent, the constraint's contract and the data's own distance are checked.

    Args:
        mirror: The pair of maps.
        data: Images x (N, C, H, W): a tensor, a NumPy array, or an HDF5 data set, which is streamed if it does not fit.
        constraint: ℓ.
        noise: How far from g(x) f learns to come back: `UniformNoise(σ_max)`, or `FixedNoise(σ)`.
        weights: Weights of the terms of Eq. 1.
        regulariser: `identity_regulariser` (Eq. 5) or `gradient_regulariser`.
        settings: Budget, batch, rate, seed and the rest.
        validation: Held-out images.
        folder: Where to keep checkpoints, logs and, at the end, the maps (`folder/mirror`); see `train`.
        floor_limit: Refuse data whose mean ℓ exceeds this fraction of their ℓ with a little noise added; None accepts
            any.
        progress: Show a progress bar.
    """
    _check_data(mirror, data, constraint, floor_limit)
    objective = MapObjective(mirror, constraint, noise=noise, weights=weights, regulariser=regulariser)
    described = _describe(mirror, constraint, noise, weights, data) | {
        "regulariser": getattr(regulariser, "__name__", repr(regulariser))
    }
    held_out = None if validation is None else (validation,)
    return _train(objective, mirror, (data,), held_out, described, settings, folder, "map", progress)


def finetune_map(
    mirror: MirrorMap,
    data: Images,
    samples: Images,
    constraint: Constraint,
    *,
    noise: NoiseLevel = UniformNoise(0.1),
    weights: Weights = Weights(),
    settings: TrainSettings = TrainSettings(),
    validation: tuple[Images, Images] | None = None,
    folder: str | Path | None = None,
    floor_limit: float | None = 0.1,
    progress: bool = True,
) -> TrainResult:
    """Train f further, with g frozen, on `samples` of a generative model in mirror space (Eq. 7).

    Args:
        mirror: The trained pair; f is changed in place.
        data: Images x (N, C, H, W), for the first cycle term.
        samples: Mirror images ỹ (M, C, H, W) that the model produced.
        validation: Held-out images and held-out samples.

    The other arguments are those of `train_map`; `weights.regulariser` is not used.
    """
    _check_data(mirror, data, constraint, floor_limit)
    check_images(samples, "samples")
    if samples.shape[1:] != data.shape[1:]:
        raise DataError(
            f"samples are {tuple(samples.shape[1:])} but the data are {tuple(data.shape[1:])}: they must agree."
        )
    trainable = [p for p in mirror.g.parameters() if p.requires_grad]
    objective = FinetuneObjective(mirror, constraint, noise=noise, weights=weights)
    described = _describe(mirror, constraint, noise, weights, data) | {
        "samples": fingerprint(samples),
        "start": weights_digest(mirror),
    }
    try:
        return _train(objective, mirror, (data, samples), validation, described, settings, folder, "finetune", progress)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _train(
    objective: MapObjective | FinetuneObjective,
    mirror: MirrorMap,
    data: tuple[Images, ...],
    validation: tuple[Images, ...] | None,
    description: Mapping[str, Any],
    settings: TrainSettings,
    folder: str | Path | None,
    title: str,
    progress: bool,
) -> TrainResult:
    result = train(
        objective,
        data,
        settings,
        validation=validation,
        folder=folder,
        description=description,
        after_step=project_weights(mirror),
        title=title,
        progress=progress,
    )
    processes = PartialState()
    if folder is not None and processes.is_main_process:
        _save(mirror, Path(folder) / "mirror")
    processes.wait_for_everyone()
    return result


def _save(mirror: MirrorMap, folder: Path) -> None:
    """Write the trained pair, whole or not at all; networks that cannot save themselves remain in the checkpoint."""
    if folder.exists() or not mirror.can_save:
        return
    partial = folder.with_name(".mirror.partial")
    shutil.rmtree(partial, ignore_errors=True)
    mirror.save(partial)
    rename_durably(partial, folder)


def project_weights(mirror: MirrorMap) -> Callable[[], None]:
    """What to call after every update: ICNNs set their negative weights back to zero."""
    icnns = [module for module in mirror.modules() if isinstance(module, ICNN)]

    def project() -> None:
        for icnn in icnns:
            icnn.project_weights()

    return project


def _check_data(mirror: MirrorMap, data: Images, constraint: Constraint, floor_limit: float | None) -> None:
    """Everything that can be wrong with maps, data and constraint, before training starts."""
    check_images(data)
    some = to_tensor(data[:CHECKED])
    report = constraint.check(some)
    if floor_limit is not None:
        report.require_obeyed(floor_limit)
    with torch.no_grad():
        one = some[:1].to(next(mirror.parameters()))
        y = mirror.to_mirror(one)
        x = mirror.to_data(y)
    for side, shape in (("g", y.shape), ("f", x.shape)):
        if shape != one.shape:
            raise DataError(
                f"{side} turns an image of {tuple(one.shape[1:])} into {tuple(shape[1:])}: it must keep the shape."
            )


def _describe(
    mirror: MirrorMap, constraint: Constraint, noise: NoiseLevel, weights: Weights, data: Images
) -> dict[str, Any]:
    """What tells one training of a map from another."""
    return {
        "g": describe_network(mirror.g),
        "f": describe_network(mirror.f),
        "constraint": repr(constraint),
        "noise": repr(noise),
        "weights": repr(weights),
        "data": fingerprint(data),
    }
