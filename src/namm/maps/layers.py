"""Convolutions that keep the image size, with the boundary the images have.

Along each axis a kernel of k points on a stride s needs k − s more values than the image holds (for even sizes), the
odd one after the end: that is what "same" padding means here. `circular` takes them from the opposite side, `zeros`
invents them.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Boundary = Literal["zeros", "circular"]


def circular_pad(x: Tensor, before: int, after: int) -> Tensor:
    """Wrap the last two axes of `x` by `before` and `after` pixels. Concatenation, whose backward is cheap on CPU."""
    rows = x.shape[-2]
    x = torch.cat([x[..., rows - before :, :], x, x[..., :after, :]], dim=-2)
    columns = x.shape[-1]
    return torch.cat([x[..., columns - before :], x, x[..., :after]], dim=-1)


def circular_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """Correlation with an odd kernel on a torus; x: (B, I, H, W), weight: (O, I, k, k), result (B, O, H, W)."""
    reach = weight.shape[-1] // 2
    return F.conv2d(circular_pad(x, reach, reach), weight) if reach else F.conv2d(x, weight)


def circular_conv2d_transpose(x: Tensor, weight: Tensor) -> Tensor:
    """Adjoint of `circular_conv2d` with the same weight; x: (B, O, H, W), result (B, I, H, W)."""
    return circular_conv2d(x, weight.transpose(0, 1).flip(-2, -1))


class SameConv2d(nn.Conv2d):
    """Convolution to (H/stride, W/stride) with a choice of boundary."""

    def __init__(
        self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, boundary: Boundary = "zeros"
    ) -> None:
        super().__init__(inputs, outputs, kernel_size, stride)
        self.before = (kernel_size - stride) // 2
        self.after = kernel_size - stride - self.before
        self.boundary = boundary

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H/stride, W/stride)."""
        if self.boundary == "circular":
            x = circular_pad(x, self.before, self.after)
        elif self.before == self.after:
            return F.conv2d(x, self.weight, self.bias, self.stride, self.before)
        else:
            x = F.pad(x, (self.before, self.after, self.before, self.after))
        return F.conv2d(x, self.weight, self.bias, self.stride)


class DoublingConv2d(nn.ConvTranspose2d):
    """Transposed 3×3 convolution to exactly (2H, 2W): out[o] = Σᵢ x[i] k[o − 2i] along each axis."""

    def __init__(self, inputs: int, outputs: int, *, boundary: Boundary = "zeros") -> None:
        super().__init__(inputs, outputs, kernel_size=3, stride=2)
        self.boundary = boundary

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """(B, I, H, W) -> (B, O, 2H, 2W)."""
        if self.boundary == "circular":
            x = circular_pad(x, 1, 0)
            return F.conv_transpose2d(x, self.weight, self.bias, 2)[..., 2:-1, 2:-1]
        return F.conv_transpose2d(x, self.weight, self.bias, 2)[..., :-1, :-1]
