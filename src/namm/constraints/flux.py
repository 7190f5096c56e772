"""Total flux: all pixels of an image add up to a known total.

    ℓ(x) = |Σ x − F|

The sum is the rule, so there is nothing to average over. The set {x : Σ x = F} is a hyperplane; its normal
is the image of ones, so the nearest point spreads the deficit evenly over the n pixels:

    P(x) = x − (Σ x − F) / n

Sums of float32 images are accumulated in float64: what matters is a small difference of two large numbers.
"""

import torch
from torch import Tensor

from namm.constraints.base import Constraint
from namm.constraints.contract import finite_number
from namm.errors import UsageError
from namm.numerics import at_least_float32


class TotalFlux(Constraint):
    """ℓ(x) = |Σ over channels, rows and columns of x − total|.

    Args:
        total: the flux F that every image must have, in the units of the pixels; 120 in the paper.
    """

    def __init__(self, total: float = 120.0) -> None:
        super().__init__()
        number = finite_number(total)
        if number is None:
            raise UsageError(f"TotalFlux needs a finite number as total, got {total!r}.")
        self.total: float = number

    def distance(self, x: Tensor) -> Tensor:
        """|Σ x − F|: (B, C, H, W) → (B,)."""
        return self._excess(x).abs().to(x.dtype)

    def residual(self, x: Tensor) -> Tensor:
        """Σ x − F, signed: (B, C, H, W) → (B, 1, 1, 1), which broadcasts against x."""
        x = at_least_float32(x)
        return self._excess(x).to(x.dtype).reshape(-1, 1, 1, 1)

    def project(self, x: Tensor) -> Tensor:
        """The nearest image of total F in least squares: (B, C, H, W) → (B, C, H, W).

        The deficit is spread over all pixels alike, so dark pixels may turn negative.
        """
        x = at_least_float32(x)
        share = self._excess(x).reshape(-1, 1, 1, 1) / x.shape[1:].numel()
        # Subtracted before rounding: a rounded share would err n times in the same direction.
        return (x.to(share.dtype) - share).to(x.dtype)

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor:
        """The deficit spread in proportion to scale²: (B, C, H, W) → (B, C, H, W)."""
        weight = scale.square().expand_as(x)
        total = weight.sum(dim=(1, 2, 3), keepdim=True)
        return x - self._excess(x).reshape(-1, 1, 1, 1).to(x.dtype) * weight / total

    def _excess(self, x: Tensor) -> Tensor:
        """Σ x − F: (B,), in float64 wherever the device has it."""
        wide = x.dtype if x.device.type == "mps" else torch.float64
        return x.sum(dim=(1, 2, 3), dtype=wide) - self.total
