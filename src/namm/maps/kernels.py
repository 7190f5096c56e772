"""g on a GPU without gradients, a kernel for each layer: hidden states pass through memory, products with x never do.

In the notation of `namm.maps.icnn`: a kernel on the way up computes z_l from z_{l−1} and x, on the way down δ_{l−1}
from δ_l, the sign of z_{l−1} and x. With every δ_l it adds Q_lᵀ(2 q_l δ_l) + R_lᵀ δ_l, nine numbers for each pixel and
channel of x, to a sum that the last kernel folds back into the image. Products of x are computed where they are used.

`ICNN` is their oracle, and says which networks and images they are for. Importing this needs triton, which comes with
torch where that knows GPUs.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from namm.maps.icnn import ICNN

BLOCK = 128
"""Pixels of a program."""
UP, DOWN = 4, 8
"""Threads by 32 of a program on either way."""


@triton.jit
def _neighbour(pixel, tap, sign, H: tl.constexpr, W: tl.constexpr):
    """The pixel one step away on the torus: `tap` counts the steps row by row, `sign` says which way."""
    row = (pixel // W + sign * (tap // 3 - 1) + H) % H
    column = (pixel % W + sign * (tap % 3 - 1) + W) % W
    return row * W + column


@triton.jit
def _near(x, image, pixel, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr):
    """The neighbours of pixels in all channels of x: (pixels, TAPS), zeros from 9 C on."""
    n = tl.arange(0, TAPS)
    place = _neighbour(pixel[:, None], (n % 9)[None, :], 1, H, W)
    channel = tl.minimum(n // 9, C - 1)[None, :]
    return tl.load(x + (image * C + channel) * H * W + place, mask=(n < 9 * C)[None, :], other=0.0)


@triton.jit
def _convolved(
    z, weight, image, pixel, F: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr
):
    """Σ over nine neighbours of z times a matrix for each: (pixels, F)."""
    f = tl.arange(0, F)
    found = tl.zeros((BLOCK, F), dtype=tl.float32)
    for tap in tl.static_range(9):
        place = image * H * W + _neighbour(pixel, tap, 1, H, W)
        value = tl.load(z + place[:, None] * F + f[None, :])
        matrix = tl.load(weight + tap * F * F + f[:, None] * F + f[None, :])
        found += tl.dot(value, matrix, input_precision="tf32" if TF32 else "ieee")
    return found


@triton.jit
def _up(
    x, z, weight, inputs, bias, out, slope, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """z_l."""
    image = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f, n = tl.arange(0, F), tl.arange(0, TAPS)
    near = _near(x, image, pixel, C, H, W, TAPS)
    quadratic = tl.dot(near, tl.load(inputs + n[:, None] * F + f[None, :]), input_precision="tf32" if TF32 else "ieee")
    linear = tl.load(inputs + TAPS * F + n[:, None] * F + f[None, :])
    a = quadratic * quadratic + tl.dot(near, linear, input_precision="tf32" if TF32 else "ieee")
    a += tl.load(bias + f)[None, :]
    if not FIRST:
        a += _convolved(z, weight, image, pixel, F, H, W, BLOCK, TF32)
    place = (image * H * W + pixel)[:, None] * F + f[None, :]
    tl.store(out + place, tl.where(a > 0, a, a * slope))


@triton.jit
def _down(
    x, z, delta, weight, inputs, back, top, out, total, slope, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    TF32: tl.constexpr,
):  # fmt: skip
    """δ_l, from `top` where l = L and not kept where l = 0, and what it adds to the sum over layers."""
    image = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f, n = tl.arange(0, F), tl.arange(0, TAPS)
    place = (image * H * W + pixel)[:, None] * F + f[None, :]
    rise = tl.where(tl.load(z + place) > 0, 1.0, slope)
    if LAST:
        d = rise * tl.load(top + f)[None, :]
    else:
        d = rise * _convolved(delta, weight, image, pixel, F, H, W, BLOCK, TF32)
    if not FIRST:
        tl.store(out + place, d)
    near = _near(x, image, pixel, C, H, W, TAPS)
    quadratic = tl.dot(near, tl.load(inputs + n[:, None] * F + f[None, :]), input_precision="tf32" if TF32 else "ieee")
    first = tl.load(back + f[:, None] * TAPS + n[None, :])
    second = tl.load(back + TAPS * F + f[:, None] * TAPS + n[None, :])
    sums = tl.dot(2 * quadratic * d, first, input_precision="tf32" if TF32 else "ieee")
    sums += tl.dot(d, second, input_precision="tf32" if TF32 else "ieee")
    places = total + (image * H * W + pixel)[:, None] * TAPS + n[None, :]
    if not LAST:
        sums += tl.load(places)
    tl.store(places, sums)


@triton.jit
def _fold(
    x, total, out, alpha, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    """α x + (1 − α) of the sum, each of its nine numbers moved back to the pixel it is of."""
    image = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for channel in tl.static_range(C):
        found = tl.zeros((BLOCK,), dtype=tl.float32)
        for tap in tl.static_range(9):
            place = image * H * W + _neighbour(pixel, tap, -1, H, W)
            found += tl.load(total + place * TAPS + channel * 9 + tap)
        at = (image * C + channel) * H * W + pixel
        tl.store(out + at, alpha * tl.load(x + at) + (1 - alpha) * found)


@torch.no_grad()
def icnn(g: "ICNN", x: Tensor, *, tf32: bool = True) -> Tensor:
    """g(x), float32: (B, C, H, W) -> (B, C, H, W), with products in TF32 or not."""
    images, channels, height, width = x.shape
    layers, filters = len(g.hidden) + 1, g.hidden.shape[1]
    taps = max(16, triton.next_power_of_2(9 * channels))
    x = x.contiguous()
    sizes: dict[str, Any] = {"C": channels, "H": height, "W": width, "TAPS": taps, "BLOCK": BLOCK}
    grid = (height * width // BLOCK, images)

    def inputs(kernel: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(kernel.flatten(1), (0, taps - 9 * channels))  # (layers F, taps)
        return wide.unflatten(0, (layers, filters)).transpose(1, 2)

    both = torch.stack([inputs(g.quadratic), inputs(g.linear)], dim=1).contiguous()  # (layers, 2, taps, F)
    back = both.transpose(2, 3).contiguous()
    bias = g.bias.unflatten(0, (layers, filters))
    ways = g.hidden.flatten(3)  # (L, out, in, 9)
    up, down = ways.permute(0, 3, 2, 1).contiguous(), ways.flip(3).permute(0, 3, 1, 2).contiguous()
    top = g.output.sum((0, 2, 3)) / (width * channels)
    states = [x.new_empty(images, height * width, filters) for _ in range(layers)]
    how: dict[str, Any] = {"F": filters, "TF32": tf32}
    for k, state in enumerate(states):
        below, weight = (states[k - 1], up[k - 1]) if k else (state, both)  # neither is read where there is none
        given = (x, below, weight, both[k], bias[k], state, g.negative_slope)
        _up[grid](*given, FIRST=k == 0, **sizes, **how, num_warps=UP)
    total = x.new_empty(images, height * width, taps)
    delta, spare = torch.empty_like(states[0]), torch.empty_like(states[0])
    for k in reversed(range(layers)):
        ends = {"FIRST": k == 0, "LAST": k == layers - 1}
        weight = both if ends["LAST"] else down[k]
        tensors = (x, states[k], spare, weight, both[k], back[k], top, delta, total)
        _down[grid](*tensors, g.negative_slope, **ends, **sizes, **how, num_warps=DOWN)
        delta, spare = spare, delta
    out = torch.empty_like(x)
    _fold[grid](x, total, out, g.strong_convexity, **sizes)
    return out
