"""Samples of the images that a measurement allows, under a learned prior: DPS, mirror DPS, CG-DPS (paper Sec. 4.2).

    y ← a D + b y + shift + c z,      D = E[y(0) | y(t)],   z ~ N(0, I)

a, b and c come from the table of a sampler (`namm.generative.samplers`), the shift from the measurement
(`namm.inverse.guidance`). Everything is standardised but what `to_data` takes and gives. The prior is a `Mirrored`
diffusion: with `IdentityMap` this is DPS, with a learned map mirror DPS, and nothing here knows which; a constraint in
the guidance makes it CG-DPS.

A sample that diverges is drawn again with a smaller step. The new draw starts from the same noise, so a sample depends
on (seed, number, step) here too. Nothing is dropped: a sample that diverges at the smallest step too is NaN, and every
redraw is counted.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import DataError, UsageError
from namm.exact.certificate import Certificate
from namm.generative import Mirrored
from namm.generative.base import BatchNoise, Seeds, evaluating, sample_in_batches, sampling_bar
from namm.generative.samplers import DDIM, Ancestral, Process, Step, Steps, start
from namm.inverse.guidance import DPSGuidance, Evidence, Guess, Guidance, LikelihoodGuidance
from namm.inverse.noise import GaussianNoise
from namm.inverse.operators import Operator
from namm.numerics import at_least_float32

DIVERGED_BEYOND = 1e4
"""Standard deviations of the data beyond which a state has diverged, though it may still be finite."""

ToData = Callable[[Tensor], Tensor]
"""f, (B, C, H, W) → (B, C, H, W)."""


@dataclass(frozen=True)
class AncestralSteps(Ancestral):
    """The steps of `Ancestral`, with the marginals of the continuous diffusion; the paper's number by default."""


@dataclass(frozen=True)
class DDIMSteps(DDIM):
    """The steps of `DDIM`, to take fewer than a thousand; by default with all the noise of ancestral ones."""

    eta: float = 1.0


DEFAULT_GUIDANCE, PAPER_SAMPLER = DPSGuidance(), AncestralSteps(1000)


class DiffusionPrior(Process, Protocol):
    """What posterior sampling needs of a model, as `namm.Diffusion` has it; `is_prior` checks it."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""

    @property
    def mean(self) -> Tensor:
        """Mean of the standardisation, (C, 1, 1), on the model's device and in its precision."""

    def unstandardise(self, u: Tensor) -> Tensor:
        """From the space of the diffusion to mirror space."""


def is_prior(model: object) -> TypeGuard[DiffusionPrior]:
    """Whether `model` has what `DiffusionPrior` names; `isinstance` would not see buffers from Python 3.12 on."""
    needed = ("sde", "t_min", "denoise", "score", "sample_shape", "mean", "unstandardise")
    return all(hasattr(model, name) for name in needed)


def guided_step(
    y_t: Tensor, step: Step, model: DiffusionPrior, to_data: ToData, guidance: Guidance, evidence: Evidence
) -> Tensor:
    """a D + b y + shift, without the noise: (B, C, H, W)."""
    with torch.enable_grad():
        y_t = y_t.detach().requires_grad_()
        denoised = model.denoise(y_t, y_t.new_full((len(y_t),), step.t))
        x = to_data(model.unstandardise(denoised))
        shift = guidance.shift(Guess(y_t, denoised, x, step), evidence)
    return (step.without_noise(y_t, denoised) + shift).detach()


