"""Projection of finished samples: what a reviewer asks for first.

    x ~ model,      x ← P(x),      P the rule's `project`, a natural image that obeys it, or else its nearest one

Samples are changed after the model has made them, so that it has no say in how. `namm.polish` goes to the nearest image
by what the rule knows, whether it has a `project` or not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from namm.constraints import Constraint
from namm.generative import Diffusion
from namm.generative.base import Draws
from namm.generative.samplers import Sampler
from namm.rivals.base import Need, Rival, project


@dataclass(frozen=True)
class Projection(Rival):
    """The plain model's samples, projected."""

    requires: ClassVar[tuple[Need, ...]] = ("projection",)

    def draw(
        self, model: Diffusion, rule: Constraint, sampler: Sampler, noise: Draws, tick: Callable[[], None]
    ) -> Tensor:
        """One batch of samples on the rule."""
        x = super().draw(model, rule, sampler, noise, tick)
        return rule.project(x) if rule.has_project else project(rule, x, model.scale)
