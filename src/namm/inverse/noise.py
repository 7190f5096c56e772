"""Gaussian measurement noise n ~ N(0, Γ), and distances in its units.

    whitened residual  w = Γ^(−½) (m − A(x)),    ‖m − A(x)‖_Γ = ‖w‖₂,    χ² = ‖w‖₂²

For the image that was measured, χ² is distributed as its name says, with as many degrees of freedom as there are
measured values. A full Γ = L Lᵀ is whitened by w = L⁻¹ r, which has the same norm as any other root.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from namm.errors import DataError, UsageError
from namm.numerics import at_least_float32, full_precision


@dataclass(frozen=True, eq=False)
class GaussianNoise:
    """Noise with independent values (`std`) or a full `covariance`; give one of the two.

    Args:
        std: One standard deviation for all values, or one for each: of the measurement's shape without its batch axis,
            or of a shape that broadcasts to it.
        covariance: Γ over the flattened measurement, (m, m), positive definite, and symmetric but for rounding.
    """

    std: float | Tensor | None = None
    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.std is None) == (self.covariance is None):
            raise UsageError("GaussianNoise needs either std or covariance.")
        _ = self._root

    @cached_property
    def _root(self) -> Tensor:
        """The standard deviations, or the lower triangular L of a full covariance; in float64."""
        if self.covariance is None:
            std = torch.as_tensor(self.std, dtype=torch.double)
            if not (std.isfinite() & (std > 0)).all():
                raise UsageError(
                    f"GaussianNoise: every std must be positive and finite, and they go from {float(std.min()):.3g} to "
                    f"{float(std.max()):.3g}. Leave out values that were not observed."
                )
            return std.detach()
        covariance = torch.as_tensor(self.covariance, dtype=torch.double)
        if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1] or len(covariance) == 0:
            raise UsageError(f"GaussianNoise: the covariance must be a square matrix, not {tuple(covariance.shape)}.")
        rounding = 1e-6 * float(covariance.diagonal().abs().max())
        if not torch.allclose(covariance, covariance.mT, rtol=1e-5, atol=rounding):
            raise UsageError("GaussianNoise: the covariance is not symmetric.")
        factor, failed = torch.linalg.cholesky_ex((covariance + covariance.mT) / 2)
        if failed or not factor.isfinite().all():
            raise UsageError(
                "GaussianNoise: the covariance is not positive definite. Add a small multiple of the identity to it."
            )
        return factor.detach()

    def deviations(self, shape: tuple[int, ...]) -> Tensor:
        """Standard deviation of every value of a measurement of this shape, its batch axis left out; in float64."""
        root = self._root_for(self._root.new_empty(1, *shape))
        std = root if self.covariance is None else root.square().sum(1).sqrt().reshape(shape)
        return std.expand(shape)

    def whiten(self, residual: Tensor) -> Tensor:
        """Γ^(−½) r: (B, …) → (B, m), in float32 or better."""
        residual = at_least_float32(residual)
        root = self._root_for(residual)
        with full_precision(residual):
            if self.covariance is None:
                return (residual / root).flatten(1)
            return torch.linalg.solve_triangular(root, residual.flatten(1).mT, upper=False).mT

    def norm(self, residual: Tensor) -> Tensor:
        """‖r‖_Γ: (B, …) → (B,); its gradient at r = 0 is 0."""
        return torch.linalg.vector_norm(self.whiten(residual), dim=1)

    def chi2(self, residual: Tensor) -> Tensor:
        """χ²: (B, …) → (B,)."""
        return self.whiten(residual).square().sum(1)

    @cached_property
    def mean_precision(self) -> float:
        """The mean of Γ⁻¹'s diagonal."""
        if self.covariance is None:
            return float(self._root.pow(-2).mean())
        identity = torch.eye(len(self._root), dtype=torch.double, device=self._root.device)
        inverse = torch.linalg.solve_triangular(self._root, identity, upper=False)
        return float(inverse.square().sum(0).mean())

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """n ~ N(0, Γ) for measurements of the shape, type and device of `like` (B, …)."""
        z, root = (
            torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device),
            self._root_for(like),
        )
        if self.covariance is None:
            return z * root
        with full_precision(like):
            return (z.flatten(1) @ root.mT).reshape(like.shape)

    @cached_property
    def _copies(self) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        return {}

    def _root_for(self, like: Tensor) -> Tensor:
        """The root where `like` (B, …) is and in its type, refused if it does not fit; copied once, not every step."""
        shape = tuple(like.shape[1:])
        if self.covariance is not None and math.prod(shape) != len(self._root):
            values = f"a covariance of {len(self._root)} values"
            raise DataError(f"{values} does not fit measurements of {math.prod(shape)}, shape {shape}.")
        if self.covariance is None:
            try:
                self._root.expand(shape)
            except RuntimeError:
                noise = f"noise of shape {tuple(self._root.shape)}"
                raise DataError(f"{noise} does not fit measurements of shape {shape}, batch axis left out.") from None
        place = like.device, like.dtype
        if place not in self._copies:
            with torch.inference_mode(False):  # a copy made in that mode could never take part in a gradient
                self._copies[place] = self._root.to(*place)
        return self._copies[place]
