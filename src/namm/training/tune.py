"""Numbers for a map that nobody has trained before, measured on the images and the rule.

    boundary   periodic along an axis whose last pixels resemble its first ones as neighbours do
    σ_max      where errors of that size break the rule as much as samples of a briefly trained plain model do
    λ          cost · σ_max / ℓ of such errors, the cost chosen by short trials of the map itself

Mirror space is in standard deviations of the data, so that σ_max is too. Trials take numbers of steps that depend on
the images' size alone, so that the same images and seed give the same numbers on every machine.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from namm.clock import clock
from namm.constraints import Constraint
from namm.datasets.batches import Images, to_tensor
from namm.digests import require_signed, signed
from namm.errors import CheckpointError, ConstraintError
from namm.evaluation import total_variation
from namm.files import as_json, write_json
from namm.generative import Diffusion, DPMSolver, NCSNpp, Velocity
from namm.maps import ICNN, MirrorMap, RuleNet
from namm.maps.icnn import project_weights
from namm.maps.layers import Boundary
from namm.numerics import fold, generator
from namm.progress import ProgressBar
from namm.reading import REASON, damage_as, load_json, typed
from namm.training.objectives import MapObjective, ModelErrors, Noise, Weights, identity_regulariser, perturb
from namm.training.settings import CHOSEN, CLOSENESS

LOOKED_AT = 256
"""Images that numbers are measured on."""
SIGMA, RANGE = 0.1, (0.03, 0.15)
"""σ_max where no model could be tried, and the bounds of what is chosen, in standard deviations of the data."""
COST, COSTS = 10.0, (3.0, 10.0, 30.0)
"""λ ℓ(errors of σ_max) / σ_max: where it is not tried, and what is tried."""
OTHERS = Weights(cycle=1.0, regulariser=CLOSENESS)
"""Weights of the other terms where λ is chosen."""
MODEL_WORK, TRIAL_WORK = 1.2e6, 2e5
"""Pixels, over all steps, of the brief model and of each trial of a map."""
CLEARLY = 0.8
"""Score over that of the usual cost that makes another one worth taking."""
LEAST = 1e-4
"""Share of ℓ below which what f leaves is no longer told apart."""
NEIGHBOURS = 1.5
"""Difference across a seam, over that of neighbours, up to which an axis is periodic."""


@dataclass(frozen=True)
class Trial:
    """A map trained for a few steps: what was tried and what came of it on held-out images.

    Attributes:
        cost: λ ℓ(errors of σ_max) / σ_max.
        left: What f leaves of the ℓ that errors of σ_max add.
        cycle_error: mean |u − f(g(u))| / mean |u|, images standardised.
        total_variation: Of f's images over the data's.
    """

    cost: float
    left: float
    cycle_error: float
    total_variation: float

    @property
    def score(self) -> float:
        """What is left of ℓ, the worse the further cycle error and total variation are from those of a useful map."""
        if not all(math.isfinite(value) and value > 0 for value in (self.left, self.total_variation)):
            return math.inf
        strain = max(1.0, self.cycle_error / 0.1) * max(1.0, abs(math.log(self.total_variation)) / math.log(1.5))
        return self.left * strain


@dataclass(frozen=True)
class Tuning:
    """Chosen numbers, and what they rest on.

    Attributes:
        sigma: σ_max in standard deviations of the data.
        weight: λ.
        unit: σ_max over ℓ of images with errors of σ_max: λ at a cost of one.
        distance_errors: mean ℓ of images with errors of σ_max.
        distance_samples: mean ℓ of the brief model's samples; None where σ_max was given.
        trials: What was tried for λ; empty where it was given.
        compute_seconds: What the choice took.
    """

    sigma: float
    weight: float
    unit: float
    distance_errors: float
    distance_samples: float | None
    trials: tuple[Trial, ...]
    compute_seconds: float

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def build_mirror(data: Images, *, filters: int = 24, blocks: int = 5) -> MirrorMap:
    """A mirror map for these images: standardised, with an f for rules of any reach and the boundary they have."""
    some = spread_rows(data, LOOKED_AT)
    channels, height, width = some.shape[1:]
    f = RuleNet(channels, height, width, filters=filters, blocks=blocks, boundary=find_boundary(some))
    return standardised(MirrorMap(ICNN(channels, layers=2, filters=16), f), data)


def standardised(mirror: MirrorMap, data: Images) -> MirrorMap:
    """`mirror`, its networks seeing images with the mean and standard deviation of `data`'s channels as 0 and 1."""
    pixels = spread_rows(data, 4 * LOOKED_AT).double().transpose(0, 1).flatten(1)
    scale = pixels.std(1)
    return mirror.standardise_by(pixels.mean(1), torch.where(scale > 0, scale, 1.0))


def spread_rows(data: Images, count: int) -> Tensor:
    """Up to `count` images spread evenly over the data, which may be sorted."""
    return to_tensor(data[np.unique(np.linspace(0, data.shape[0] - 1, count).astype(np.int64))])


