"""Training a mirror map: the public calls `train_map` (paper Eq. 1) and `finetune_map` (Eq. 7)."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from namm.constraints import Constraint, ConstraintReport
from namm.constraints.base import as_rule
from namm.constraints.contract import check_at, unusual
from namm.datasets.batches import Images, check_images, check_values, to_tensor
from namm.distributed import process_state
from namm.errors import CheckpointError, DataError, NammWarning
from namm.evaluation.scores import measure_images, ratio
from namm.evaluation.verdict import Watched
from namm.files import publish
from namm.maps import MirrorMap
from namm.maps.icnn import project_weights
from namm.numerics import arithmetic, at_least_float32
from namm.training.checkpoint import describe_network, fingerprint, name_of, read, weights_digest
from namm.training.objectives import (
    FinetuneObjective,
    MapObjective,
    ModelErrors,
    Noise,
    Regulariser,
    UniformNoise,
    Weights,
    identity_regulariser,
)
from namm.training.settings import TrainSettings
from namm.training.trainer import TrainResult, Watch, train
from namm.training.tune import OTHERS, Tuning, build_mirror, calibrate, chosen_once, tune

Rule = Constraint | Callable[[Tensor], Tensor]

CHECKED = 256  # images on which a constraint is tried before any training
WATCHED = 512  # images, and samples, by which a finetuned f is judged
CHUNK = 64  # images that go through a map together when it is measured
MAP_SETTINGS = TrainSettings(
    budget="500 steps", learning_rate=1e-3, schedule="cosine", warmup_steps=20, clip=1.0, ema_decay=0.99
)
"""How a map is trained where nothing is said: minutes on a CPU."""


@dataclass(frozen=True)
class MapResult(TrainResult):
    """What the training of a map did.

    Attributes:
        mirror: The trained maps.
        tuning: How σ_max and λ were chosen; None where both were given.
    """

    mirror: MirrorMap = field(kw_only=True)
    tuning: Tuning | None = field(kw_only=True, default=None)


@overload
def train_map(
    data: Images, constraint: Rule, mirror: MirrorMap | None = None, **options: Unpack["MapOptions"]
) -> MapResult: ...
@overload
def train_map(data: MirrorMap, constraint: Images, mirror: Rule, **options: Unpack["MapOptions"]) -> MapResult: ...
def train_map(data: Any, constraint: Any, mirror: Any = None, **options: Unpack["MapOptions"]) -> MapResult:
    """Learn g and f on data that obey `constraint`; `mirror` is trained in place and ends with averaged weights.

    `train_map(images, rule)` builds the maps and chooses their numbers (`namm.training.tune`); the result has them as
    `mirror`. Maps that are given, third or, as `train_map(mirror, images, rule)`, first, keep their size.

    Before anything is spent, the constraint's contract and the data's own distance are checked, and whether ℓ notices
    the noise at all. σ_max and λ far from usual ones are warned of.

    Args:
        data: Images x (N, C, H, W): a tensor, a NumPy array, or an HDF5 data set, which is streamed if it does not fit.
        constraint: ℓ. A rule with weights or buffers is frozen, and moved to the device of the training, in place.
        mirror: The pair of maps; None builds `build_mirror(data)`.
        options: See `MapOptions`.
    """
    if isinstance(data, MirrorMap):
        data, constraint, mirror = constraint, mirror, data
    if mirror is None:
        check_images(data)
        mirror = build_mirror(data)
    return _train_map(mirror, data, constraint, **options)


class MapOptions(TypedDict, total=False):
    """Options of `train_map`.

    Attributes:
        noise: How far from g(x) f learns to come back: `ModelErrors(σ_max)`, or, as in the paper, `UniformNoise(σ_max)`
            or `FixedNoise(σ)`; chosen by measurement where it is left out.
        weights: Weights of the terms of Eq. 1; λ is chosen by measurement where they are left out.
        regulariser: `gradient_regulariser`, as published, or `identity_regulariser` (Eq. 5). None takes the latter
            where λ is chosen; else the former where g is an ICNN, and Eq. 5 for any other g, which has no potential.
        settings: Budget, batch, rate, seed and the rest.
        validation: Held-out images.
        folder: Where to keep checkpoints, logs and, at the end, the maps (`folder/mirror`); see `train`.
        floor_limit: Refuse data whose mean ℓ exceeds this fraction of their ℓ with a little noise added; None accepts
            any.
        progress: Show a progress bar.
    """

    noise: Noise | None
    weights: Weights | None
    regulariser: Regulariser | None
    settings: TrainSettings
    validation: Images | None
    folder: str | Path | None
    floor_limit: float | None
    progress: bool


def _train_map(
    mirror: MirrorMap,
    data: Images,
    constraint: Rule,
    *,
    noise: Noise | None = None,
    weights: Weights | None = None,
    regulariser: Regulariser | None = None,
    settings: TrainSettings = MAP_SETTINGS,
    validation: Images | None = None,
    folder: str | Path | None = None,
    floor_limit: float | None = 0.1,
    progress: bool = True,
) -> MapResult:
    rule = as_rule(constraint)
    report = _check_data(mirror, data, rule, floor_limit)
    tuning = None
    if noise is None or weights is None:
        weight = None if weights is None else weights.constraint
        choose = partial(tune, mirror, data, rule, noise=noise, weight=weight, seed=settings.seed, progress=progress)
        tuning = chosen_once(None if folder is None else Path(folder), choose)
        noise = noise or ModelErrors(tuning.sigma)
        if weights is None:
            weights, regulariser = replace(OTHERS, constraint=tuning.weight), regulariser or identity_regulariser
    _check_noise(mirror, rule, data, noise.maximum, weights.constraint)
    calibrate(mirror, data, rule, noise, settings.seed)
    objective = MapObjective(mirror, rule, noise=noise, weights=weights, regulariser=regulariser)
    described = _describe(mirror, rule, report, noise, weights, data) | {"regulariser": name_of(objective.regulariser)}
    held_out = None if validation is None else (validation,)
    result = _train(objective, mirror, (data,), held_out, described, settings, folder, "map", progress)
    return MapResult(**vars(result), mirror=mirror, tuning=tuning)


def finetune_map(
    mirror: MirrorMap,
    data: Images,
    samples: Images,
    constraint: Constraint | Callable[[Tensor], Tensor],
    *,
    noise: Noise = UniformNoise(0.1),
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
        validation: Held-out images and held-out samples. With them f is watched (`FinetuneWatch`): the best f is kept,
            which may be the one it began with, and a collapse ends the training.

    The other arguments are those of `train_map`; `weights.regulariser` is not used.
    """
    rule = as_rule(constraint)
    report = _check_data(mirror, data, rule, floor_limit)
    check_images(samples, "samples")
    if samples.shape[1:] != data.shape[1:]:
        raise DataError(
            f"samples are {tuple(samples.shape[1:])} but the data are {tuple(data.shape[1:])}: they must agree."
        )
    trainable = [p for p in mirror.g.parameters() if p.requires_grad]
    objective = FinetuneObjective(mirror, rule, noise=noise, weights=weights)
    watch = None if validation is None else FinetuneWatch(mirror, rule, *validation)
    described = _describe(mirror, rule, report, noise, weights, data) | {
        "samples": fingerprint(samples),
        "start": weights_digest(mirror.g),  # f is trained in place: its start is not known to a second call
    }
    try:
        return _train(
            objective, mirror, (data, samples), validation, described, settings, folder, "finetune", progress, watch
        )
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
    watch: Watch | None = None,
) -> TrainResult:
    result = train(
        objective,
        data,
        settings,
        validation=validation,
        folder=folder,
        description=description,
        after_step=project_weights(mirror),
        watch=watch,
        title=title,
        progress=progress,
    )
    processes = process_state()
    if folder is not None and processes.is_main_process:
        _save(mirror, Path(folder) / "mirror")
    processes.wait_for_everyone()
    return replace(result, averages=result.averages_of("mirror"))


