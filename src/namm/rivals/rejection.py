"""Rejection: draw more samples than are needed, and keep those that are nearest to the rule.

    x₁ … x_kn ~ model,      kept: the n with the smallest ℓ

The kept ones have the law of the model given that ℓ is below its 1/k quantile. Nothing is learned and no image is
changed. But ℓ falls by as much as it varies among samples and no more, while the cost per sample grows with k: where
all samples of a model are about as far from the rule, as where ℓ is a mean over many pixels, it falls little.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import RuleFunction
from namm.errors import UsageError
from namm.generative import Diffusion
from namm.rivals.base import Rival


@dataclass(frozen=True)
class Rejection(Rival):
    """The samples with the smallest ℓ, in the order in which they were drawn.

    Args:
        draws: k, samples that are drawn for each that is kept.
    """

    draws: int = 4

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise UsageError(f"Rejection: draws must be 1 or more, not {self.draws}.")

    @torch.no_grad()
    def sample(
        self, model: Diffusion, rule: Constraint | RuleFunction, n: int, *, first: int = 0, **options: Any
    ) -> Tensor:
        """`n` samples of `draws` · n, (n, C, H, W); the options are those of `Rival.sample`."""
        x = super().sample(model, rule, self.draws * n, first=self.draws * first, **options)
        rule = self.checked(model, rule)
        distances = torch.cat([rule(part) for part in x.split(64)])
        return x[distances.argsort(stable=True)[:n].sort().values]
