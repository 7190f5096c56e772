"""Samples of the images that a measurement allows, under a learned prior: DPS, mirror DPS, CG-DPS (paper Sec. 4.2).

The prior is a `Mirrored` diffusion. With `IdentityMap` this is DPS, with a learned map mirror DPS, and nothing here
knows which; a constraint in the guidance makes it CG-DPS.
"""

import math
import warnings

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import DataError, UsageError
from namm.generative import Mirrored
from namm.generative.base import evaluating
from namm.generative.noise import sample_in_batches
from namm.generative.progress import bar_over
from namm.inverse.guidance import DPSGuidance, Evidence, Guidance
from namm.inverse.likelihood import LikelihoodGuidance
from namm.inverse.noise import GaussianNoise
from namm.inverse.operators import Operator
from namm.inverse.posterior import Posterior
from namm.inverse.redraw import Draw
from namm.inverse.reverse import finite, is_prior, keep
from namm.inverse.steps import AncestralSteps, Steps
from namm.numerics import at_least_float32

DEFAULT_GUIDANCE, PAPER_STEPS = DPSGuidance(), AncestralSteps(1000)


def sample_posterior(
    prior: Mirrored,
    measurement: Tensor,
    operator: Operator,
    noise: GaussianNoise,
    *,
    n: int = 1,
    guidance: Guidance = DEFAULT_GUIDANCE,
    steps: Steps = PAPER_STEPS,
    constraint: Constraint | None = None,
    retries: int = 3,
    batch_size: int = 64,
    generator: torch.Generator | int | None = None,
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
        generator: A seed, or a generator to draw it from; None draws it from torch's own.
        first: Number of the first sample.
        progress: Show a progress bar, where there is a terminal.
    """
    model, to_data = prior.model, prior.mirror.to_data
    if not is_prior(model):
        raise UsageError(
            f"posterior sampling needs a diffusion model, and the prior holds a {type(model).__name__}, which has no "
            "denoise(y_t, t)."
        )
    if not isinstance(operator, Operator):
        raise UsageError(f"{operator!r} is not an Operator; make one of a function with namm.inverse.operator(fn).")
    if not isinstance(measurement, Tensor):
        raise UsageError(f"the measurement must be a tensor (M, …), not {type(measurement).__name__}: torch.as_tensor.")
    if not isinstance(noise, GaussianNoise):
        raise UsageError(f"the noise must be a GaussianNoise, such as GaussianNoise(std=0.1), not {noise!r}.")
    if n < 1 or retries < 0:
        raise UsageError(f"n must be at least 1 and retries at least 0, not {n} and {retries}.")
    like = at_least_float32(model.mean)
    with evaluating(prior), evaluating(operator):
        mean_image = to_data(model.unstandardise(like.new_zeros(1, *model.sample_shape))).detach()
        evidence = Evidence(measurement.to(like), operator.to(like.device), noise)
        _check(evidence, mean_image)
        _check_rules(constraint, guidance, mean_image)
        m, pixels = len(measurement), math.prod(model.sample_shape)
        with bar_over(m * n, batch_size, steps.steps, progress) as bar:
            draw = Draw(model, to_data, evidence, steps, guidance, n, first, retries, bar)
            rows = sample_in_batches(
                draw, m * n, (pixels + 1,), like=like, batch_size=batch_size, generator=generator, first=first
            )
        y, redrawn = rows[:, :-1].unflatten(1, model.sample_shape), rows[:, -1].long()
        failed = ~finite(y)
        which = (torch.arange(m * n, device=y.device) // n).split(batch_size)
        parts = [
            _finished(prior, chunk, evidence.rows(rows), constraint)
            for chunk, rows in zip(y.split(batch_size), which, strict=True)
        ]
    if failed.any():
        warnings.warn(
            f"{int(failed.sum())} of {m * n} samples diverged {retries + 1} times and are NaN; see `failed`. "
            "Use a smaller zeta or more steps.",
            stacklevel=2,
        )
    x, chi2, distance = (torch.cat(column).unflatten(0, (m, n)) for column in zip(*parts, strict=True))
    return Posterior(
        samples=x,
        mirror_samples=y.unflatten(0, (m, n)),
        chi2=chi2,
        distance=None if constraint is None else distance,
        redrawn=redrawn.unflatten(0, (m, n)),
        failed=failed.unflatten(0, (m, n)),
        measured=measurement[0].numel(),
    )


def _check(evidence: Evidence, image: Tensor) -> None:
    """Refuse a measurement or an operator that cannot be used, before any compute is spent."""
    operator, measurement = evidence.operator, evidence.measurement
    with torch.enable_grad():
        seen = operator(image.clone().requires_grad_())
    if measurement.ndim < 1 or len(measurement) < 1 or measurement.shape[1:] != seen.shape[1:]:
        needed = ", ".join(map(str, seen.shape[1:]))
        raise DataError(
            f"measurements of shape {tuple(measurement.shape)} were given; {operator.name} makes (M, {needed}) from M "
            f"images {tuple(image.shape[1:])}. A single measurement needs its batch axis: measurement[None]."
        )
    if not measurement.isfinite().all():
        bad = int((~measurement.isfinite()).sum())
        raise DataError(
            f"the measurement holds {bad} values that are NaN or inf; leave out what was not observed, with a Mask."
        )
    if not seen.requires_grad:
        raise UsageError(
            f"{operator.name} breaks the autograd graph: its output does not depend on the image differentiably. "
            "Remove torch.no_grad, .detach(), .item() and numpy from it."
        )
    evidence.noise.whiten(seen)  # refuses noise of another shape


def _check_rules(constraint: Constraint | None, guidance: Guidance, image: Tensor) -> None:
    """Refuse a rule, one that measures or one that guides, that does not fit the image."""
    guiding = guidance.constraint if isinstance(guidance, DPSGuidance | LikelihoodGuidance) else None
    for rule in (constraint, guiding):
        if rule is None:
            continue
        if not isinstance(rule, Constraint):
            raise UsageError(
                f"{rule!r} is not a Constraint; make one of a function with namm.constraints.constraint(fn)."
            )
        with torch.enable_grad():
            distance = rule(image.clone().requires_grad_())
        if rule is guiding and not distance.requires_grad:
            raise UsageError(
                f"{rule.name} cannot guide: its distance does not depend on the image differentiably. "
                "Remove torch.no_grad, .detach(), .item() and numpy from it."
            )


@torch.no_grad()
def _finished(
    prior: Mirrored, y: Tensor, evidence: Evidence, constraint: Constraint | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x = f(y), its χ² and its ℓ (0 without a constraint), NaN where y is."""
    good = finite(y)
    x = prior.to_data(keep(good, y, 0.0))
    chi2 = evidence.chi2(x)
    distance = torch.zeros_like(chi2) if constraint is None else constraint(x)
    return keep(good, x), keep(good, chi2), keep(good, distance)