def find_boundary(x: Tensor) -> Boundary:
    """The boundary of images x (N, C, H, W), by the axes along which the last pixels are neighbours of the first."""

    def is_periodic(axis: int) -> bool:
        seam = (x.narrow(axis, 0, 1) - x.narrow(axis, x.shape[axis] - 1, 1)).abs().mean()
        return bool(seam <= NEIGHBOURS * x.diff(dim=axis).abs().mean())

    if not is_periodic(-2):
        return "zeros"
    return "circular" if is_periodic(-1) else "cylinder"


def calibrate(mirror: MirrorMap, data: Images, rule: Constraint, noise: Noise, seed: int = 0) -> None:
    """Show f's global part what the rule looks at and how large its statistics are, where it has such a part."""
    if not isinstance(mirror.f, RuleNet) or mirror.f.is_calibrated:
        return
    device = next(mirror.parameters()).device
    u = mirror.standardise(spread_rows(data, 2 * LOOKED_AT).to(device))
    rng = generator(seed, "calibrate", device=device)
    largest = _with_errors(u[::2], noise, rng, torch.full((), noise.maximum, device=device))
    gradients = torch.cat([_gradient(rule, mirror, part) for part in largest.split(64)])
    with torch.no_grad():
        y = torch.cat([mirror.g(part) for part in u.split(64)])
        mirror.f.calibrate(_with_errors(y, noise, rng), gradients)


def tune(
    mirror: MirrorMap,
    data: Images,
    rule: Constraint,
    *,
    noise: Noise | None = None,
    weight: float | None = None,
    weights: Weights = OTHERS,
    seed: int = 0,
    trials: bool = True,
    progress: bool = False,
) -> Tuning:
    """Choose σ_max, unless `noise` is given, and λ, unless `weight` is.

    Args:
        mirror: The map, which is not changed.
        data: Images x (N, C, H, W).
        rule: ℓ.
        noise: How errors are drawn; None chooses `ModelErrors` of a measured size.
        weight: λ.
        weights: Weights of the other terms, for the trials.
        seed: Decides all draws.
        trials: Whether to try several costs; without, λ is that of the usual one.
        progress: Show how many of the trials are done.
    """
    device = next(mirror.parameters()).device
    start = clock(device)
    x = spread_rows(data, 4 * LOOKED_AT).to(device)
    some = x[::4]
    distance_samples = None
    count = (noise is None) + len(COSTS) * (weight is None and trials)
    with ProgressBar("trials for σ_max and λ", count, visible=progress and count > 0) as bar:
        if noise is None:
            distance_samples = _distance_of_samples(mirror, x, rule, seed)
            bar.advance()
            spread = 1.0 if mirror.standardisation else float(x.std())  # σ_max is in the units of mirror space
            noise = ModelErrors(_matching_size(mirror, some, rule, distance_samples, spread, seed))
        errors = distance_of_errors(mirror, some, rule, noise, seed)
        if not errors > 0:
            raise ConstraintError(
                f"{rule.name} does not notice errors of σ_max = {noise.maximum:g}: ℓ is {errors:.3g} with them. Check "
                "its thresholds and units against the data, or take larger errors (noise)."
            )
        unit = float(f"{noise.maximum / errors:.3g}")
        tried: tuple[Trial, ...] = ()
        if weight is None:
            for each in COSTS if trials else ():
                tried += (_trial(mirror, x, rule, noise, replace(weights, constraint=each * unit), each, seed),)
                bar.advance()
            weight = _best_cost(tried) * unit
    return Tuning(noise.maximum, weight, unit, errors, distance_samples, tried, clock(device) - start)


def _best_cost(tried: tuple[Trial, ...]) -> float:
    """The usual cost, unless another one was tried and is clearly better."""
    usual = next((trial for trial in tried if trial.cost == COST), None)
    best = min(tried, key=lambda trial: trial.score, default=None)
    return best.cost if best and usual and best.score < CLEARLY * usual.score else COST


def chosen_once(folder: Path | None, choose: Callable[[], Tuning]) -> Tuning:
    """What was chosen when the training in `folder` was begun, or is chosen now, by the main process for all.

    A training that goes on must have the numbers that it began with, and another GPU may round otherwise.
    """
    path = None if folder is None else folder / CHOSEN
    kept = path is not None and path.exists()
    tuning = _read(path) if path is not None and kept else choose()
    if PartialState().num_processes > 1:
        choice = [tuning]
        broadcast_object_list(choice)
        tuning = choice[0]
    is_new = folder is not None and not kept and not (folder.is_dir() and any(folder.iterdir()))
    if path is not None and is_new and PartialState().is_main_process:
        write_json(path, signed(as_json(tuning.as_json())))
    return tuning


def _read(path: Path) -> Tuning:
    remedy = "remove the folder and train anew."
    with damage_as(CheckpointError, f"{path} cannot be read ({REASON}): {remedy}"):
        values = require_signed(path, load_json(path), remedy, CheckpointError)
        return typed(Tuning, {**values, "trials": tuple(typed(Trial, trial) for trial in values["trials"])})


