"""Images of the 1D Burgers' equation: rows are space, columns are time.

Column j of x is a state u_j on n periodic points, and `inner_steps` steps of a time integrator lead to the next:

    residual_j = u_{j+1} − Stepᵏ(u_j),      ℓ(x) = mean over rows and columns of |residual|.

The integrator is an object (`crank_nicolson` or `euler`): images are only as consistent as the scheme that made them
is the scheme that judges them. The natural point on the set is the trajectory of the image's own first column.
"""

from operator import index

import torch
from torch import Tensor
from torch.nn import functional

from namm.constraints.base import Constraint, Products
from namm.errors import DataError, UsageError
from namm.numerics import at_least_float32
from namm.simulators.burgers import DT, BurgersGrid, Step, advance, crank_nicolson, rollout

FITS, HALVINGS, FITTED = 12, 6, 1e-9
"""Most fits of a trajectory to an image, halvings of a step, and the gain in the misfit that is worth another fit."""
TANGENTS = 2**23
"""Values of derivatives that are computed together."""
CONTRAST = 10.0
"""Largest scale over the smallest up to which the first trajectory's matrix serves all fits."""


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

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor | None:
        """The trajectory nearest to the whole image, by least squares over its first column u.

        Newton's method for ½ Σₜ ‖(xₜ − columnₜ(u)) / scaleₜ‖² with its gradient by autograd and the Gauss–Newton matrix
        Σₜ Pₜᵀ Pₜ / scaleₜ², Pₜ the derivative of column t in u, of the first trajectory; a step that fits worse is
        halved. None where the scale varies more than that matrix can serve. (B, 1, H, W) → (B, 1, H, W).
        """
        x, _ = self._checked(x)
        if scale.max() > CONTRAST * scale.min():
            return None
        weight = (scale.min() / scale).expand_as(x)
        first = fitted = x[..., :1]
        misfit, fraction = x.new_full((len(x), 1, 1, 1), torch.inf), x.new_ones(len(x), 1, 1, 1)
        step, factor, running = torch.zeros_like(first), None, torch.ones_like(misfit, dtype=torch.bool)
        for _ in range(FITS):
            tried = (first + fraction * step).detach().requires_grad_()
            with torch.enable_grad():
                trajectory = self.project(tried.expand_as(x))
                found = ((x - trajectory) * weight).square().sum((1, 2, 3), keepdim=True)
                (slope,) = torch.autograd.grad(found.sum() / 2, tried)
            if factor is None:
                fitted = trajectory.detach()
                # An image without a finite trajectory has no factor, and keeps that trajectory.
                factor = torch.linalg.cholesky_ex(self._fit_matrix(fitted, weight))[0]
            better = running & (found < misfit)
            first, fitted = torch.where(better, tried.detach(), first), torch.where(better, trajectory.detach(), fitted)
            misfit = torch.where(better, found.detach(), misfit)
            newton = -torch.cholesky_solve(slope[:, 0].to(factor.dtype), factor)[:, None].to(x.dtype)
            gain = -(slope * newton).sum((1, 2, 3), keepdim=True)  # what the misfit would lose if it were quadratic
            step, fraction = torch.where(better, newton, step), torch.where(better, 1.0, fraction / 2)
            running &= torch.where(better, gain > FITTED * misfit, fraction >= 2.0**-HALVINGS)
            if not running.any():
                break
        return fitted

    def derivative(self, x: Tensor) -> Products:
        """Products with the matrices that lead from column to column, (B, 1, H, W) ⇄ (B, 1, H, W − 1)."""
        forth = self._transitions(self._checked(x)[0]).contiguous()  # (B, W − 1, from, to)

        def times(v: Tensor) -> Tensor:
            led = (v[:, 0, :, :-1].mT[..., None, :] @ forth).squeeze(-2)
            return v[..., 1:] - led.mT[:, None]

        def transposed(u: Tensor) -> Tensor:
            led = (forth @ u[:, 0].mT[..., None]).squeeze(-1)
            return functional.pad(u, (1, 0)) - functional.pad(led.mT[:, None], (0, 1))

        return times, transposed

    def _fit_matrix(self, fitted: Tensor, weight: Tensor) -> Tensor:
        """Σₜ Pₜᵀ Pₜ / scaleₜ² of trajectories (B, 1, H, W), in float32, which is enough for a direction: (B, H, H)."""
        weight, rows = weight[:, 0].float(), fitted.shape[2]
        transitions = self._transitions(fitted.float())
        derivative = torch.eye(rows, device=fitted.device).expand(len(fitted), rows, rows)  # Pₜᵀ, (B, from, to)
        matrix = torch.zeros_like(derivative)
        for t in range(fitted.shape[-1]):
            derivative = derivative @ transitions[:, t - 1] if t else derivative
            weighted = derivative * weight[:, None, :, t]
            matrix = matrix + weighted @ weighted.mT
        return matrix

    def _transitions(self, x: Tensor) -> Tensor:
        """The derivative of each column's successor, (B, 1, H, W) → (B, W − 1, from, to)."""
        grid, rows, states = self.grid(x.shape[2]), x.shape[2], x[:, 0, :, :-1]

        def along(direction: Tensor) -> Tensor:
            def onwards(u: Tensor) -> Tensor:
                return advance(u, grid, self.inner_steps, self.step, dim=-2)

            return torch.func.jvp(onwards, (states,), (direction.expand_as(states),))[1]

        unit = torch.eye(rows, dtype=x.dtype, device=x.device)[:, None, :, None]
        at_once = max(1, TANGENTS // states.numel())
        return torch.func.vmap(along, chunk_size=at_once)(unit).permute(1, 3, 0, 2)

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
