"""What joins the branches of NCSN++, for a GPU: one kernel each way.

    joined    y = (x + h + b) / √2
    beside    y = (x, h) along the channels

b is a bias for each channel: that of the convolution before goes there, where it and its gradient cost nothing. A
gradient may be a part of the channels of another tensor, as those of `beside` are: it is read where it is.

All images are channels-last: rows of channels, one for each pixel. `layers.py` has the same in torch, their oracle.
Importing this needs triton, which comes with torch where that knows GPUs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, WIDE = 256, 2**14
"""Rows of a program, and its numbers, at most."""
SQRT_HALF = tl.constexpr(0.5**0.5)


@triton.jit
def _program_rows(rows, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of a program, channels, and which of both there are."""
    c = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, c, (c < C)[None, :] & (row < rows)[:, None]


@triton.jit
def _join(x, h, bias, y, rows, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(x + h + b) / √2."""
    row, c, there = _program_rows(rows, C, WIDTH, BLOCK)
    place = row[:, None] * C + c[None, :]
    found = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    found += tl.load(h + place, mask=there, other=0.0).to(tl.float32)
    found += tl.load(bias + c, mask=c < C, other=0.0)[None, :]
    tl.store(y + place, (found * SQRT_HALF).to(y.dtype.element_ty), mask=there)


@triton.jit
def _join_back(grad, out, sums, rows, stride, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of x and of h, and its sum over the rows of a block; `stride` numbers from row to row of `grad`."""
    row, c, there = _program_rows(rows, C, WIDTH, BLOCK)
    found = tl.load(grad + row[:, None] * stride + c[None, :], mask=there, other=0.0).to(tl.float32) * SQRT_HALF
    tl.store(out + row[:, None] * C + c[None, :], found.to(out.dtype.element_ty), mask=there)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(found, 0), mask=c < C)


@triton.jit
def _copy(x, y, rows, read, write, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """C numbers of every row, from row to row `read` numbers apart, to where they are `write` apart."""
    row, c, there = _program_rows(rows, C, WIDTH, BLOCK)
    value = tl.load(x + row[:, None] * read + c[None, :], mask=there, other=0.0)
    tl.store(y + row[:, None] * write + c[None, :], value, mask=there)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, bias: Tensor) -> Tensor:
        y, how = torch.empty_like(x), _cut(x)
        _join[_programs(x, how)](x, h, bias, y, _rows(x), **how)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        if (step := _step(grad)) is None:
            grad, step = packed(grad), grad.shape[1]
        out, how = _empty_images(grad, grad.shape[1]), _cut(grad)
        sums = grad.new_empty((*_programs(grad, how), grad.shape[1]), dtype=torch.float32)
        _join_back[_programs(grad, how)](grad, out, sums, _rows(grad), step, **how)
        return out, out, sums.sum(0)


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor) -> Tensor:
        ctx.channels, both = x.shape[1], x.shape[1] + h.shape[1]
        y = _empty_images(x, both)
        for part, place in zip((x, h), y.tensor_split([ctx.channels], dim=1), strict=True):
            _copy_rows(part, place, part.shape[1], both)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_h = packed(grad).tensor_split([ctx.channels], dim=1)
        packed_h = _empty_images(of_h, of_h.shape[1])  # without gaps: it will be added to another
        _copy_rows(of_h, packed_h, grad.shape[1], of_h.shape[1])
        return of_x, packed_h


def joined(x: Tensor, h: Tensor, bias: Tensor) -> Tensor:
    """(x + h + b) / √2 of two images (B, C, H, W), in the dtype of x; `bias` b (C,), float32."""
    y: Tensor = _Joined.apply(packed(x), packed(h.to(x.dtype)), bias)
    return y


def beside(x: Tensor, h: Tensor) -> Tensor:
    """(B, C, H, W) and (B, D, H, W) -> (B, C + D, H, W), in the dtype of x."""
    y: Tensor = _Beside.apply(packed(x), packed(h.to(x.dtype)))
    return y


def packed(x: Tensor) -> Tensor:
    """x channels-last, without gaps."""
    return x.contiguous(memory_format=torch.channels_last)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _cut(x: Tensor) -> dict[str, int]:
    """How rows of channels are cut."""
    width = triton.next_power_of_2(x.shape[1])
    return {"C": x.shape[1], "WIDTH": width, "BLOCK": max(1, min(ROWS, WIDE // width))}


def _programs(x: Tensor, how: dict[str, int]) -> tuple[int]:
    return (-(-_rows(x) // how["BLOCK"]),)


def _step(x: Tensor) -> int | None:
    """Numbers from row to row where that is the same everywhere, as in a part of the channels; else None."""
    images, height, width, channels = x.permute(0, 2, 3, 1).stride()
    same = (images, height) == (width * x.shape[2] * x.shape[3], width * x.shape[3])
    return width if same and channels == 1 else None


def _empty_images(x: Tensor, channels: int) -> Tensor:
    """Uninitialised channels-last images of the size of x, with that many channels."""
    return x.new_empty((len(x), *x.shape[2:], channels)).permute(0, 3, 1, 2)


def _copy_rows(x: Tensor, y: Tensor, read: int, write: int) -> None:
    how = _cut(x)
    _copy[_programs(x, how)](x, y, _rows(x), read, write, **how)
