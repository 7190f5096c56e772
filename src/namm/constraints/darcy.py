"""Pressure and permeability of a Darcy flow: p drives the fluid that K lets through.

Channel 0 is the pressure p, channel 1 the permeability K, on the grid and with the differences of
`namm.simulators.darcy`: rows are x, columns are y, and the first and last points lie on the walls. The residual has
three planes, the equation at all points and the flux through the walls, zero inside:

    −∇·(K∇p) − s,    ∓p_x on the first and last row,    ∓p_y on the first and last column,
    ℓ(x) = mean over all three planes of |residual|.

This is the residual error of the published comparisons. The equations are more than p has values: data solve them in
least squares, and keep a distance of 1.2·10⁻³ at 64×64 points.

The natural point on the set is the pressure of the image's own permeability. A small error of K is a large one of that
pressure, and the nearest point shares the change out between the two.
"""

from operator import index

import torch
from torch import Tensor

from namm.constraints.base import Constraint
from namm.errors import DataError
from namm.numerics import at_least_float32
from namm.simulators.darcy import MIN_PERMEABILITY, SMALLEST, nearest, residual, solve


class Darcy(Constraint):
    """ℓ(x) = mean |residual| of the Darcy flow of each pair (p, K)."""

    def distance(self, x: Tensor) -> Tensor:
        """Mean |residual|: (B, 2, n, n) → (B,)."""
        return self.residual(x).abs().mean(dim=(1, 2, 3))

    def residual(self, x: Tensor) -> Tensor:
        """The equation and both pairs of walls: (B, 2, n, n) → (B, 3, n, n)."""
        p, K = self._checked(x).unbind(1)
        return residual(p, K)

    def project(self, x: Tensor) -> Tensor:
        """The image with the pressure of its own permeability, raised to 0.01 where it is less: (B, 2, n, n)."""
        x = self._checked(x)
        K = x[:, 1].clamp(min=MIN_PERMEABILITY)
        return torch.stack([solve(K).to(x.dtype), K], dim=1)

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor | None:
        """The nearest image that obeys the rule, by four Gauss–Newton steps: (B, 2, n, n) → (B, 2, n, n).

        Args:
            x: Images; permeabilities come back at 0.01 or above.
            scale: Units > 0 in which changes are measured, broadcastable to x: standard deviations of the data, for
                example, one for each channel (2, 1, 1).

        Returns:
            The images, or None if the scale varies within a channel of an image, for which there is no method here.
        """
        x = self._checked(x)
        units = scale.to(x).expand_as(x)
        if not (units > 0).all():
            raise DataError(f"{self.name} measures changes in units > 0, and the smallest given is {units.min():g}.")
        first = units[:, :, :1, :1]
        if not (units == first).all():
            return None
        return torch.stack(nearest(x[:, 0], x[:, 1], *first[..., 0, 0].unbind(1)), dim=1).to(x.dtype)

    def _checked(self, x: Tensor) -> Tensor:
        """x in float32 or better; refuses what is no pair of fields on a square grid."""
        if x.ndim != 4 or x.shape[1] != 2:
            raise DataError(
                f"{self.name} needs images (B, 2, H, W) with two channels, the pressure p and the permeability K; "
                f"got {tuple(x.shape)}."
            )
        # index() pins the size while compiling: the width of the grid is a constant of the graph.
        height, width = index(x.shape[2]), index(x.shape[3])
        if height != width or height < SMALLEST:
            raise DataError(
                f"{self.name} needs square images of {SMALLEST}×{SMALLEST} points or more, the whole of the unit "
                f"square; got {height}×{width}: cut or resample them before the equation is solved, not after."
            )
        return at_least_float32(x)
