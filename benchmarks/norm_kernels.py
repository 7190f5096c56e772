"""Group norm with what surrounds it, for a GPU: a bias before and SiLU after, sums over pixels by kernels of our own.

    x̂ = (x + a − μ) r,     z = γ x̂ + β,     y = silu(z) or z

μ and r = 1/√(variance + ε) are over the pixels and channels of a group, a is a bias for each image and channel. Only
sums over pixels are kernels, which read channels-last memory in its order and once: everything else is written in
torch, for the compiler to fuse with its neighbours. Left to itself it would fuse the sums with them, and be slower.
`torch.nn.functional.group_norm` in float64 is the oracle.

Importing this needs triton, which comes with torch where that knows GPUs.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

TILE = 8192
"""Numbers that a program holds at a time, at most, unless a single pixel has more."""


@triton.jit
def _moments(x, found, pixels, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mean of each channel over a block of pixels, and the sum of squares about it."""
    block, image = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < C
    rows = image * pixels + block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + rows[:, None] * C + columns[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / BLOCK
    rest = value - mean[None, :]
    place = found + (image * tl.num_programs(0) + block) * 2 * C + columns
    tl.store(place, mean, mask=inside)
    tl.store(place + C, tl.sum(rest * rest, 0), mask=inside)


@triton.jit
def _gradient_sums(
    x, grad, unit, offset, weight, bias, found, pixels, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Σ ∂z and Σ ∂z x̂ of each channel over a block of pixels, x̂ = unit x + offset."""
    block, image = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < C
    rows = image * pixels + block * BLOCK + tl.arange(0, BLOCK)
    places = rows[:, None] * C + columns[None, :]
    value = tl.load(x + places, mask=inside[None, :], other=0.0).to(tl.float32)
    down = tl.load(grad + places, mask=inside[None, :], other=0.0).to(tl.float32)
    scale = tl.load(unit + image * C + columns, mask=inside, other=0.0)
    shift = tl.load(offset + image * C + columns, mask=inside, other=0.0)
    normal = value * scale[None, :] + shift[None, :]
    if SILU:
        gain = tl.load(weight + columns, mask=inside, other=0.0)
        level = tl.load(bias + columns, mask=inside, other=0.0)
        z = normal * gain[None, :] + level[None, :]
        gate = 1 / (1 + tl.exp(-z))
        down = down * gate * (1 + z * (1 - gate))
    place = found + (image * tl.num_programs(0) + block) * 2 * C + columns
    tl.store(place, tl.sum(down, 0), mask=inside)
    tl.store(place + C, tl.sum(down * normal, 0), mask=inside)


@triton_op("namm::group_norm", mutates_args={})
def norm_op(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y in x's dtype and layout; each channel's mean of x + a (B, C); μ and r of each group (B, G)."""
    means, squares = _over_blocks(_moments, x, ()).unbind(2)
    pixels = x.shape[2] * x.shape[3]
    mean = means.mean(1)
    variance = (squares.sum(1) + (means - mean[:, None]).square().sum(1) * (pixels // means.shape[1])) / pixels
    if added is not None:
        mean = mean + added
    grouped = mean.unflatten(1, (groups, -1))
    middle = grouped.mean(2)
    spread = (variance.unflatten(1, (groups, -1)) + (grouped - middle[:, :, None]).square()).mean(2)
    rate = torch.rsqrt(spread + eps)
    unit, offset = _affine(x.shape[1], added, middle, rate)
    z = (x.float() * _wide(unit) + _wide(offset)) * weight[:, None, None] + bias[:, None, None]
    return (torch.nn.functional.silu(z) if silu else z).to(x.dtype), mean, middle, rate


@triton_op("namm::group_norm_backward", mutates_args={})
def _backward_op(
    grad: Tensor,
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    middle: Tensor,
    rate: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a, γ and β."""
    groups, pixels = middle.shape[1], x.shape[2] * x.shape[3]
    grad = grad.contiguous(memory_format=torch.channels_last)
    unit, offset = _affine(x.shape[1], added, middle, rate)
    sums = _over_blocks(_gradient_sums, x, (grad, unit, offset, weight, bias), SILU=silu).sum(1)
    first, second = sums.unbind(1)  # Σ ∂z and Σ ∂z x̂ over pixels, (B, C)
    numbers = pixels * x.shape[1] // groups
    along, across = (
        _spread((weight * each).unflatten(1, (groups, -1)).sum(2) / numbers, x.shape[1]) for each in (first, second)
    )
    normal = x.float() * _wide(unit) + _wide(offset)
    down = grad.float()
    if silu:
        z = normal * weight[:, None, None] + bias[:, None, None]
        gate = z.sigmoid()
        down = down * gate * (1 + z * (1 - gate))
    slope = (_wide(unit) * (weight[:, None, None] * down - _wide(along) - normal * _wide(across))).to(x.dtype)
    of_normal = pixels * (mean - _spread(middle, x.shape[1])) * unit  # Σ x̂ over pixels
    return slope, unit * (weight * first - pixels * along - across * of_normal), second.sum(0), first.sum(0)


def group_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, *, silu: bool
) -> Tensor:
    """y of channels-last x (B, C, H, W), in its dtype; `added` a (B, C), `weight` γ and `bias` β (C,), float32."""
    y: Tensor = norm_op(x, added, weight, bias, groups, eps, silu)[0]
    return y


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, added, weight, bias, _, _, ctx.silu = inputs
    ctx.save_for_backward(x, added, weight, bias, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, added, weight, bias, *rest = ctx.saved_tensors
    slope, of_added, of_weight, of_bias = _backward_op(grad, x, added, weight, bias, *rest, ctx.silu)
    return slope, None if added is None else of_added, of_weight, of_bias, None, None, None


norm_op.register_autograd(_backward, setup_context=_remember)


def _over_blocks(kernel: Any, x: Tensor, given: tuple[Tensor, ...], **options: Any) -> Tensor:
    """What `kernel` finds of every image, block of pixels and channel, two numbers each: (B, blocks, 2, C)."""
    images, channels, height, width = x.shape
    pixels = height * width
    block = 1
    while pixels % (2 * block) == 0 and 2 * block * channels <= TILE:
        block *= 2
    found = x.new_empty((images, pixels // block, 2, channels), dtype=torch.float32)
    launch: Callable[..., None] = wrap_triton(kernel)[(pixels // block, images)]
    launch(x, *given, found, pixels, C=channels, WIDTH=triton.next_power_of_2(channels), BLOCK=block, **options)
    return found


def _affine(channels: int, added: Tensor | None, middle: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """x̂ = unit x + offset, both (B, C)."""
    unit = _spread(rate, channels)
    return unit, ((0.0 if added is None else added) - _spread(middle, channels)) * unit


def _spread(grouped: Tensor, channels: int) -> Tensor:
    """What each group has, for each of its channels: (B, G) -> (B, C)."""
    return grouped.repeat_interleave(channels // grouped.shape[1], 1)


def _wide(each: Tensor) -> Tensor:
    return each[:, :, None, None]
