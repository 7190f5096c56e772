"""Black-hole images of one total brightness.

Each is a hot, thin gas falling into a Kerr black hole, seen by light that the hole bends
(`namm.simulators.accretion`). What differs from image to image is drawn uniformly from `RANGES`; every second hole, at
random, is seen from below, where the gas turns clockwise. The picture is 26 GM/c² wide, so that the shadow, about 10.4
across, takes two fifths of it.

Images are scaled in float64 to the total and rounded to float32 once: their own constraint distance is rounding alone.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from namm.datasets.base import Ingredients, Simulated
from namm.errors import UsageError
from namm.simulators.accretion import EDDIES, Flow, images, stirred

RANGES = {
    "spin": (-0.95, 0.95),
    "inclination": (math.radians(5), math.radians(65)),
    "position_angle": (0.0, 2 * math.pi),
    "thickness": (0.1, 0.5),
    "steepness": (3.0, 4.0),
    "rotation": (0.3, 0.9),
    "turbulence": (0.3, 1.0),
    "shear": (1.5, 3.0),
}
"""What an image's parameters are drawn from; `Flow` says what they are."""

FIELD_OF_VIEW = 26.0
"""Side of an image in units of GM/c²."""


@dataclass(frozen=True)
class BlackHoles(Simulated):
    """Images of `size` pixels a side that add up to `total`."""

    name: ClassVar[str] = "black-holes"
    sizes: ClassVar[dict[str, int]] = {"train": 100_000, "val": 100, "test": 10_000}
    at_once: ClassVar[int] = 2**22
    """A ray needs a few hundred bytes, and there are one and a half to a pixel: some gigabytes in all."""

    size: int = 64
    total: float = 120.0

    def __post_init__(self) -> None:
        if self.size < 4 or not 0 < self.total < math.inf:
            raise UsageError(f"{self}: size must be 4 or more, total positive and finite.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(1, size, size)."""
        return 1, self.size, self.size

    def flows(self, n: int, rng: torch.Generator) -> Flow:
        """The parameters of `n` images: float64."""
        drawn = {name: _uniform(n, low, high, rng) for name, (low, high) in RANGES.items()}
        below = _uniform(n, 0, 1, rng) < 0.5
        drawn["inclination"] = torch.where(below, math.pi - drawn["inclination"], drawn["inclination"])
        return Flow(**drawn)

    def ingredients(self, n: int, rng: torch.Generator) -> Ingredients:
        """The flows' parameters (n,) each, in the order of `Flow`, and noise for the turbulence: float64."""
        return *vars(self.flows(n, rng)).values(), torch.randn(n, *EDDIES, generator=rng, dtype=torch.float64)

    def make(self, ingredients: Ingredients) -> Tensor:
        """Images, float32 (n, 1, size, size)."""
        *parameters, white = ingredients
        x = images(Flow(*parameters), stirred(white), self.size, FIELD_OF_VIEW)[:, None]
        return (x * (self.total / x.sum(dim=(1, 2, 3), keepdim=True))).float()


def black_holes(n: int, *, size: int = 64, total: float = 120.0, seed: int = 0, split: str = "train") -> Tensor:
    """The first `n` black-hole images of a split: float32, (n, 1, size, size)."""
    return BlackHoles(size=size, total=total).images(seed, split, 0, n)


def _uniform(n: int, low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=rng, dtype=torch.float64)
