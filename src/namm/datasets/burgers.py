"""Burgers' trajectories: an image's rows are space, its columns time.

Initial states are Matérn-3/2 processes of length scale 0.2 on [−1, 1], each mapped affinely to minimum 0 and
maximum 1. They are advanced by u_t + u u_x = ν u_xx on x ∈ [0, L], L = 10, with the Crank–Nicolson step;
column j is the state after k(j + 1) inner steps of Δt (k = 5). Rows run against x by default, as in the
paper's images: row 0 is the largest x.

The rollout is float64 and rounded to float32 once, so the images' own constraint distance is rounding alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from namm.datasets.base import Ingredients, Simulated
from namm.errors import UsageError
from namm.simulators.burgers import DT, BurgersGrid, rollout
from namm.simulators.random_fields import matern_field


@dataclass(frozen=True)
class BurgersTrajectories(Simulated):
    """`size` grid points on [0, `length`] by `size` states, `inner_steps` steps of `dt` apart."""

    name: ClassVar[str] = "burgers"
    sizes: ClassVar[dict[str, int]] = {"train": 10_000, "val": 1000, "test": 10_000}

    size: int = 64
    dt: float = DT
    inner_steps: int = 5
    nu: float = 0.05
    length: float = 10.0
    correlation_length: float = 0.2
    flipped: bool = True

    def __post_init__(self) -> None:
        if self.size < 3 or self.inner_steps < 1 or not self.length > 0:
            raise UsageError(f"{self}: size must be 3 or more, inner_steps 1 or more, length positive.")
        _ = self.grid  # refuses a dt or nu that it cannot step with

    @property
    def grid(self) -> BurgersGrid:
        """The simulator's grid, along x."""
        return BurgersGrid(dx=self.length / (self.size - 1), dt=self.dt, nu=self.nu)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(1, size, size)."""
        return 1, self.size, self.size

    def initial_states(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` states at time 0, each with minimum 0 and maximum 1: float64, (n, size), along x."""
        x = torch.linspace(-1, 1, self.size, dtype=torch.float64)
        u = matern_field(n, x, length=self.correlation_length, mean=1.0, generator=rng)
        low, high = u.amin(-1, keepdim=True), u.amax(-1, keepdim=True)
        return (u - low) / (high - low)

    def trajectories(self, u: Tensor) -> Tensor:
        """Images (n, 1, size, size) of the initial states `u` (n, size), in the type of `u`."""
        images = rollout(u, self.grid, self.size, self.inner_steps)[:, None]
        return images.flip(-2) if self.flipped else images

    def ingredients(self, n: int, rng: torch.Generator) -> Ingredients:
        """The initial states, float64 (n, size)."""
        return (self.initial_states(n, rng),)

    def make(self, ingredients: Ingredients) -> Tensor:
        """Images, float32 (n, 1, size, size)."""
        (states,) = ingredients
        return self.trajectories(states).float()


def burgers_trajectories(
    n: int, *, size: int = 64, dt: float = DT, inner_steps: int = 5, seed: int = 0, split: str = "train"
) -> Tensor:
    """The first `n` Burgers' images of a split: float32, (n, 1, size, size)."""
    return BurgersTrajectories(size=size, dt=dt, inner_steps=inner_steps).images(seed, split, 0, n)
