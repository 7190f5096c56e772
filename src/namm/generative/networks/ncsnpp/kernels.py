"""Kernels for what surrounds the convolutions of NCSN++ on a GPU: one for each way through it.

    joined                     y = (x + h + b) / √2
    concatenated               y = (x, h) along the channels
    normalised, activated      y = drop(silu(γ x̂ + β)) or γ x̂ + β,     x̂ = (x + a − μ) r,     r = 1/√(variance + ε)

b is a bias for each channel, a one for each image and channel: that of the convolution before goes there, where it and
its gradient cost nothing. A gradient may be a part of the channels of another tensor, as those of `concatenated` are:
it is read where it is.

μ and the variance are over the pixels and channels of a group. A program of a norm has an image and a few whole groups
of it to itself. It reads them twice, the second time from the end, which is most likely to be still in the cache. Sizes
of images are no constants of the kernels: the fewer of them there are, the sooner they are compiled.

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
"""Rows of a program that joins, and its numbers, at most."""
SLICE, TILE, WARPS = 32, 2**12, 4
"""Channels of a norm's program at least, numbers that it holds at a time, threads by 32: the fastest of a search."""
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
    row, c, mask = _program_rows(rows, C, WIDTH, BLOCK)
    place = row[:, None] * C + c[None, :]
    result = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    result += tl.load(h + place, mask=mask, other=0.0).to(tl.float32)
    result += tl.load(bias + c, mask=c < C, other=0.0)[None, :]
    tl.store(y + place, (result * SQRT_HALF).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _join_back(grad, out, sums, rows, stride, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of x and of h, and its sum over the rows of a block; `stride` numbers from row to row of `grad`."""
    row, c, mask = _program_rows(rows, C, WIDTH, BLOCK)
    result = tl.load(grad + row[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32) * SQRT_HALF
    tl.store(out + row[:, None] * C + c[None, :], result.to(out.dtype.element_ty), mask=mask)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(result, 0), mask=c < C)


@triton.jit
def _copy(x, y, rows, read, write, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """C numbers of every row, from row to row `read` numbers apart, to where they are `write` apart."""
    row, c, mask = _program_rows(rows, C, WIDTH, BLOCK)
    value = tl.load(x + row[:, None] * read + c[None, :], mask=mask, other=0.0)
    tl.store(y + row[:, None] * write + c[None, :], value, mask=mask)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, bias: Tensor) -> Tensor:
        y, launch = torch.empty_like(x), _cut(x)
        _join[_programs(x, launch)](x, h, bias, y, _rows(x), **launch)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        if (step := _step(grad)) is None:
            grad, step = packed(grad), grad.shape[1]
        out, launch = _empty_images(grad, grad.shape[1]), _cut(grad)
        sums = grad.new_empty((*_programs(grad, launch), grad.shape[1]), dtype=torch.float32)
        _join_back[_programs(grad, launch)](grad, out, sums, _rows(grad), step, **launch)
        return out, out, sums.sum(0)


class _Concatenated(torch.autograd.Function):
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
    return _Joined.apply(packed(x), packed(h.to(x.dtype)), bias)


def concatenated(x: Tensor, h: Tensor) -> Tensor:
    """(B, C, H, W) and (B, D, H, W) -> (B, C + D, H, W), in the dtype of x."""
    return _Concatenated.apply(packed(x), packed(h.to(x.dtype)))


def packed(x: Tensor) -> Tensor:
    """x channels-last, without gaps."""
    return x.contiguous(memory_format=torch.channels_last)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _cut(x: Tensor) -> dict[str, int]:
    """How rows of channels are cut."""
    width = triton.next_power_of_2(x.shape[1])
    return {"C": x.shape[1], "WIDTH": width, "BLOCK": max(1, min(ROWS, WIDE // width))}


def _programs(x: Tensor, launch: dict[str, int]) -> tuple[int]:
    return (-(-_rows(x) // launch["BLOCK"]),)


def _step(x: Tensor) -> int | None:
    """Numbers from row to row where that is the same everywhere, as in a part of the channels; else None."""
    images, height, width, channels = x.permute(0, 2, 3, 1).stride()
    same = (images, height) == (width * x.shape[2] * x.shape[3], width * x.shape[3])
    return width if same and channels == 1 else None


def _empty_images(x: Tensor, channels: int) -> Tensor:
    """Uninitialised channels-last images of the size of x, with that many channels."""
    return x.new_empty((len(x), *x.shape[2:], channels)).permute(0, 3, 1, 2)


def _copy_rows(x: Tensor, y: Tensor, read: int, write: int) -> None:
    launch = _cut(x)
    _copy[_programs(x, launch)](x, y, _rows(x), read, write, **launch)


# Norms


@triton.jit
def _program_tile(pixels, channels, SLICE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The image of a program, its channels and which of them there are, its first pixels and their places."""
    image = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    channel = tl.program_id(0) * SLICE + c
    pixel = tl.arange(0, BLOCK)
    place = (image * pixels + pixel)[:, None] * channels + channel[None, :]
    return image, channel, c < SLICE, pixel, place


@triton.jit
def _tile(x, place, pixel, inside, first, pixels, channels):
    """Numbers of x from pixel `first` on, zeros where there are none, and where there are."""
    mask = inside[None, :] & (first + pixel < pixels)[:, None]
    return tl.load(x + place + first * channels, mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _in_group(value, inside, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """For each channel the sum over its group."""
    c = tl.arange(0, WIDTH)
    same = (c[:, None] // SIZE == c[None, :] // SIZE) & inside[None, :]
    return tl.sum(tl.where(same, value[None, :], 0.0), 1)


@triton.jit
def _gate(z):
    return 1 / (1 + tl.exp(-z))


@triton.jit
def _normalise(
    x, added, weight, bias, kept, y, stats, stride, eps, gain, pixels, channels, SLICE: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, SILU: tl.constexpr,
    DROPPED: tl.constexpr,
):  # fmt: skip
    """y; and of every channel r and (a − μ) r, by which x̂ = r x + (a − μ) r, and the mean of x̂."""
    image, channel, inside, pixel, place = _program_tile(pixels, channels, SLICE, WIDTH, BLOCK)
    value, mask = _tile(x, place, pixel, inside, 0, pixels, channels)
    pivot = tl.sum(value, 0) / tl.minimum(BLOCK, pixels)
    total = tl.zeros((BLOCK, WIDTH), tl.float32)  # of numbers near the pivot: nothing cancels
    squares = tl.zeros((BLOCK, WIDTH), tl.float32)
    for first in range(0, pixels, BLOCK):
        value, mask = _tile(x, place, pixel, inside, first, pixels, channels)
        rest = tl.where(mask, value - pivot[None, :], 0.0)
        total += rest
        squares += rest * rest
    off = tl.sum(total, 0) / pixels
    variance = tl.sum(squares, 0) / pixels - off * off
    shift = tl.zeros((WIDTH,), tl.float32)
    if ADDED:
        shift = tl.load(added + image * stride + channel, mask=inside, other=0.0).to(tl.float32)
    mean = pivot + off + shift
    middle = _in_group(mean, inside, WIDTH, SIZE) / SIZE
    spread = _in_group(variance + (mean - middle) * (mean - middle), inside, WIDTH, SIZE) / SIZE
    rate = 1 / tl.sqrt(spread + eps)
    offset = (shift - middle) * rate
    at = stats + image * 3 * channels + channel
    tl.store(at, rate, mask=inside)
    tl.store(at + channels, offset, mask=inside)
    tl.store(at + 2 * channels, (mean - middle) * rate, mask=inside)
    factor = tl.load(weight + channel, mask=inside, other=0.0)
    level = offset * factor + tl.load(bias + channel, mask=inside, other=0.0)
    factor *= rate
    for done in range(0, pixels, BLOCK):
        first = (tl.cdiv(pixels, BLOCK) - 1) * BLOCK - done
        value, mask = _tile(x, place, pixel, inside, first, pixels, channels)
        z = value * factor[None, :] + level[None, :]
        if SILU:
            z = z * _gate(z)
        if DROPPED:
            z = tl.where(tl.load(kept + place + first * channels, mask=mask, other=0) != 0, z * gain, 0.0)
        tl.store(y + place + first * channels, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _slope(
    x, grad, kept, place, pixel, inside, first, pixels, channels, rate, offset, factor, level, gain, SILU: tl.constexpr,
    DROPPED: tl.constexpr,
):  # fmt: skip
    """x̂ and the gradient of γ x̂ + β, from pixel `first` on; the latter is zero where there are no pixels."""
    normal, mask = _tile(x, place, pixel, inside, first, pixels, channels)
    normal = normal * rate[None, :] + offset[None, :]
    down, _ = _tile(grad, place, pixel, inside, first, pixels, channels)
    if DROPPED:
        down = tl.where(tl.load(kept + place + first * channels, mask=mask, other=0) != 0, down * gain, 0.0)
    if SILU:
        z = normal * factor[None, :] + level[None, :]
        gate = _gate(z)
        down = down * gate * (1 + z * (1 - gate))
    return normal, down, mask


@triton.jit
def _normalise_back(
    x, grad, other, weight, bias, kept, stats, out, sums, gain, pixels, channels, SLICE: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, SILU: tl.constexpr,
    DROPPED: tl.constexpr,
):  # fmt: skip
    """The gradient of x with that of its other uses; and of each image those of a, γ and β, for each channel."""
    image, channel, inside, pixel, place = _program_tile(pixels, channels, SLICE, WIDTH, BLOCK)
    at = image * 3 * channels + channel
    rate = tl.load(stats + at, mask=inside, other=0.0)
    offset = tl.load(stats + at + channels, mask=inside, other=0.0)
    mean = tl.load(stats + at + 2 * channels, mask=inside, other=0.0)
    factor = tl.load(weight + channel, mask=inside, other=0.0)
    level = tl.load(bias + channel, mask=inside, other=0.0)
    summed = tl.zeros((BLOCK, WIDTH), tl.float32)
    along = tl.zeros((BLOCK, WIDTH), tl.float32)
    for first in range(0, pixels, BLOCK):
        normal, down, _ = _slope(
            x, grad, kept, place, pixel, inside, first, pixels, channels, rate, offset, factor, level, gain, SILU,
            DROPPED,
        )  # fmt: skip
        summed += down
        along += down * normal
    of_bias, of_weight = tl.sum(summed, 0), tl.sum(along, 0)
    common = _in_group(factor * of_bias, inside, WIDTH, SIZE) / (pixels * SIZE)
    tilt = _in_group(factor * of_weight, inside, WIDTH, SIZE) / (pixels * SIZE)
    tl.store(sums + at, rate * (factor * of_bias - pixels * (common + tilt * mean)), mask=inside)
    tl.store(sums + at + channels, of_weight, mask=inside)
    tl.store(sums + at + 2 * channels, of_bias, mask=inside)
    for done in range(0, pixels, BLOCK):
        first = (tl.cdiv(pixels, BLOCK) - 1) * BLOCK - done
        normal, down, mask = _slope(
            x, grad, kept, place, pixel, inside, first, pixels, channels, rate, offset, factor, level, gain, SILU,
            DROPPED,
        )  # fmt: skip
        result = rate[None, :] * (factor[None, :] * down - common[None, :] - normal * tilt[None, :])
        if OTHER:
            result += tl.load(other + place + first * channels, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place + first * channels, result.to(out.dtype.element_ty), mask=mask)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, *launch: Any) -> Any:
        groups, eps, silu, dropout, through = launch
        kept = torch.empty_like(x, dtype=torch.uint8).bernoulli_(1 - dropout) if dropout else x
        y, stats = torch.empty_like(x), x.new_empty((len(x), 3, x.shape[1]), dtype=torch.float32)
        ctx.launch = {"SILU": silu, "DROPPED": dropout > 0, **_sizes(x, groups)}
        ctx.grid, ctx.sizes = (x.shape[1] // ctx.launch["SLICE"], len(x)), (x.shape[2] * x.shape[3], x.shape[1])
        ctx.gain, ctx.has_added = 1 / (1 - dropout), added is not None
        _normalise[ctx.grid](
            *(x, x if added is None else added, weight, bias, kept, y, stats),
            *(0 if added is None else added.stride(0), eps, ctx.gain, *ctx.sizes),
            ADDED=added is not None,
            **ctx.launch,
        )
        ctx.save_for_backward(x, weight, bias, stats, *([kept] if dropout else []))
        ctx.set_materialize_grads(False)
        return (y, x.view_as(x)) if through else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, other: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, *rest = ctx.saved_tensors
        grad, out, sums = packed(grad), torch.empty_like(x), torch.empty_like(stats)
        _normalise_back[ctx.grid](
            *(x, grad, x if other is None else packed(other), weight, bias, rest[0] if rest else x, stats, out, sums),
            *(ctx.gain, *ctx.sizes),
            OTHER=other is not None,
            **ctx.launch,
        )
        of_weight, of_bias = sums[:, 1:].sum(0)
        return out, sums[:, 0] if ctx.has_added else None, of_weight, of_bias, *(None,) * 5


def normalised(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    *,
    silu: bool,
    dropout: float = 0.0,
) -> Tensor:
    """y of x (B, C, H, W), in its dtype; `added` a (B, C), rows without gaps, `weight` γ and `bias` β (C,), float32."""
    return _Normalised.apply(packed(x), added, weight, bias, groups, eps, silu, dropout, False)


def activated(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """silu(γ x̂ + β), and x for its other uses: their gradient is added where that of the norm is computed."""
    return _Normalised.apply(packed(x), None, weight, bias, groups, eps, True, 0.0, True)


def _sizes(x: Tensor, groups: int) -> dict[str, Any]:
    """How an image is cut: whole groups, in as many programs as have `SLICE` channels or a little more."""
    size = x.shape[1] // groups
    together = next(n for n in range(1, groups + 1) if groups % n == 0 and (n * size >= SLICE or n == groups))
    width = triton.next_power_of_2(together * size)
    block = max(1, TILE // width)
    return {"SLICE": together * size, "WIDTH": width, "SIZE": size, "BLOCK": block, "num_warps": WARPS}
