"""Periodic unit cells: random two-phase materials tiled T × T.

A Gaussian field on the unit torus, mean 1/2, kernel k(d) = σ_f² Π_a exp(−2 sin²(π d_a)/ℓ²), σ_f = ℓ = 0.7, is
clipped to [0, 1] and thresholded at 1/2. A cell of c pixels a side samples [0, 1] with both ends, so its last
row and column repeat its first: c − 1 independent points are drawn per axis, and the seam is appended.

With mean and threshold both 1/2 the phase is the sign of the field: σ_f matters to the grey variant only.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from namm.datasets.base import Ingredients, Simulated
from namm.errors import UsageError
from namm.simulators.random_fields import colour_periodic, periodic_eigenvalues


@dataclass(frozen=True)
class UnitCells(Simulated):
    """A random cell, repeated `tiles` times a side in a square image; `threshold=None` keeps grey values."""

    name: ClassVar[str] = "unit-cells"
    sizes: ClassVar[dict[str, int]] = {"train": 30_000, "val": 300, "test": 10_000}

    size: int = 64
    tiles: int = 2
    scale: float = 0.7
    length: float = 0.7
    mean: float = 0.5
    threshold: float | None = 0.5

    def __post_init__(self) -> None:
        if self.tiles < 1 or self.size % self.tiles or self.size // self.tiles < 2:
            raise UsageError(
                f"An image of {self.size} pixels cannot be cut into {self.tiles} tiles a side: "
                "choose a size that is a multiple of tiles, with cells of at least 2 pixels."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(1, size, size)."""
        return 1, self.size, self.size

    def ingredients(self, n: int, rng: torch.Generator) -> Ingredients:
        """White noise, float64 (n, c − 1, c − 1) for cells of c pixels a side."""
        points = self.size // self.tiles - 1
        return (torch.randn(n, points, points, generator=rng, dtype=torch.float64),)

    def make(self, ingredients: Ingredients) -> Tensor:
        """Images, float32 (n, 1, size, size)."""
        (white,) = ingredients
        rows, columns = white.shape[1:]
        eigenvalues = periodic_eigenvalues((rows, columns), length=self.length, scale=self.scale)
        field = self.mean + colour_periodic(white, eigenvalues.to(white.device))
        cell = torch.nn.functional.pad(field[:, None], (0, 1, 0, 1), mode="circular").clamp(0, 1)
        if self.threshold is not None:
            cell = cell > self.threshold
        return cell.float().repeat(1, 1, self.tiles, self.tiles)


def unit_cells(
    n: int, *, size: int = 64, tiles: int = 2, seed: int = 0, split: str = "train", threshold: float | None = 0.5
) -> Tensor:
    """The first `n` unit-cell images of a split: float32, (n, 1, size, size)."""
    return UnitCells(size=size, tiles=tiles, threshold=threshold).images(seed, split, 0, n)
