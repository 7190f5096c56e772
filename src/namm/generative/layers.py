"""The blocks of NCSN++: resampling, residual blocks, attention and the input pyramid.

    residual     (S x + conv₁ drop σ norm₁(conv₀ ρ σ norm₀ x + W σ τ)) / √2      σ = SiLU, τ the embedded time
    attention    (x + O softmax(q kᵀ / √C) v) / √2                               q, k, v linear in norm x, per pixel
    pyramid      (conv(φ p) + h) / √2                                            p the image at the resolution above

ρ keeps, halves or doubles the image and S is the matching shortcut. Both resamplings filter with the outer product φ of
[1, 3, 3, 1]/8, zeros outside the image. Filtering and keeping every other pixel is one strided depthwise convolution;
inserting zeros and filtering with 4 φ is its transpose, one depthwise transposed convolution. φ is exact in bfloat16.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from namm.numerics import at_least_float32, full_precision

SQRT_HALF = 0.5**0.5


class Fir(nn.Module):
    """φ, once per channel, as a buffer that is neither trained nor saved."""

    kernel: Tensor

    def __init__(self, channels: int, gain: float = 1.0) -> None:
        super().__init__()
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        kernel = gain * torch.outer(taps, taps)
        self.register_buffer("kernel", kernel.repeat(channels, 1, 1, 1), persistent=False)


class Halve(Fir):
    """(B, C, H, W) -> (B, C, H/2, W/2)."""

    def forward(self, x: Tensor) -> Tensor:
        """Filter with one pixel of zeros around the image and keep every other value."""
        return F.conv2d(x, self.kernel, stride=2, padding=1, groups=len(self.kernel))


class Double(Fir):
    """(B, C, H, W) -> (B, C, 2H, 2W); a constant stays the same constant, except at the boundary."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, gain=4.0)

    def forward(self, x: Tensor) -> Tensor:
        """Put a zero after each pixel along each axis and filter with 4 φ."""
        return F.conv_transpose2d(x, self.kernel, stride=2, padding=1, groups=len(self.kernel))


class PyramidStep(Fir):
    """The image at half the resolution, with as many channels as the features it joins: conv(φ p)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2)

    def forward(self, p: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H/2, W/2)."""
        return self.conv(F.conv2d(p, self.kernel, padding=2, groups=len(self.kernel)))


class ResidualBlock(nn.Module):
    """BigGAN's residual block with a bias per channel that depends on time.

    Args:
        inputs: Channels of x.
        outputs: Channels of the result.
        time: Length of the embedded time τ.
        dropout: Probability, before the second convolution.
        resample: `Halve`, `Double`, or `nn.Identity` to keep the resolution.
    """

    def __init__(
        self, inputs: int, outputs: int, time: int, dropout: float, resample: type[nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        self.norm0 = group_norm(inputs)
        self.resample = resample(inputs)
        self.conv0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.bias = nn.Linear(time, outputs)
        self.norm1 = group_norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        plain = inputs == outputs and resample is nn.Identity
        self.shortcut = nn.Identity() if plain else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: (B, inputs, H, W) and σ(τ): (B, time) -> (B, outputs, ρ H, ρ W)."""
        h = self.conv0(self.resample(F.silu(self.norm0(x))))
        h = h + self.bias(time)[:, :, None, None]
        h = self.conv1(self.dropout(F.silu(self.norm1(h))))
        return (self.shortcut(self.resample(x)) + h) * SQRT_HALF


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


class PreciseConv2d(nn.Conv2d):
    """A convolution in float32 or better, whatever autocast says and whatever its weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H', W') of at least float32."""
        with full_precision(x):
            weight = at_least_float32(self.weight)
            bias = None if self.bias is None else at_least_float32(self.bias)
            return F.conv2d(x.to(weight.dtype), weight, bias, self.stride, self.padding)


def group_norm(channels: int) -> nn.GroupNorm:
    """Groups of at least four channels and at most 32 groups, as many as divide the channels evenly."""
    most = min(channels // 4, 32)
    groups = max((n for n in range(1, most + 1) if channels % n == 0), default=1)
    return nn.GroupNorm(groups, channels, eps=1e-6)


def embed_time(time: Tensor, width: int, *, reference: bool = False) -> Tensor:
    """[sin(ω_j s), cos(ω_j s)], ω_j = 10000^(−j/(n−1)), j = 0 … n−1, n = width/2; s: (B,) -> (B, width).

    Args:
        time: s, in the precision that the result shall have.
        width: Even number of features, 4 or more.
        reference: Round ω to float32 as the published network does, also where `time` is float64.
    """
    half = width // 2
    dtype = torch.float32 if reference else time.dtype
    exponents = torch.arange(half, device=time.device, dtype=dtype) * -(math.log(10_000) / (half - 1))
    phases = time[:, None] * exponents.exp().to(time.dtype)
    return torch.cat([phases.sin(), phases.cos()], dim=1)
