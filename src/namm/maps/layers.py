"""Convolutions that keep the image size, with the boundary the images have.

Along each axis a kernel of k points on a stride s needs k − s more values than the image holds (for even sizes), the
odd one after the end: that is what "same" padding means here. `circular` takes them from the opposite side, `zeros`
invents them, and `cylinder` takes them from the opposite side along rows only, where the top meets the bottom, as in
images of space (down) and time (across).
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from namm.numerics import at_least_float32, in_two

Boundary = Literal["zeros", "circular", "cylinder"]
WRAPPED: dict[Boundary, tuple[int, ...]] = {"zeros": (), "circular": (-2, -1), "cylinder": (-2,)}
"""The axes along which the last pixel meets the first."""


def wrap(x: Tensor, before: int, after: int, axes: Sequence[int]) -> Tensor:
    """Continue `x` by `before` and `after` pixels along each axis. Concatenation, whose backward is cheap on CPU."""
    for axis in axes:
        start, end = x.narrow(axis, 0, after), x.narrow(axis, x.shape[axis] - before, before)
        x = torch.cat([end, x, start], dim=axis)
    return x


def circular_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """Correlation with an odd kernel on a torus; x: (B, I, H, W), weight: (O, I, k, k), result (B, O, H, W)."""
    reach = weight.shape[-1] // 2
    return F.conv2d(wrap(x, reach, reach, WRAPPED["circular"]) if reach else x, weight)


def circular_conv2d_transpose(x: Tensor, weight: Tensor) -> Tensor:
    """Adjoint of `circular_conv2d` with the same weight; x: (B, O, H, W), result (B, I, H, W)."""
    return circular_conv2d(x, weight.transpose(0, 1).flip(-2, -1))


def conv2d_from_few(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.conv2d(x, weight, bias)` for few input channels, which leave matrix units idle.

    Neighbours in a row become channels, filled up to a multiple of 8. x: (B, I, H, W), weight: (O, I, k, k).
    """
    k, columns = weight.shape[-1], x.shape[-1] - weight.shape[-1] + 1
    empty = -(k * x.shape[1]) % 8
    shifted = [x[..., j : j + columns] for j in range(k)]
    filled = torch.cat([*shifted, x.new_zeros(len(x), empty, x.shape[2], columns)], dim=1)
    kernel = F.pad(weight.permute(0, 3, 1, 2).flatten(1, 2), (0, 0, 0, empty))[..., None]
    return F.conv2d(filled.contiguous(memory_format=torch.channels_last), kernel, bias)


def conv2d_to_few(x: Tensor, weight: Tensor, bias: Tensor | None = None, block: int = 4) -> Tensor:
    """`F.conv2d(x, weight, bias)` for few output channels, which leave matrix units idle.

    A block of output pixels becomes block² channels of one pixel, whose kernels are the given one, shifted.
    x: (B, I, H, W), weight: (O, I, k, k); both sides of the result must be divisible by `block`.
    """
    rest = block - 1
    kernels = [F.pad(weight, (j, rest - j, i, rest - i)) for i in range(block) for j in range(block)]
    biases = None if bias is None else bias.repeat_interleave(block**2)
    return F.pixel_shuffle(F.conv2d(x, torch.stack(kernels, dim=1).flatten(0, 1), biases, stride=block), block)


class SameConv2d(nn.Conv2d):
    """Convolution to (H/stride, W/stride) with a choice of boundary."""

    def __init__(
        self, inputs: int, outputs: int, kernel_size: int, *, stride: int = 1, boundary: Boundary = "zeros"
    ) -> None:
        super().__init__(inputs, outputs, kernel_size, stride)
        self.before = (kernel_size - stride) // 2
        self.after = kernel_size - stride - self.before
        self.wrapped = WRAPPED[boundary]
        self.empty = tuple(axis not in self.wrapped for axis in (-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H/stride, W/stride)."""
        if self.before != self.after:
            return F.conv2d(self.padded(x), self.weight, self.bias, self.stride)
        zeros = [self.before * empty for empty in self.empty]
        return F.conv2d(self._wrap(x), self.weight, self.bias, self.stride, zeros)

    def padded(self, x: Tensor) -> Tensor:
        """`x` with its boundary around it."""
        rows, columns = ((self.before * empty, self.after * empty) for empty in self.empty)
        return F.pad(self._wrap(x), (*columns, *rows)) if any(self.empty) else self._wrap(x)

    def _wrap(self, x: Tensor) -> Tensor:
        return wrap(x, self.before, self.after, self.wrapped)


class FirstConv2d(SameConv2d):
    """From the channels of a picture to many."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H, W)."""
        return self.for_matrix_units(x) if x.is_cuda else super().forward(x)

    def for_matrix_units(self, x: Tensor) -> Tensor:
        """The same, without the rounding of a float32 picture that they bring."""
        if x.dtype != torch.float32:
            return conv2d_from_few(self.padded(x), self.weight, self.bias)
        return conv2d_from_few(self.padded(in_two(x)), torch.cat([self.weight, self.weight], dim=1), self.bias)


class LastConv2d(SameConv2d):
    """From many channels to those of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H, W)."""
        blocks = x.is_cuda and x.shape[-2] % 4 == x.shape[-1] % 4 == 0
        return conv2d_to_few(self.padded(x), self.weight, self.bias) if blocks else super().forward(x)


class InstanceNorm2d(nn.InstanceNorm2d):
    """torch's own, which would turn channels-last memory into another layout and back; here it stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same shape and precision, computed in float32 or better."""
        wide = at_least_float32(x)
        variance, mean = torch.var_mean(wide, (2, 3), correction=0, keepdim=True)
        scale = self.weight[:, None, None] * torch.rsqrt(variance + self.eps)
        return ((wide - mean) * scale + self.bias[:, None, None]).to(x.dtype)


class DoublingConv2d(nn.ConvTranspose2d):
    """Transposed 3×3 convolution to exactly (2H, 2W): out[o] = Σᵢ x[i] k[o − 2i] along each axis."""

    def __init__(self, inputs: int, outputs: int, *, boundary: Boundary = "zeros") -> None:
        super().__init__(inputs, outputs, kernel_size=3, stride=2)
        self.wrapped = WRAPPED[boundary]

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """(B, I, H, W) -> (B, O, 2H, 2W)."""
        doubled = F.conv_transpose2d(wrap(x, 1, 0, self.wrapped), self.weight, self.bias, 2)
        rows, columns = (slice(2 if axis in self.wrapped else 0, -1) for axis in (-2, -1))
        return doubled[..., rows, columns]
