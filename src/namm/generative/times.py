"""Which times a diffusion is trained at: a distribution of u in [0, 1], and t = t_min + (1 − t_min) u.

The loss is not weighted by time, so how often a time is drawn is how much it counts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from namm.errors import UsageError


class Times(Protocol):
    """A distribution on [0, 1]."""

    def draw(self, n: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(n,), with the device and the precision of `like`."""


@dataclass(frozen=True)
class UniformTimes:
    """All times alike, as in the paper."""

    def draw(self, n: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """u ~ U(0, 1)."""
        return torch.rand(n, generator=generator, device=like.device, dtype=like.dtype)


@dataclass(frozen=True)
class LogitNormalTimes:
    """u = sigmoid(mean + std z), z ~ N(0, 1): mostly the times between image and noise (Esser et al. 2024).

    With straight paths log(s/m) = logit t, so this is a normal distribution of the logarithmic noise level. A negative
    `mean` draws more of the times with little noise.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise UsageError(f"LogitNormalTimes: std must be positive, not {self.std}.")

    def draw(self, n: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """sigmoid(mean + std z)."""
        z = torch.randn(n, generator=generator, device=like.device, dtype=like.dtype)
        return torch.sigmoid(self.mean + self.std * z)