class FinetuneWatch:
    """Judges f while it is finetuned by ℓ, cycle error, total variation and spread together.

    f is closest to the rule where every image is the same; so an f is kept only if its samples are as varied as the
    data, or as those of the f it began with, and if it still inverts g (`namm.evaluation.verdict.Watched`).

    Args:
        mirror: The pair whose f is trained.
        rule: ℓ.
        images: Held-out images x.
        samples: Held-out mirror images ỹ of the generative model.
    """

    def __init__(self, mirror: MirrorMap, rule: Constraint, images: Images, samples: Images) -> None:
        self.mirror, self.rule = mirror, rule
        self.images, self.samples = (to_tensor(each[:WATCHED]) for each in (images, samples))
        self.data = measure_images(self.images, name="validation images")

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Measure ℓ, total variation and spread of f(ỹ) and the error of f(g(x)); an f that overflows has collapsed."""
        device = next(self.mirror.f.parameters()).device
        with arithmetic("fp32", device):
            made = [at_least_float32(self.mirror.to_data(y.to(device))) for y in self.samples.split(CHUNK)]
            pairs = ((x.to(device), self.mirror.to_mirror(x.to(device))) for x in self.images.split(CHUNK))
            error = sum(float((x - self.mirror.to_data(y)).abs().double().sum()) for x, y in pairs)
        cycle_error = ratio(error, float(self.images.abs().double().sum()))
        x = torch.cat(made)
        if not torch.isfinite(x).all():
            return asdict(Watched(float("inf"), cycle_error, float("inf"), float("inf")))
        found = measure_images(x, self.rule)
        return asdict(Watched(float(found.distances.mean()), cycle_error, *found.against(self.data)))

    def improves(self, figures: Mapping[str, float], best: Mapping[str, float], start: Mapping[str, float]) -> bool:
        """Whether this f is to be kept instead of the best."""
        return Watched(**figures).improves(Watched(**best), Watched(**start))

    def has_collapsed(self, figures: Mapping[str, float], start: Mapping[str, float]) -> bool:
        """Whether f has lost the images that it had at the start."""
        return Watched(**figures).has_collapsed(Watched(**start))


def _save(mirror: MirrorMap, folder: Path) -> None:
    """Write the trained pair, whole or not at all; networks that cannot save themselves remain in the checkpoint."""
    if not mirror.can_save:
        return
    with suppress(CheckpointError):  # none is there, or a damaged one
        if weights_digest(MirrorMap.load(folder)) == weights_digest(mirror):
            return
    partial = folder.with_name(".mirror.partial")
    shutil.rmtree(partial, ignore_errors=True)
    mirror.save(partial)
    shutil.rmtree(folder, ignore_errors=True)
    publish(partial, folder)


def load_weights(mirror: MirrorMap, path: str | Path, decay: float | None = None) -> None:
    """Give `mirror` the averaged weights of a checkpoint or milestone of its training.

    With `decay`, one of the training's `averages`, those of that average, which checkpoints hold.
    """
    tensors = read(Path(path)).tensors
    prefix = "ema/mirror." if any(name.startswith("ema/") for name in tensors) else "mirror."
    if decay is not None:
        prefix = f"averages/{decay}/mirror."
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    unknown = mirror.load_state_dict(state, strict=False).unexpected_keys  # what was frozen is not in the file
    if unknown or not state:
        raise CheckpointError(f"{path} is not of this map: {', '.join(unknown[:3]) or 'it holds no map at all'}.")


def _check_data(mirror: MirrorMap, data: Images, rule: Constraint, floor_limit: float | None) -> ConstraintReport:
    """Everything that can be wrong with maps, data and constraint, before training starts."""
    _warn(check_values(data))
    some = to_tensor(data[:CHECKED])
    report = rule.eval().check(some)
    if floor_limit is not None:
        report.require_obeyed(floor_limit)
    with torch.no_grad():
        one = some[:1].to(next(mirror.parameters(), some))
        y = mirror.to_mirror(one)
        x = mirror.to_data(y)
    for side, shape in (("g", y.shape), ("f", x.shape)):
        if shape != one.shape:
            raise DataError(
                f"{side} turns an image of {tuple(one.shape[1:])} into {tuple(shape[1:])}: it must keep the shape."
            )
    return report


def _check_noise(mirror: MirrorMap, rule: Constraint, data: Images, sigma: float, weight: float) -> None:
    """Refuse a rule that does not notice noise of σ_max; warn of a σ_max or λ far from usual ones."""
    if sigma <= 0 or weight == 0:  # the rule is only measured
        return
    x = to_tensor(data[:CHECKED])
    report = rule.check(x, noise=sigma) if mirror.standardisation else check_at(rule, x, sigma)
    _warn(unusual(report.require_active(), sigma, weight))


def _warn(sentences: list[str]) -> None:
    if process_state().is_main_process:
        for sentence in sentences:
            warnings.warn(sentence, NammWarning, stacklevel=4)


def _describe(
    mirror: MirrorMap, rule: Constraint, report: ConstraintReport, noise: Noise, weights: Weights, data: Images
) -> dict[str, Any]:
    """What tells one training of a map from another; a rule also by what it measures, since its code may change."""
    return {
        "g": describe_network(mirror.g),
        "f": describe_network(mirror.f),
        "constraint": name_of(rule),
        "constraint weights": weights_digest(rule),
        "constraint on noisy data": f"{report.noisy_mean:.3g}, gradient {report.gradient_norm:.3g}",
        "noise": name_of(noise),
        "weights": repr(weights),
        **({"squared": weights.squared} if weights.squared else {}),
        "standardisation": mirror.standardisation,
        "data": fingerprint(data),
    }
