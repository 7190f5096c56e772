"""What is done instead of learning a map, in one interface: a plain model of the data and a rule in, samples out.

    x = method.sample(model, rule, n, sampler=DPMSolver(25), generator=seed)

All that a sampler sees of a model is D = E[y(0) | y(t)] (`namm.generative.samplers`). A method that corrects D is
therefore a process itself (`Denoiser`), and works with every sampler. Everything with a time is standardised by the
model's own statistics; rules are asked in data space.

A method says what a rule must have for it (`requires`), and a rule that lacks it is refused before anything is drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import RuleFunction, Scaled, as_rule
from namm.errors import UsageError
from namm.generative import Diffusion, DPMSolver
from namm.generative.base import Draws, Seeds, evaluating, sample_in_batches, sampling_bar
from namm.generative.samplers import Sampler
from namm.numerics import at_least_float32, full_precision, generator

Need = Literal["residual", "projection", "linear projection", "training"]
SAMPLER = DPMSolver(25)
NEEDS: dict[Need, str] = {
    "residual": "a residual. Give the rule the tensor that vanishes where it holds, or choose GradientGuidance, which "
    "needs ℓ alone.",
    "projection": "a projection. Give the rule a `project`, or choose ProjectedEstimate, which needs a residual.",
    "linear projection": "a linear projection. Choose ProjectedSteps or ProjectedEstimate: their rules may be curved.",
    "training": "a model that was trained for it. Give what `informed` makes of yours to namm.train_model first.",
}
"""What a method needs, and what can be done where it is not there."""


@dataclass(frozen=True)
class Rival:
    """A way to samples that are to obey a rule; by itself it is the plain model, and draws them as they are."""

    requires: ClassVar[tuple[Need, ...]] = ()

    @torch.no_grad()
    def sample(
        self,
        model: Diffusion,
        rule: Constraint | RuleFunction,
        n: int,
        *,
        sampler: Sampler = SAMPLER,
        batch_size: int = 64,
        generator: Seeds = None,
        first: int = 0,
        progress: bool = False,
    ) -> Tensor:
        """`n` samples in data space, (n, C, H, W), on the model's device.

        The noise of sample i depends on (seed, i, step) only, as that of `Diffusion.sample`, which has the same
        arguments.

        Args:
            model: A trained diffusion model of the data.
            rule: ℓ.
            n: How many.
            sampler: How the model is run backwards. A method with steps of its own takes as many as it has.
            batch_size: Samples made together.
            generator: A seed, or a generator to draw it from; a sequence gives every sample a seed of its own.
            first: Number of the first sample.
            progress: Show a progress bar, where there is a terminal.

        Raises:
            UsageError: The rule lacks what the method needs, or the model is no `Diffusion`.
        """
        rule = self.checked(model, rule)
        with evaluating(model), sampling_bar(n, batch_size, sampler.steps, progress) as bar:
            return sample_in_batches(
                lambda noise: self.draw(model, rule, sampler, noise, bar.advance),
                n,
                model.sample_shape,
                like=at_least_float32(model.mean),
                batch_size=batch_size,
                generator=generator,
                first=first,
            )

    def draw(
        self, model: Diffusion, rule: Constraint, sampler: Sampler, noise: Draws, tick: Callable[[], None]
    ) -> Tensor:
        """One batch of samples in data space, (B, C, H, W)."""
        return model.unstandardise(sampler(model, noise, tick))

    def checked(self, model: Diffusion, rule: Constraint | RuleFunction) -> Constraint:
        """The rule, where the model is; refused with the model where the method cannot use them."""
        if not isinstance(model, Diffusion):
            raise UsageError(
                f"{type(self).__name__} runs a diffusion backwards: give it a namm.Diffusion, not a "
                f"{type(model).__name__}."
            )
        rule = as_rule(rule)
        for need in self.requires:
            if not self.meets(need, model, rule):
                raise UsageError(f"{type(self).__name__} cannot be used with {rule.name}: it needs {NEEDS[need]}")
        return rule.follow(model.mean)

    def meets(self, need: Need, model: Diffusion, rule: Constraint) -> bool:
        """Whether the rule, or the model, has what is needed."""
        if need == "residual":
            return rule.has_residual
        if need == "projection":
            return has_projection(rule)
        return need == "linear projection" and has_projection(rule) and projects_linearly(model, rule)


class Denoiser:
    """A diffusion whose E[y(0) | y(t)] a method corrects: a process, to be given to any sampler."""

    def __init__(self, model: Diffusion, rule: Constraint) -> None:
        self.model, self.rule, self.sde, self.t_min = model, rule, model.sde, model.t_min

    def denoise(self, y_t: Tensor, t: Tensor) -> Tensor:
        """The corrected D, standardised: (B, C, H, W), (B,) → (B, C, H, W)."""
        return self.model.standardise(self.corrected(self.model.unstandardise(self.model.denoise(y_t, t))))

    def corrected(self, x: Tensor) -> Tensor:
        """What takes the place of the images x that D shows, in data space."""
        return x

    def score(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(m D − y(t)) / s², with the corrected D."""
        mean, std = self.sde.marginal(t)
        return (mean * self.denoise(y_t, t) - y_t) / std.square()


# Projections


def has_projection(rule: Constraint) -> bool:
    """Whether a rule knows an image that obeys it: the nearest one, or a natural one."""
    inner = rule.inner if isinstance(rule, Scaled) else rule
    return rule.has_project or type(inner).nearest is not Constraint.nearest


def project(rule: Constraint, x: Tensor, scale: Tensor) -> Tensor:
    """The nearest image on the rule in units of `scale`, the natural one where none is known; x where it is not finite.

    Computed in float64 where there is one, so that what is left of ℓ is the rounding of the result.
    """
    found = _projected(rule, x, scale)
    finite = found.isfinite().flatten(1).all(1).reshape(-1, 1, 1, 1)
    return torch.where(finite, found.to(x.dtype), x)


def _projected(rule: Constraint, x: Tensor, scale: Tensor) -> Tensor:
    wide = widened(x)
    with full_precision(x):
        found = rule.nearest(wide, scale.to(wide))
        return rule.project(wide) if found is None else found


def widened(x: Tensor) -> Tensor:
    """`x` in float64 wherever the device has it."""
    return x if x.device.type == "mps" else x.double()


def projects_linearly(model: Diffusion, rule: Constraint) -> bool:
    """Whether the projection of a mean is the mean of the projections, on random images of the data's spread."""
    noise = torch.randn((2, *model.sample_shape), generator=generator(0, "linear"))
    a, b = model.unstandardise(noise.to(model.mean))
    found = _projected(rule, torch.stack([a, b, (a + b) / 2]), model.scale)
    return bool(torch.allclose(found[2], found[:2].mean(0), rtol=1e-5, atol=1e-5 * float(model.scale.max())))
