"""Galaxies: an exact number of elliptical sources before a blurred sky.

The recipe is the paper's. A sky of standard deviation 8.5 is left with 0.6 after a blur of 4 px; the faintest source is
15 dB above that (peak 3.4), the brightest has peak 10; centres are at least 5 px apart. Each image is mapped affinely
to minimum 0 and maximum 1, so absolute brightness is lost: a bright source dims all others, and the sky.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from namm.datasets.base import Ingredients, Simulated
from namm.errors import UsageError
from namm.simulators.galaxies import (
    RADIUS,
    Catalogue,
    background_variance,
    blurred,
    draw_catalogue,
    render,
    require_room,
    white_canvas,
)


@dataclass(frozen=True)
class Galaxies(Simulated):
    """`count` galaxies, `separation` px or more apart, with peaks from `signal_to_noise` dB above the sky to `peak`.

    `radius` (px) is the scale of their semi-major axes.
    """

    name: ClassVar[str] = "galaxies"
    sizes: ClassVar[dict[str, int]] = {"train": 10_000, "val": 1000, "test": 10_000}

    size: int = 128
    count: int = 8
    background: float = 8.5
    blur: float = 4.0
    peak: float = 10.0
    signal_to_noise: float = 15.0
    separation: float = 5.0
    radius: float = RADIUS

    def __post_init__(self) -> None:
        if self.size < 2 or not self.background > 0 or not self.separation >= 0 or self.peak == math.inf:
            raise UsageError(f"{self}: size must be 2 or more, background positive, separation 0 or more, peak finite.")
        if not 0.2 <= self.radius < math.inf:  # of smaller ones hardly any is larger than a pixel
            raise UsageError(f"{self}: radius must be at least 0.2 pixels and finite.")
        require_room(self.count, self.size, self.separation)
        if not self.faintest <= self.peak:
            raise UsageError(
                f"{self}: the faintest galaxy, {self.signal_to_noise:g} dB above the background, would have the peak "
                f"{self.faintest:.3g}, more than the largest one: raise peak, or lower signal_to_noise or background."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(1, size, size)."""
        return 1, self.size, self.size

    @property
    def faintest(self) -> float:
        """Smallest peak A: A² is `signal_to_noise` decibels above the variance of the sky."""
        return math.sqrt(background_variance(self.background, self.blur)) * 10 ** (self.signal_to_noise / 20)

    def draw_catalogue(self, n: int, rng: torch.Generator) -> Catalogue:
        """What `draw(n, rng)` puts into its images."""
        return draw_catalogue(
            n,
            count=self.count,
            size=self.size,
            peaks=(self.faintest, self.peak),
            separation=self.separation,
            radius=self.radius,
            rng=rng,
        )

    def ingredients(self, n: int, rng: torch.Generator) -> Ingredients:
        """The catalogue's columns in their order, and noise for the sky: float64."""
        catalogue = self.draw_catalogue(n, rng)
        return *vars(catalogue).values(), white_canvas(n, self.size, blur=self.blur, rng=rng)

    def make(self, ingredients: Ingredients) -> Tensor:
        """Images, float32 (n, 1, size, size)."""
        *catalogue, white = ingredients
        images = render(Catalogue(*catalogue), self.size) + blurred(white, scale=self.background, blur=self.blur)
        low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
        return ((images - low) / (high - low)).float()


def galaxies(n: int, *, size: int = 128, count: int = 8, seed: int = 0, split: str = "train") -> Tensor:
    """The first `n` images of `count` galaxies of a split: float32, (n, 1, size, size)."""
    return Galaxies(size=size, count=count).images(seed, split, 0, n)
