"""Kolmogorov flow: incompressible turbulence stirred by a sinusoidal force, several states to an image.

Initial fields are filtered noise around the force's own wavenumber, with a largest speed of 3. They follow

    ∂V/∂t + ∇·(V V) = −∇p + ∇²V/Re + F sin(k y) e_x − μ V,    ∇·V = 0    on [0, 2π]²

by the step of `namm.simulators.fluid`, and the states at t = 3.0, 3.2, … are laid out row by row. Channel 0 is u,
channel 1 is v; within a state, rows are x and columns are y.

Time steps are float32. Every state is projected once more in float64 before it is rounded, so the images' own
divergence is the rounding of their pixels alone.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from namm.datasets.base import Ingredients, Simulated
from namm.errors import UsageError
from namm.simulators.fluid import FluidGrid, initial_field, lay_out, project, rollout

PIECE = 8
"""Trajectories that a CPU steps at a time: few enough to stay in a core's cache."""

MAX_COURANT = 0.7
"""Cells that the initial flow may cross in a step. The paper's flow is stable there, and not above 1."""


@dataclass(frozen=True)
class KolmogorovFlow(Simulated):
    """`rows` × `columns` states of `size` × `size` points, `inner_steps` steps of `dt` apart, from time `start` on."""

    name: ClassVar[str] = "kolmogorov"
    sizes: ClassVar[dict[str, int]] = {"train": 10_000, "val": 1000, "test": 10_000}

    size: int = 64
    rows: int = 2
    columns: int = 4
    reynolds: float = 1000.0
    forcing: float = 1.0
    wavenumber: int = 4
    damping: float = 0.1
    max_speed: float = 3.0
    dt: float = 0.01
    inner_steps: int = 20
    start: float = 3.0

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.inner_steps, self.wavenumber) < 1:
            raise UsageError(f"{self}: rows, columns, inner_steps and wavenumber must be 1 or more.")
        if not (self.reynolds > 0 and 0 < self.max_speed < math.inf):
            raise UsageError(f"{self}: reynolds and max_speed must be positive, and max_speed finite.")
        courant = self.max_speed * self.dt / self.grid.spacing
        if courant > MAX_COURANT:
            raise UsageError(
                f"{self}: the initial flow crosses {courant:.3g} cells in one dt, and steps are trusted up to "
                f"{MAX_COURANT}. Use a dt of at most {MAX_COURANT * self.dt / courant:.3g}."
            )
        if not 0 <= self.start < math.inf or not math.isclose(self.start / self.dt, self.first_step, abs_tol=1e-6):
            raise UsageError(f"{self}: start must be a whole number of steps of dt, 0 or more and finite.")

    @property
    def grid(self) -> FluidGrid:
        """The simulator's grid."""
        return FluidGrid(
            size=self.size,
            dt=self.dt,
            viscosity=1 / self.reynolds,
            forcing=self.forcing,
            wavenumber=self.wavenumber,
            damping=self.damping,
        )

    @property
    def first_step(self) -> int:
        """Steps from the initial field to the first state."""
        return round(self.start / self.dt)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(2, rows·size, columns·size)."""
        return 2, self.rows * self.size, self.columns * self.size

    def trajectories(self, velocity: Tensor) -> Tensor:
        """Images (n, 2, rows·size, columns·size) of the initial fields (n, 2, size, size), in their type."""
        states = rollout(velocity, self.grid, self.rows * self.columns, self.inner_steps, self.first_step)
        return lay_out(project(states.double()).to(velocity.dtype).unflatten(1, (self.rows, self.columns)))

    def ingredients(self, n: int, rng: torch.Generator) -> Ingredients:
        """White noise, float32 (n, 2, size, size)."""
        return (torch.randn(n, 2, self.size, self.size, generator=rng),)

    def make(self, ingredients: Ingredients) -> Tensor:
        """Images, float32 (n, 2, rows·size, columns·size)."""
        (white,) = ingredients
        pieces = white.split(len(white) if white.is_cuda else PIECE)
        with _one_thread():
            fields = (initial_field(piece, self.wavenumber, self.max_speed) for piece in pieces)
            images = torch.cat([self.trajectories(field) for field in fields])
        if not images.isfinite().all():
            raise UsageError(f"{self}: the flow outran the time step and overflowed. Use a smaller dt.")
        return images


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch: FFTs round differently on several, and turbulence would make that another image."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def kolmogorov_flow(
    n: int, *, size: int = 64, rows: int = 2, columns: int = 4, seed: int = 0, split: str = "train"
) -> Tensor:
    """The first `n` Kolmogorov images of a split: float32, (n, 2, rows·size, columns·size)."""
    return KolmogorovFlow(size=size, rows=rows, columns=columns).images(seed, split, 0, n)