@torch.no_grad()
def distance_of_errors(mirror: MirrorMap, x: Tensor, rule: Constraint, noise: Noise, seed: int = 0) -> float:
    """Mean ℓ of images x (N, C, H, W) with errors of σ_max."""
    rng = generator(seed, "errors", device=x.device)
    sigma = torch.full((), noise.maximum, device=x.device)
    return _mean_distance(rule, mirror.unstandardise(_with_errors(mirror.standardise(x), noise, rng, sigma)))


def _with_errors(u: Tensor, noise: Noise, rng: torch.Generator, sigma: Tensor | None = None) -> Tensor:
    errors = noise.errors(u, rng)
    return perturb(u, noise(u, rng) if sigma is None else sigma, *errors)


@torch.no_grad()
def _mean_distance(rule: Constraint, x: Tensor) -> float:
    return float(torch.cat([rule(part) for part in x.split(64)]).double().mean())


def _gradient(rule: Constraint, mirror: MirrorMap, u: Tensor) -> Tensor:
    """∇ℓ at standardised images u, in their units."""
    u = u.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(rule(mirror.unstandardise(u)).sum(), u)
    return gradient


def _matching_size(
    mirror: MirrorMap, x: Tensor, rule: Constraint, target: float | None, spread: float, seed: int
) -> float:
    """σ_max at which errors have the target ℓ, by bisection on a logarithmic scale, within `RANGE` of the spread."""
    if target is None:
        return SIGMA * spread
    low, high = (spread * end for end in RANGE)
    for _ in range(8):
        middle = math.sqrt(low * high)
        if distance_of_errors(mirror, x, rule, ModelErrors(middle), seed) < target:
            low = middle
        else:
            high = middle
    return float(f"{math.sqrt(low * high):.2g}")


def _distance_of_samples(mirror: MirrorMap, x: Tensor, rule: Constraint, seed: int) -> float | None:
    """Mean ℓ of samples of a small diffusion model, trained for seconds; None where it makes none."""
    u = mirror.standardise(x)
    shape = (int(u.shape[1]), int(u.shape[2]), int(u.shape[3]))
    if min(shape[1:]) < 8 or any(size % 4 for size in shape[1:]):
        return None  # the network halves images twice
    batch, rng = 16, generator(seed, "brief model", device=u.device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(fold(seed, "brief model"))
        network = NCSNpp(
            shape[0], shape[1], filters=32, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0, unshuffle=2
        )
    model = Diffusion(network, shape, prediction=Velocity()).to(u.device)
    model.fit_statistics(u)
    batches = _batches(u, batch, _steps(MODEL_WORK, u, batch), seed)
    _descend(model.parameters(), (model.loss(each, *model.draw(each, rng)) for each in batches), rate=2e-3)
    with torch.no_grad():
        samples = model.eval().sample(32, generator=seed, sampler=DPMSolver(10), progress=False).to(u.device)
        return _mean_distance(rule, mirror.unstandardise(samples)) if torch.isfinite(samples).all() else None


def _trial(
    mirror: MirrorMap, x: Tensor, rule: Constraint, noise: Noise, weights: Weights, cost: float, seed: int
) -> Trial:
    """Train a copy of the map for a few steps and measure it on images that it was not trained on."""
    trial, batch = copy.deepcopy(mirror), 8
    calibrate(trial, x, rule, noise, seed)
    objective = MapObjective(trial, rule, noise=noise, weights=weights, regulariser=identity_regulariser)
    rng = generator(seed, "trial", device=x.device)
    rows = _batches(x[: len(x) - len(x) // 4], batch, _steps(TRIAL_WORK, x, batch), seed)
    project = project_weights(trial)

    def losses() -> Iterator[Tensor]:
        for each in rows:
            project()
            yield objective(each, *objective.draw((each,), rng))["loss"]

    _descend((p for p in trial.parameters() if p.requires_grad), losses(), rate=1e-3)
    project()
    with torch.no_grad():
        held_out = x[-max(1, len(x) // 4) :][:64]
        floor = _mean_distance(rule, held_out)
        added = distance_of_errors(trial, held_out, rule, noise, seed) - floor
        u = trial.standardise(held_out)
        y = trial.g(u)
        mapped = trial.f(_with_errors(y, noise, rng, torch.full((), noise.maximum, device=x.device)))
        left = max((_mean_distance(rule, trial.unstandardise(mapped)) - floor) / max(added, 1e-30), LEAST)
        cycle = float((u - trial.f(y)).abs().mean() / u.abs().mean())
        variation = float(total_variation(mapped).mean() / total_variation(u).mean().clamp_min(1e-30))
    return Trial(cost, left, cycle, variation)


def _steps(work: float, u: Tensor, batch: int) -> int:
    return max(10, min(80, round(work / (batch * u[0].numel()))))


def _batches(u: Tensor, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    rng = generator(seed, "brief batches")
    for _ in range(steps):
        yield u[torch.randint(len(u), (batch,), generator=rng).to(u.device)]


def _descend(parameters: Iterator[nn.Parameter], losses: Iterator[Tensor], rate: float) -> None:
    """Adam with clipped gradients, for as long as there are losses."""
    trained = list(parameters)
    optimiser = torch.optim.Adam(trained, rate, betas=(0.9, 0.99))
    for loss in losses:
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
