"""Extrapolation, correction, interpolation (ECI; Cheng et al. 2025), for rules with a linear projection.

From y(t) the model extrapolates to a clean image, D = E[y(0) | y(t)]; the projection corrects it, exactly; and noise is
mixed in again to come to the next time t':

    y(t') = m(t') P(D) + s(t') z

Before it goes on to t' it may come back to t and repeat all this (`mixing`), so that what the correction changed
reaches the rest of the image. z is the noise that sampling began with, or is drawn afresh now and then (`resample`).

There is no gradient, of the network or of the rule. D is a mean, and a mean with fresh noise varies less than data with
noise do, so that the law of the samples is not promised. With independent Gaussian pixels it is known in closed form;
`tests/rivals` computes it.

The end is exact: ℓ at the rounding of the result.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.generative import Diffusion
from namm.generative.base import Draws
from namm.generative.samplers import Process, Sampler, Step, Steps, even_in_noise
from namm.rivals.base import Denoiser, Need, Rival, project


@dataclass(frozen=True)
class ExtrapolateCorrect(Rival):
    """The extrapolated image projected, noise mixed in again, and this repeated.

    Args:
        mixing: Evaluations of the network at each time. Of the sampler's steps, as many are made as it divides:
            steps // mixing times, mixing · (steps // mixing) evaluations.
        resample: Evaluations after which noise is drawn afresh; 0 keeps that of the beginning.
    """

    requires: ClassVar[tuple[Need, ...]] = ("linear projection",)
    mixing: int = 1
    resample: int = 1

    def __post_init__(self) -> None:
        if self.mixing < 1 or self.resample < 0:
            raise UsageError(
                f"ExtrapolateCorrect: mixing must be 1 or more and resample 0 or more, not {self.mixing} and "
                f"{self.resample}."
            )

    def draw(
        self, model: Diffusion, rule: Constraint, sampler: Sampler, noise: Draws, tick: Callable[[], None]
    ) -> Tensor:
        """One batch of samples on the rule."""
        if sampler.steps < 2 * self.mixing:
            raise UsageError(
                f"ExtrapolateCorrect needs two times at least: with mixing={self.mixing} a sampler of "
                f"{2 * self.mixing} steps or more, not of {sampler.steps}."
            )
        steps, every = Interpolation(sampler.steps, self.mixing), self.resample or sys.maxsize
        y = steps(ProjectedDenoiser(model, rule), KeptNoise(noise, every), tick)
        return project(rule, model.unstandardise(y), model.scale)


class ProjectedDenoiser(Denoiser):
    """P(D)."""

    def corrected(self, x: Tensor) -> Tensor:
        """P(x)."""
        return project(self.rule, x, self.model.scale)


@dataclass(frozen=True)
class Interpolation(Steps):
    """y ← m(t') D + s(t') z, in times even in log noise, each `mixing` times."""

    steps: int = 25
    mixing: int = 1

    def table(self, process: Process) -> list[Step]:
        """The steps: at each time back to it, and at last on to the next."""
        sde, table = process.sde, []
        for t, following in pairwise(even_in_noise(process, self.steps // self.mixing)):
            for to in [t] * (self.mixing - 1) + [following]:
                numbers = (t, sde.mean(t), sde.std(t), sde.mean(to), 0.0, sde.std(to))
                table.append(Step(*(float(number) for number in numbers)))
        return table


@dataclass(frozen=True)
class KeptNoise:
    """The noise of a batch, the same for `every` steps."""

    noise: Draws
    every: int

    def __call__(self, step: int) -> Tensor:
        """z of the step at which it was drawn."""
        return self.noise(step - step % self.every)
