"""Velocities without divergence: every state in the image is incompressible.

Channel 0 is u, channel 1 is v, on the staggered grid of `namm.simulators.fluid`: rows are x, columns are y. An image
holds one state of n × n points, or several side by side, each periodic on its own. With h = extent/n,

    residual = ((u − u₋ₓ) + (v − v₋ᵧ)) / h,      ℓ(x) = mean over states and cells of |residual|.

This is the simulator's own stencil, for which its states are at rounding. They form a linear space, and the nearest
point on it in least squares is the simulator's own pressure projection.
"""

import math
from collections.abc import Callable
from operator import index

from torch import Tensor

from namm.constraints.base import Constraint
from namm.constraints.contract import finite_number
from namm.errors import DataError, UsageError
from namm.numerics import at_least_float32
from namm.simulators.fluid import cut, divergence, lay_out, project, project_weighted, solve_poisson


class DivergenceFree(Constraint):
    """ℓ(x) = mean |∇·V| over all states of an image.

    Args:
        size: Grid points n along a side of one state. Images are (B, 2, r·n, c·n), for any r and c.
        extent: Length of that side, in the unit of the velocities times time. Changes ℓ's scale, not the set.
    """

    def __init__(self, size: int = 64, extent: float = 2 * math.pi) -> None:
        super().__init__()
        number = finite_number(extent)
        if not isinstance(size, int) or size < 2 or number is None or number <= 0:
            raise UsageError(
                "DivergenceFree needs a whole number of points size >= 2 and a finite extent > 0, "
                f"got size={size!r} and extent={extent!r}."
            )
        self.size, self.extent = size, number

    def distance(self, x: Tensor) -> Tensor:
        """Mean |∇·V|: (B, 2, H, W) → (B,)."""
        return self.residual(x).abs().mean(dim=(1, 2, 3))

    def residual(self, x: Tensor) -> Tensor:
        """∇·V at the cells of each state: (B, 2, H, W) → (B, 1, H, W), laid out as the image is."""
        return lay_out(divergence(self._cut(x), self.extent / self.size).unsqueeze(-3))

    def project(self, x: Tensor) -> Tensor:
        """The nearest image without divergence: (B, 2, H, W) → (B, 2, H, W). Each state keeps its mean velocity."""
        x = at_least_float32(x)
        # In float64 where there is one: the velocities are then rounded once, and ℓ is what that leaves.
        wide = x if x.device.type == "mps" else x.double()
        return lay_out(project(self._cut(wide))).to(x.dtype)

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor | None:
        """A projection by Fourier transforms, where all of u are measured alike, and all of v."""
        each = _channels(scale, x)
        if bool((each.amin(1) != each.amax(1)).any()):
            return None
        u, v = each[:, 0].square().tolist()
        return lay_out(project_weighted(self._cut(x), (u, v)))

    def preconditioner(self, x: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The inverse for velocities that are measured by the mean scale of u and of v; none where one cannot move."""
        u, v = _channels(scale, x).square().mean(1).tolist()
        if min(u, v) <= 0:
            return None
        spacing = self.extent / self.size

        def solve(rows: Tensor) -> Tensor:
            potential = solve_poisson(cut(rows, self.size), (u, v))
            mean = potential.mean((-1, -2), keepdim=True)  # that of the rows, which must not change its sign
            return lay_out(spacing**2 * (2 * mean - potential))

        return solve

    def _cut(self, x: Tensor) -> Tensor:
        """The states of an image: (B, 2, r·n, c·n) → (B, r, c, 2, n, n)."""
        n = self.size
        if x.ndim != 4 or x.shape[1] != 2:
            raise DataError(
                f"{self.name} needs images (B, 2, H, W) with two channels, the velocity u down the rows and v along "
                f"the columns; got {tuple(x.shape)}."
            )
        # index() pins the layout while compiling: on symbols the compiler spends ten times as long.
        height, width = index(x.shape[2]), index(x.shape[3])
        if height % n or width % n:
            raise DataError(
                f"{self!r} cannot cut images of {height}×{width} pixels into states of {n}×{n}: crop them to whole "
                "states, or set size to the grid points along a side of one."
            )
        return cut(x, n)


def _channels(scale: Tensor, x: Tensor) -> Tensor:
    """The scale of u and that of v at every pixel of images x, (2, H·W); it broadcasts to them."""
    return scale.expand(1, *x.shape[1:])[0].flatten(1)