def reverse(
    model: DiffusionPrior,
    to_data: ToData,
    steps: Steps,
    guidance: Guidance,
    evidence: Evidence,
    noise: Callable[[int], Tensor],
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """One batch from noise to t = 0, standardised: (B, C, H, W). Samples that diverge are NaN and touch no other."""
    y = start(model, noise)
    alive = _bounded(y)
    for k, step in enumerate(steps.table(model)):
        y = guided_step(y, step, model, to_data, guidance, evidence)
        if step.noise > 0:
            y = y + step.noise * noise(k + 1)
        alive = alive & _bounded(y)
        y = _keep(alive, y, 0.0)
        tick()
    return _keep(alive, y)


def _bounded(y: Tensor) -> Tensor:
    """Whether each standardised image is within `DIVERGED_BEYOND`, which NaN is not: (B, …) → (B,)."""
    return (y.abs() <= DIVERGED_BEYOND).flatten(1).all(1)


def _finite(images: Tensor) -> Tensor:
    """Whether each image is finite: (B, …) → (B,)."""
    return images.isfinite().flatten(1).all(1)


def _keep(good: Tensor, images: Tensor, otherwise: float = torch.nan) -> Tensor:
    """The images where `good` (B,), `otherwise` in place of the others."""
    return torch.where(good.reshape(-1, *[1] * (images.ndim - 1)), images, otherwise)


@dataclass(frozen=True, eq=False)
class Posterior:
    """n samples for each of M measurements. Samples that failed are NaN in every entry, and in their place.

    Attributes:
        samples: x = f(y): (M, n, C, H, W).
        mirror_samples: y, in mirror space (data space, if the map is the identity): (M, n, C, H, W).
        chi2: χ² of each sample: (M, n). That of the truth is about `measured`.
        distance: ℓ of each sample, if a constraint was given: (M, n).
        redrawn: How often each sample diverged and was drawn again with a smaller step: (M, n), whole numbers.
        failed: True where it diverged at the smallest step too: (M, n).
        measured: Number of values in a measurement.
        certificate: Of samples that `polish_posterior` moved, those that failed left out.
    """

    samples: Tensor
    mirror_samples: Tensor
    chi2: Tensor
    distance: Tensor | None
    redrawn: Tensor
    failed: Tensor
    measured: int
    certificate: Certificate | None = None

    def __str__(self) -> str:
        m, n = self.failed.shape
        lines = [
            f"{n} samples for each of {m} measurements of {self.measured} values",
            f"  χ² per value  mean {float(self.chi2.nanmean()) / self.measured:.3g}",
        ]
        if self.distance is not None:
            lines.append(f"  ℓ             mean {float(self.distance.nanmean()):.3g}")
        lines.append(f"  diverged      {int((self.redrawn > 0).sum())} redrawn, {int(self.failed.sum())} failed")
        if self.certificate is not None:
            lines += self.certificate.lines()
        return "\n".join(lines)


def sample_posterior(
    prior: Mirrored,
    measurement: Tensor,
    operator: Operator,
    noise: GaussianNoise,
    *,
    n: int = 1,
    guidance: Guidance = DEFAULT_GUIDANCE,
    steps: Steps = PAPER_SAMPLER,
    constraint: Constraint | None = None,
    retries: int = 3,
    batch_size: int = 64,
    generator: Seeds = None,
    first: int = 0,
    progress: bool = True,
) -> Posterior:
    """`n` samples for each of M measurements, on the model's device.

    The noise of sample i of measurement j depends on (seed, j n + i, step) only: M measurements at once give what M
    calls with `first=j * n` give, and `batch_size` and the number of processes change nothing. Under torchrun every
    process must call this; each makes its share and all get all samples. The operator and the rules are moved to the
    model's device.

    Args:
        prior: A `Mirrored` diffusion.
        measurement: m, (M, …): a batch, of one measurement at least.
        operator: A.
        noise: The distribution of m − A(x).
        n: Samples for each measurement.
        guidance: `DPSGuidance(zeta)`, with a constraint in it CG-DPS; or `LikelihoodGuidance.of(prior.model)`.
        steps: `AncestralSteps(1000)`, `DDIMSteps(100)` for fewer, `OfficialSteps()` to compare with the official code.
        constraint: Only measured, on the finished samples; to guide by it, give it to the guidance.
        retries: How often a sample that diverged is drawn again, each time with half the step.
        batch_size: Samples made together.
        generator: A seed, or a generator to draw it from; None draws it from torch's global one. A sequence gives every
            one of the M · n samples a seed of its own.
        first: Number of the first sample.
        progress: Show a progress bar, where there is a terminal.
    """
    model = prior.model
    if not is_prior(model):
        raise UsageError(
            f"posterior sampling needs a diffusion model, and the prior holds a {type(model).__name__}, which has no "
            "denoise(y_t, t)."
        )
    _check_arguments(measurement, operator, noise, n, retries)
    like, shape = at_least_float32(model.mean), model.sample_shape
    with evaluating(prior), evaluating(operator):
        mean_image = prior.mirror.to_data(model.unstandardise(like.new_zeros(1, *shape))).detach()
        evidence = Evidence(measurement.to(like), operator.to(like.device), noise)
        _check_evidence(evidence, mean_image)
        _check_rules(constraint, guidance, mean_image)
        count, pixels = len(measurement) * n, math.prod(shape)
        with sampling_bar(count, batch_size, steps.steps, progress) as bar:
            attempt = partial(_attempt, prior, model, steps, constraint, bar.advance)

            def draw(noise: BatchNoise) -> Tensor:
                """Turn the noise of a batch into its samples, a row each: what `_attempt` gives, then their redraws."""
                pull = guidance
                numbers = torch.arange(noise.start, noise.stop, device=like.device)
                measured = evidence.rows((numbers - first) // n)
                rows = attempt(pull, measured, noise)
                redrawn = rows.new_zeros(len(rows), 1)
                for _ in range(retries):
                    diverged = rows[:, 0].isnan().nonzero().flatten()
                    if len(diverged) == 0:
                        break
                    pull = pull.smaller()
                    redrawn[diverged] += 1
                    bar.extend(steps.steps)
                    rows[diverged] = attempt(pull, measured.rows(diverged), partial(_some, noise, diverged))
                return torch.cat([rows, redrawn], 1)

            rows = sample_in_batches(
                draw,
                count,
                (2 * pixels + 3,),
                noise_shape=shape,
                like=like,
                batch_size=batch_size,
                generator=generator,
                first=first,
            )
    y, x, chi2, distance, redrawn = rows.unflatten(0, (-1, n)).split([pixels, pixels, 1, 1, 1], -1)
    failed = chi2[..., 0].isnan()
    if failed.any():
        warnings.warn(
            f"{int(failed.sum())} of {count} samples diverged {retries + 1} times and are NaN; see `failed`. "
            "Use a smaller zeta or more steps.",
            stacklevel=2,
        )
    return Posterior(
        samples=x.unflatten(-1, shape),
        mirror_samples=y.unflatten(-1, shape),
        chi2=chi2[..., 0],
        distance=None if constraint is None else distance[..., 0],
        redrawn=redrawn[..., 0].long(),
        failed=failed,
        measured=measurement[0].numel(),
    )


def _check_arguments(measurement: object, operator: object, noise: object, n: int, retries: int) -> None:
    """Refuse arguments of another kind."""
    if not isinstance(operator, Operator):
        raise UsageError(f"{operator!r} is not an Operator; make one of a function with namm.inverse.operator(fn).")
    if not isinstance(measurement, Tensor):
        raise UsageError(f"the measurement must be a tensor (M, …), not {type(measurement).__name__}: torch.as_tensor.")
    if not isinstance(noise, GaussianNoise):
        raise UsageError(f"the noise must be a GaussianNoise, such as GaussianNoise(std=0.1), not {noise!r}.")
    if n < 1 or retries < 0:
        raise UsageError(f"n must be at least 1 and retries at least 0, not {n} and {retries}.")


def _check_evidence(evidence: Evidence, image: Tensor) -> None:
    """Refuse a measurement or an operator that cannot be used, before any compute is spent."""
    operator, measurement = evidence.operator, evidence.measurement
    with torch.enable_grad():
        simulated = operator(image.clone().requires_grad_())
    if measurement.ndim < 1 or len(measurement) < 1 or measurement.shape[1:] != simulated.shape[1:]:
        needed = ", ".join(map(str, simulated.shape[1:]))
        raise DataError(
            f"measurements of shape {tuple(measurement.shape)} were given; {operator.name} makes (M, {needed}) from M "
            f"images {tuple(image.shape[1:])}. A single measurement needs its batch axis: measurement[None]."
        )
    if not measurement.isfinite().all():
        bad = int((~measurement.isfinite()).sum())
        raise DataError(
            f"the measurement holds {bad} values that are NaN or inf; leave out what was not observed, with a Mask."
        )
    if not simulated.requires_grad:
        raise UsageError(
            f"{operator.name} breaks the autograd graph: its output does not depend on the image differentiably. "
            "Remove torch.no_grad, .detach(), .item() and numpy from it."
        )
    evidence.noise.whiten(simulated)  # refuses noise of another shape


def _check_rules(constraint: Constraint | None, guidance: Guidance, image: Tensor) -> None:
    """Bring the rules that measure and that guide to the image, and refuse one that does not fit it."""
    guiding = guidance.constraint if isinstance(guidance, DPSGuidance | LikelihoodGuidance) else None
    for rule in (constraint, guiding):
        if rule is None:
            continue
        if not isinstance(rule, Constraint):
            raise UsageError(f"{rule!r} is not a Constraint; make one of a function with namm.constraint(fn).")
        with torch.enable_grad():
            distance = rule.to(image.device)(image.clone().requires_grad_())
        if rule is guiding and not distance.requires_grad:
            raise UsageError(
                f"{rule.name} cannot guide: its distance does not depend on the image differentiably. "
                "Remove torch.no_grad, .detach(), .item() and numpy from it."
            )


@torch.no_grad()
def _attempt(
    prior: Mirrored,
    model: DiffusionPrior,
    steps: Steps,
    constraint: Constraint | None,
    tick: Callable[[], None],
    guidance: Guidance,
    evidence: Evidence,
    noise: Callable[[int], Tensor],
) -> Tensor:
    """One draw of a batch, a row per sample: y, x = f(y), χ², ℓ (0 without a rule); NaN where one is not finite."""
    y = model.unstandardise(reverse(model, prior.mirror.to_data, steps, guidance, evidence, noise, tick))
    x = prior.to_data(_keep(_finite(y), y, 0.0))
    chi2 = evidence.chi2(x)
    good = _finite(y) & _finite(x) & chi2.isfinite()
    distance = torch.zeros_like(chi2) if constraint is None else constraint(_keep(good, x, 0.0))
    return _keep(good, torch.cat([y.flatten(1), x.flatten(1), chi2[:, None], distance[:, None]], 1))


def _some(noise: Callable[[int], Tensor], rows: Tensor, step: int) -> Tensor:
    """The noise of some samples of a batch at a step."""
    return noise(step)[rows]
