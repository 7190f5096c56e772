"""What surrounds the convolutions of a residual block of the score network, for a GPU: one kernel each way.

    normalised    y = drop(silu(γ x̂ + β)) or γ x̂ + β,     x̂ = (x + a − μ) r,     r = 1/√(variance + ε)
    joined        y = (x + h + b) / √2

μ and the variance are over the pixels and channels of a group, a is a bias for each image and channel, b one for each
channel. A program of the first has an image and a few whole groups of it to itself: it reads them twice, the second
time out of the cache, and nothing else passes through memory. Biases of convolutions go into a and b, where they and
their gradients cost nothing.

All images are channels-last. `torch.nn.functional.group_norm` in float64 is the oracle. Importing this needs triton,
which comes with torch where that knows GPUs.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE = 16
"""Channels of a program at least: 32 bytes of bfloat16, which memory hands over together."""
TILE = 2**14
"""Numbers that a program holds at a time, at most."""
ROWS = 256
"""Pixels of a program that joins."""
SQRT_HALF = tl.constexpr(0.5**0.5)


@triton.jit
def _own(PIXELS: tl.constexpr, C: tl.constexpr, SLICE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The image of a program, its channels and which of them there are, and the places of its first pixels."""
    image = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    channel = tl.program_id(0) * SLICE + c
    place = (image * PIXELS + tl.arange(0, BLOCK))[:, None] * C + channel[None, :]
    return image, channel, c < SLICE, place


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
    x, added, weight, bias, kept, y, unit, base, stride, eps, gain, PIXELS: tl.constexpr, C: tl.constexpr,
    SLICE: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr,
    SILU: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """y, and r and (a − μ) r of every channel, by which x̂ = r x + (a − μ) r."""
    image, channel, inside, place = _own(PIXELS, C, SLICE, WIDTH, BLOCK)
    mean = tl.zeros((WIDTH,), tl.float32)
    squares = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, PIXELS, BLOCK):
        value = tl.load(x + place + first * C, mask=inside[None, :], other=0.0).to(tl.float32)
        own = tl.sum(value, 0) / BLOCK
        rest = value - own[None, :]
        off = own - mean
        squares += tl.sum(rest * rest, 0) + off * off * (first * BLOCK / (first + BLOCK))
        mean += off * (BLOCK / (first + BLOCK))
    shift = tl.zeros((WIDTH,), tl.float32)
    if ADDED:
        shift = tl.load(added + image * stride + channel, mask=inside, other=0.0).to(tl.float32)
    mean += shift
    middle = _in_group(mean, inside, WIDTH, SIZE) / SIZE
    spread = _in_group(squares / PIXELS + (mean - middle) * (mean - middle), inside, WIDTH, SIZE) / SIZE
    rate = 1 / tl.sqrt(spread + eps)
    offset = (shift - middle) * rate
    tl.store(unit + image * C + channel, rate, mask=inside)
    tl.store(base + image * C + channel, offset, mask=inside)
    factor = tl.load(weight + channel, mask=inside, other=0.0)
    level = offset * factor + tl.load(bias + channel, mask=inside, other=0.0)
    factor *= rate
    for first in range(0, PIXELS, BLOCK):
        z = (
            tl.load(x + place + first * C, mask=inside[None, :], other=0.0).to(tl.float32) * factor[None, :]
            + level[None, :]
        )
        if SILU:
            z = z * _gate(z)
        if DROPPED:
            z = tl.where(tl.load(kept + place + first * C, mask=inside[None, :], other=0) != 0, z * gain, 0.0)
        tl.store(y + place + first * C, z.to(y.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _slope(x, grad, kept, place, inside, rate, offset, factor, level, gain, SILU: tl.constexpr, DROPPED: tl.constexpr):
    """x̂ and the gradient of γ x̂ + β."""
    normal = tl.load(x + place, mask=inside[None, :], other=0.0).to(tl.float32) * rate[None, :] + offset[None, :]
    down = tl.load(grad + place, mask=inside[None, :], other=0.0).to(tl.float32)
    if DROPPED:
        down = tl.where(tl.load(kept + place, mask=inside[None, :], other=0) != 0, down * gain, 0.0)
    if SILU:
        z = normal * factor[None, :] + level[None, :]
        gate = _gate(z)
        down = down * gate * (1 + z * (1 - gate))
    return normal, down


@triton.jit
def _normalise_back(
    x, grad, weight, bias, kept, unit, base, out, sums, gain, PIXELS: tl.constexpr, C: tl.constexpr,
    SLICE: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
    DROPPED: tl.constexpr,
):  # fmt: skip
    """The gradient of x; and of each image those of a, γ and β, for each channel."""
    image, channel, inside, place = _own(PIXELS, C, SLICE, WIDTH, BLOCK)
    rate = tl.load(unit + image * C + channel, mask=inside, other=0.0)
    offset = tl.load(base + image * C + channel, mask=inside, other=0.0)
    factor = tl.load(weight + channel, mask=inside, other=0.0)
    level = tl.load(bias + channel, mask=inside, other=0.0)
    total = tl.zeros((WIDTH,), tl.float32)  # Σ x̂, Σ ∂z, Σ ∂z x̂
    plain = tl.zeros((WIDTH,), tl.float32)
    along = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, PIXELS, BLOCK):
        normal, down = _slope(
            x, grad, kept, place + first * C, inside, rate, offset, factor, level, gain, SILU, DROPPED
        )
        total += tl.sum(tl.where(inside[None, :], normal, 0.0), 0)
        plain += tl.sum(down, 0)
        along += tl.sum(down * normal, 0)
    numbers = PIXELS * SIZE
    common = _in_group(factor * plain, inside, WIDTH, SIZE) / numbers
    tilt = _in_group(factor * along, inside, WIDTH, SIZE) / numbers
    at = sums + image * 3 * C + channel
    tl.store(at, rate * (factor * plain - PIXELS * common - tilt * total), mask=inside)
    tl.store(at + C, along, mask=inside)
    tl.store(at + 2 * C, plain, mask=inside)
    for first in range(0, PIXELS, BLOCK):
        normal, down = _slope(
            x, grad, kept, place + first * C, inside, rate, offset, factor, level, gain, SILU, DROPPED
        )
        found = rate[None, :] * (factor[None, :] * down - common[None, :] - normal * tilt[None, :])
        tl.store(out + place + first * C, found.to(out.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _join(x, h, bias, y, rows, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(x + h + b) / √2."""
    c = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    everywhere = (c < C)[None, :] & (row < rows)[:, None]
    place = row[:, None] * C + c[None, :]
    found = tl.load(x + place, mask=everywhere, other=0.0).to(tl.float32)
    found += tl.load(h + place, mask=everywhere, other=0.0).to(tl.float32)
    found += tl.load(bias + c, mask=c < C, other=0.0)[None, :]
    tl.store(y + place, (found * SQRT_HALF).to(y.dtype.element_ty), mask=everywhere)


@triton.jit
def _join_back(grad, out, sums, rows, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of x and of h, and its sum over the rows of a block."""
    c = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    everywhere = (c < C)[None, :] & (row < rows)[:, None]
    place = row[:, None] * C + c[None, :]
    found = tl.load(grad + place, mask=everywhere, other=0.0).to(tl.float32) * SQRT_HALF
    tl.store(out + place, found.to(out.dtype.element_ty), mask=everywhere)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(found, 0), mask=c < C)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, *how: Any) -> Tensor:
        groups, eps, silu, dropout = how
        kept = torch.empty_like(x, dtype=torch.uint8).bernoulli_(1 - dropout) if dropout else x
        y, unit, base = torch.empty_like(x), *(x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2))
        ctx.how = {"SILU": silu, "DROPPED": dropout > 0, **_sizes(x, groups)}
        ctx.grid, ctx.gain, ctx.has_added = _grid(x, ctx.how), 1 / (1 - dropout), added is not None
        _normalise[ctx.grid](
            *(x, x if added is None else added, weight, bias, kept, y, unit, base),
            *(0 if added is None else added.stride(0), eps, ctx.gain),
            ADDED=added is not None,
            **ctx.how,
            num_warps=_warps(ctx.how),
        )
        ctx.save_for_backward(x, weight, bias, unit, base, *([kept] if dropout else []))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, unit, base, *rest = ctx.saved_tensors
        grad, out = grad.contiguous(memory_format=torch.channels_last), torch.empty_like(x)
        sums = x.new_empty((len(x), 3, x.shape[1]), dtype=torch.float32)
        kept = rest[0] if rest else x
        _normalise_back[ctx.grid](
            *(x, grad, weight, bias, kept, unit, base, out, sums, ctx.gain), **ctx.how, num_warps=_warps(ctx.how)
        )
        of_weight, of_bias = sums[:, 1:].sum(0)
        return out, sums[:, 0] if ctx.has_added else None, of_weight, of_bias, None, None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, bias: Tensor) -> Tensor:
        y, ctx.how = torch.empty_like(x), _rows(x)
        ctx.grid = (-(-x.numel() // x.shape[1] // ctx.how["BLOCK"]),)
        _join[ctx.grid](x, h, bias, y, x.numel() // x.shape[1], **ctx.how)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        grad = grad.contiguous(memory_format=torch.channels_last)
        out, sums = torch.empty_like(grad), grad.new_empty((*ctx.grid, grad.shape[1]), dtype=torch.float32)
        _join_back[ctx.grid](grad, out, sums, grad.numel() // grad.shape[1], **ctx.how)
        return out, out, sums.sum(0)


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
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _Normalised.apply(x, added, weight, bias, groups, eps, silu, dropout)
    return y


def joined(x: Tensor, h: Tensor, bias: Tensor) -> Tensor:
    """(x + h + b) / √2 of two images (B, C, H, W), in the dtype of x; `bias` b (C,), float32."""
    x, h = (each.contiguous(memory_format=torch.channels_last) for each in (x, h))
    y: Tensor = _Joined.apply(x, h.to(x.dtype), bias)
    return y


def _sizes(x: Tensor, groups: int) -> dict[str, int]:
    """How an image is cut: whole groups, in as many programs as have `SLICE` channels or a little more."""
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    size = channels // groups
    together = next(n for n in range(1, groups + 1) if groups % n == 0 and (n * size >= SLICE or n == groups))
    width = triton.next_power_of_2(together * size)
    block = math.gcd(pixels, max(1, TILE // width))
    return {"PIXELS": pixels, "C": channels, "SLICE": together * size, "WIDTH": width, "SIZE": size, "BLOCK": block}


def _grid(x: Tensor, sizes: dict[str, int]) -> tuple[int, int]:
    return x.shape[1] // sizes["SLICE"], len(x)


def _warps(sizes: dict[str, int]) -> int:
    """For 64 numbers a thread at most."""
    return max(1, min(8, sizes["WIDTH"] * sizes["BLOCK"] // 2048))


def _rows(x: Tensor) -> dict[str, int]:
    width = triton.next_power_of_2(x.shape[1])
    return {"C": x.shape[1], "WIDTH": width, "BLOCK": max(1, min(ROWS, TILE // width))}
