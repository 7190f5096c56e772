"""The blocks of NCSN++: resampling, residual blocks, attention and the input pyramid.

    residual     (S x + conv₁ drop σ norm₁(conv₀ ρ σ norm₀ x + W σ τ)) / √2      σ = SiLU, τ the embedded time
    attention    (x + O softmax(q kᵀ / √C) v) / √2                               q, k, v linear in norm x, per pixel
    pyramid      (conv(φ p) + h) / √2                                            p the image at the resolution above

ρ keeps, halves or doubles the image and S is the matching shortcut. Both resamplings filter with the outer product φ of
[1, 3, 3, 1]/8, zeros outside the image, written as two products with banded matrices, one along each axis: on GPUs they
run at the speed of memory, unlike depthwise convolutions. φ is exact in bfloat16. While a GPU records its launches
(`namm.gpu.Recorded`), what surrounds the convolutions is computed by hand-written kernels.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from namm.gpu import uses_kernels
from namm.numerics import at_least_float32, full_precision, in_two

SQRT_HALF = 0.5**0.5


def keep(x: Tensor) -> Tensor:
    """(B, C, H, W) as it is."""
    return x


def halve(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, H/2, W/2): y[o] = Σᵢ φ[i − 2o + 1] x[i] along each axis."""
    return resample(x, *(fir(n // 2, n, 2, 1, like=x) for n in x.shape[-2:]))


def double(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, 2H, 2W): y[o] = Σᵢ 2 φ[o − 2i + 1] x[i] along each axis.

    The transpose of halving, times 4; a constant stays the same constant, except at the boundary.
    """
    return resample(x, *(2 * fir(n, 2 * n, 2, 1, like=x).T for n in x.shape[-2:]))


class PyramidStep(nn.Module):
    """The image at half the resolution, with as many channels as the features it joins: conv(φ p)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2)

    def forward(self, p: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H/2, W/2)."""
        return self.conv(resample(p, *(fir(n + 1, n, 1, 2, like=p) for n in p.shape[-2:])))


def fir(rows: int, columns: int, stride: int, before: int, *, like: Tensor) -> Tensor:
    """The filter [1, 3, 3, 1]/8 as a matrix: row o holds it from column stride · o − before on, cut off at the ends."""
    make = _cached_fir if uses_kernels() else _fir  # a compiler sees by itself that it is always the same
    return make(rows, columns, stride, before, like.device, like.dtype)


def _fir(rows: int, columns: int, stride: int, before: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    o = torch.arange(rows, device=device)[:, None]
    i = torch.arange(columns, device=device)
    return ((2 - (i - stride * o + before - 1.5).abs()).clamp(min=0) / 4).to(dtype)


@cache
def _cached_fir(*how: Any) -> Tensor:
    with torch.inference_mode(False):  # what is made in that mode could never take part in a gradient
        return _fir(*how)


def resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """R x Cᵀ for every image and channel: (B, C, H, W), (H', H), (W', W) -> (B, C, H', W'), in the layout of x."""
    batch, channels, height, width = x.shape
    if x.stride(1) != 1 or channels == 1:
        return rows @ (x @ columns.T)
    pixels = x.permute(0, 2, 3, 1)  # channels-last: each product is one over contiguous memory
    h = torch.bmm(rows.expand(batch, -1, -1), pixels.reshape(batch, height, width * channels))
    h = torch.bmm(columns.expand(batch * len(rows), -1, -1), h.reshape(-1, width, channels))
    return h.view(batch, len(rows), len(columns), channels).permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """BigGAN's residual block with a bias per channel that depends on time.

    Args:
        inputs: Channels of x.
        outputs: Channels of the result.
        time: Length of the embedded time τ.
        dropout: Probability, before the second convolution.
        resample: `keep`, `halve` or `double`, for the resolution.
    """

    def __init__(
        self, inputs: int, outputs: int, time: int, dropout: float, resample: Callable[[Tensor], Tensor] = keep
    ) -> None:
        super().__init__()
        self.norm0 = group_norm(inputs)
        self.resample = resample
        self.conv0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.bias = nn.Linear(time, outputs)
        self.norm1 = group_norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        unchanged = inputs == outputs and resample is keep
        self.shortcut = nn.Identity() if unchanged else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        """x: (B, inputs, H, W) and what `time_biases` has for this block -> (B, outputs, ρ H, ρ W)."""
        if uses_kernels():
            return self._by_kernels(x, added)
        h = self.conv0(self.resample(F.silu(self.norm0(x))))
        h = h + added[:, :, None, None]
        h = self.conv1(self.dropout(F.silu(self.norm1(h))))
        return (self.shortcut(self.resample(x)) + h) * SQRT_HALF

    def _by_kernels(self, x: Tensor, added: Tensor) -> Tensor:
        """The same; biases of convolutions are where the kernels take them."""
        from namm.generative.networks.ncsnpp.kernels import activated, joined, normalised

        h, x = activated(x, *self.norm0.kernel_arguments())
        h = F.conv2d(self.resample(h), self.conv0.weight, padding=1)
        dropout = self.dropout.p if self.training else 0.0
        h = normalised(h, added, *self.norm1.kernel_arguments(), silu=True, dropout=dropout)
        h = F.conv2d(h, self.conv1.weight, padding=1)
        x, bias = self.resample(x), _bias(self.conv1)
        if isinstance(self.shortcut, nn.Conv2d):
            x, bias = F.conv2d(x, self.shortcut.weight), bias + _bias(self.shortcut)
        return joined(x, h, bias)


def time_biases(blocks: Sequence[ResidualBlock], time: Tensor) -> list[Tensor]:
    """What each block adds to its first convolution, from σ(τ) (B, time): W σ τ, (B, outputs).

    For kernels all of it is one product, in float32 and together with the convolution's bias.
    """
    if not uses_kernels():
        return [block.bias(time) for block in blocks]
    product = F.linear(time, torch.cat([block.bias.weight for block in blocks])).float()
    constant = torch.cat([block.bias.bias for block in blocks]) + torch.cat([_bias(block.conv0) for block in blocks])
    return list((product + constant).split([block.conv0.out_channels for block in blocks], dim=1))


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias


def concatenated(x: Tensor, h: Tensor) -> Tensor:
    """x and h, one after the other along the channels."""
    if not uses_kernels():
        return torch.cat([x, h], dim=1)
    from namm.generative.networks.ncsnpp import kernels

    return kernels.concatenated(x, h)


class SelfAttention(nn.Module):
    """One head over all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same shape; in channels-last memory every reshape here is a view."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(pixels).unsqueeze(1).chunk(3, dim=-1)
        h = self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return (x + h.transpose(1, 2).unflatten(2, x.shape[2:])) * SQRT_HALF


class PictureConv2d(nn.Conv2d):
    """A convolution that reads a picture: in two parts on a GPU, whose matrix units would round its every pixel."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H', W')."""
        return self.for_matrix_units(x) if x.is_cuda and x.dtype == torch.float32 else super().forward(x)

    def for_matrix_units(self, x: Tensor) -> Tensor:
        """The same of a float32 picture."""
        parts = (in_two(x), torch.cat([self.weight, self.weight], dim=1))
        picture, weight = (part.contiguous(memory_format=torch.channels_last) for part in parts)
        return F.conv2d(picture, weight, self.bias, self.stride, self.padding)


class PreciseConv2d(nn.Conv2d):
    """A convolution in float32 or better, whatever autocast says and whatever its weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H', W') of at least float32."""
        with full_precision(x):
            weight = at_least_float32(self.weight)
            bias = None if self.bias is None else at_least_float32(self.bias)
            return F.conv2d(x.to(weight.dtype), weight, bias, self.stride, self.padding)


class GroupNorm(nn.GroupNorm):
    """Group norm that keeps channels-last memory as it is; torch's would change the layout and back.

    There statistics are taken over the pixels of each channel first, which reads memory in its order, and channels of a
    group are joined after: the variance of all is the mean of theirs plus the variance of their means.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same shape, computed in float32 or better."""
        if uses_kernels():
            from namm.generative.networks.ncsnpp.kernels import normalised

            return normalised(x, None, *self.kernel_arguments(), silu=False)
        if x.stride(1) != 1 or x.shape[1] == 1:
            return super().forward(x)
        wide = at_least_float32(x)
        variance, mean = (s.unflatten(1, (self.num_groups, -1)) for s in torch.var_mean(wide, (2, 3), correction=0))
        middle = mean.mean(2, keepdim=True)
        spread = (variance + (mean - middle).square()).mean(2, keepdim=True)
        scale = (self.weight.view_as(mean[0]) * torch.rsqrt(spread + self.eps)).flatten(1)
        shift = self.bias - scale * middle.expand_as(mean).flatten(1)
        return (wide * scale[:, :, None, None] + shift[:, :, None, None]).to(x.dtype)

    def kernel_arguments(self) -> tuple[Tensor, Tensor, int, float]:
        """Weight, bias, number of groups and ε, in the order of the kernels' arguments."""
        return self.weight, self.bias, self.num_groups, self.eps


def group_norm(channels: int) -> GroupNorm:
    """Groups of at least four channels and at most 32 groups, as many as divide the channels evenly."""
    most = min(channels // 4, 32)
    groups = max((n for n in range(1, most + 1) if channels % n == 0), default=1)
    return GroupNorm(groups, channels, eps=1e-6)


def embed_time(time: Tensor, width: int, *, reference: bool = False) -> Tensor:
    """[sin(ω_j s), cos(ω_j s)], ω_j = 10000^(−j/(n−1)), j = 0 … n−1, n = width/2; s: (B,) -> (B, width).

    In the precision of s; `reference` rounds ω to float32 as the published network does, also where s is float64.
    """
    half = width // 2
    dtype = torch.float32 if reference else time.dtype
    exponents = torch.arange(half, device=time.device, dtype=dtype) * -(math.log(10_000) / (half - 1))
    phases = time[:, None] * exponents.exp().to(time.dtype)
    return torch.cat([phases.sin(), phases.cos()], dim=1)
