"""Images of the 1D Burgers' equation: rows are space, columns are time.

Column j of x is a state u_j on n periodic points, and `inner_steps` steps of a time integrator lead to the next:

    residual_j = u_{j+1} − Stepᵏ(u_j),      ℓ(x) = mean over rows and columns of |residual|.

The integrator is an object (`crank_nicolson` or `euler`): images are only as consistent as the scheme that made them
is the scheme that judges them. The natural point on the set is the trajectory of the image's own first column.
"""

from operator import index

import torch
from torch import Tensor

from namm.constraints.base import Constraint
from namm.errors import DataError, UsageError
from namm.numerics import at_least_float32
from namm.simulators.burgers import DT, BurgersGrid, Step, advance, crank_nicolson, rollout


class Burgers(Constraint):
    """Distance of an image from the trajectories of u_t + u u_x = ν u_xx.

    Args:
        step: The integrator that the images must follow.
        nu: Viscosity ν. (The paper prints 0.5; its data and code have 0.05.)
        length: Distance between the first and the last grid point, so Δx = length/(n − 1) for n rows.
        dt: Δt of one inner step.
        inner_steps: Inner steps between neighbouring columns.
        flipped: Whether row 0 is the largest x, as in the authors' images.
        max_speed: Largest |u| for which an implicit step must converge fully.
    """

    def __init__(
        self,
        step: Step = crank_nicolson,
        nu: float = 0.05,
        length: float = 10.0,
        dt: float = DT,
        inner_steps: int = 5,
        flipped: bool = True,
        max_speed: float = 1.5,
    ) -> None:
        super().__init__()
        if not length > 0 or inner_steps < 1:
            raise UsageError(
                f"Burgers needs length > 0 and inner_steps >= 1, got length={length} and inner_steps={inner_steps}."
            )
        self.step, self.nu, self.length, self.dt = step, nu, length, dt
        self.inner_steps, self.flipped, self.max_speed = inner_steps, flipped, max_speed
        self.grid(rows=3)  # refuses bad numbers now rather than at the first batch

    def grid(self, rows: int) -> BurgersGrid:
        """The grid of an image with that many rows; a flipped image runs against x, so its Δx is negative."""
        dx = self.length / (rows - 1)
        return BurgersGrid(-dx if self.flipped else dx, self.dt, self.nu, self.max_speed)

    def distance(self, x: Tensor) -> Tensor:
        """Mean |residual|: (B, 1, H, W) → (B,)."""
        return self.residual(x).abs().mean(dim=(1, 2, 3))

    def residual(self, x: Tensor) -> Tensor:
        """Each column minus where its predecessor leads: (B, 1, H, W) → (B, 1, H, W−1), in the image's own rows."""
        x, grid = self._checked(x)
        return x[..., 1:] - advance(x[..., :-1], grid, self.inner_steps, self.step, dim=-2)

    def project(self, x: Tensor) -> Tensor:
        """The trajectory that starts in the first column: (B, 1, H, W) → (B, 1, H, W). Ignores all later columns."""
        x, grid = self._checked(x)
        later = rollout(x[..., 0], grid, x.shape[-1] - 1, self.inner_steps, self.step)
        return torch.cat([x[..., :1], later], dim=-1)

    def _checked(self, x: Tensor) -> tuple[Tensor, BurgersGrid]:
        """x in float32 or better and its grid; refuses what cannot be a trajectory."""
        if x.ndim != 4 or x.shape[1] != 1:
            raise DataError(
                f"Burgers needs images (B, 1, H, W) with one channel, the velocity u; got {tuple(x.shape)}."
            )
        # index() pins the number of rows while compiling: Δx and the number of sweeps are constants of the graph.
        rows, columns = index(x.shape[2]), x.shape[3]
        if rows < 3 or columns < 2:
            raise DataError(
                f"Burgers needs at least 3 rows (points in space) and 2 columns (times), got {rows}×{columns} pixels."
            )
        return at_least_float32(x), self.grid(rows)
