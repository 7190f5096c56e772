"""Projection of the state after every step: projected diffusion models (PDM; Christopher, Baek and Fioretto 2024).

PDM turns every update of a reverse diffusion into one of projected gradient descent:

    x ← P(step(x) + noise),      P(x) = the nearest image on the rule

with x = y/m, the state in units of the data: image plus noise of standard deviation s/m. What is projected is the noisy
state, not the image it stands for, so the network sees less noise across the rule than there is at its time. That does
little where the rule is a few equations among many pixels, and much where it fixes half of them. Where the rule is
curved, noise far from it is projected to images that have little to do with it: `below` waits until there is less.

The steps are ancestral ones, even in log noise, where the paper has Langevin dynamics with several updates at each
level. For Gaussian data with independent pixels of equal variance and a linear rule the samples have the data's law
given the rule; for others they do not.

The end is exact: ℓ at the rounding of the result. Each step costs a projection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.generative import DDIM, Diffusion
from namm.generative.base import Draws
from namm.generative.samplers import Sampler, start
from namm.rivals.base import Need, Rival, project


@dataclass(frozen=True)
class ProjectedSteps(Rival):
    """The state projected after every step.

    Args:
        below: Noise level s/m, in standard deviations of the data, from which on states are projected.
    """

    requires: ClassVar[tuple[Need, ...]] = ("projection",)
    below: float = math.inf

    def __post_init__(self) -> None:
        if not self.below >= 0:
            raise UsageError(f"ProjectedSteps: below must be 0 or more, not {self.below}.")

    def draw(
        self, model: Diffusion, rule: Constraint, sampler: Sampler, noise: Draws, tick: Callable[[], None]
    ) -> Tensor:
        """One batch of samples on the rule."""
        y, table = start(model, noise), DDIM(sampler.steps, eta=1.0).table(model)
        for k, step in enumerate(table):
            y = step.without_noise(y, model.denoise(y, y.new_full((len(y),), step.t)))
            if k + 1 < len(table):  # the last step adds no noise, and its result is projected once
                y, mean = y + step.noise * noise(k + 1), table[k + 1].mean
                if table[k + 1].std <= self.below * mean:
                    y = mean * model.standardise(project(rule, model.unstandardise(y / mean), model.scale))
            tick()
        return project(rule, model.unstandardise(y), model.scale)
