"""Darcy flow: pressure and permeability of a random medium, a public benchmark of models that obey physics.

log K is a Gaussian field with covariance exp(−r/correlation), cut off after the leading `terms` eigenpairs, and p is
the solution of −∇·(K∇p) = s: see `namm.simulators.darcy`. Channel 0 is p, channel 1 is K, of standard deviations 0.07
and 1.3 at 64×64. All is float64 until the images are rounded, which adds 0.2 % to the data's own residual.

The benchmark is that of physics-informed diffusion models (Bastek, Sun and Kochmann, 2024): 64×64 points, 10 000
pairs to train on and 1000 held out.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from namm.datasets.base import Ingredients, Simulated
from namm.errors import UsageError
from namm.simulators.darcy import SMALLEST, log_permeability, solve


@dataclass(frozen=True)
class DarcyFlow(Simulated):
    """Pressure and permeability on `size` × `size` points; log K has `terms` random coefficients."""

    name: ClassVar[str] = "darcy"
    sizes: ClassVar[dict[str, int]] = {"train": 10_000, "val": 500, "test": 1000}

    size: int = 64
    correlation: float = 0.1
    terms: int = 64

    def __post_init__(self) -> None:
        if self.size < SMALLEST or not self.correlation > 0 or not 1 <= self.terms <= self.size**2:
            raise UsageError(
                f"{self}: size must be {SMALLEST} or more, correlation positive, and terms 1 to size² ({self.size**2})."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(2, size, size)."""
        return 2, self.size, self.size

    def ingredients(self, n: int, rng: torch.Generator) -> Ingredients:
        """White noise, float64 (n, terms)."""
        return (torch.randn(n, self.terms, generator=rng, dtype=torch.float64),)

    def make(self, ingredients: Ingredients) -> Tensor:
        """Images, float32 (n, 2, size, size)."""
        (white,) = ingredients
        permeability = log_permeability(white, self.size, self.correlation).exp()
        images = torch.stack([solve(permeability), permeability], dim=1).float()
        if not images.isfinite().all():
            raise UsageError(f"{self}: the permeability spans too many decades for float64. Use a larger correlation.")
        return images


def darcy_flow(n: int, *, size: int = 64, seed: int = 0, split: str = "train") -> Tensor:
    """The first `n` pairs of pressure and permeability of a split: float32, (n, 2, size, size)."""
    return DarcyFlow(size=size).images(seed, split, 0, n)
