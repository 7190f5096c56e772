"""A transformer of patches between convolutions at full resolution, after DiT (Peebles and Xie, 2023).

    stem     h = residual(conv(y), τ)                                          all pixels, kept
    tokens   x = conv(h) of the patch's width and stride, + W [cos θ, sin θ]   θ = [row ω, column ω]
    blocks   x ← x + α₁ attention((1 + γ₁) norm x + β₁)
             x ← x + α₂ MLP((1 + γ₂) norm x + β₂)                              (α, β, γ) = W τ, zero at the start
    head     conv(SiLU(norm(residual([W ((1 + γ) norm x + β), h], τ))))

    attention    softmax(q kᵀ / √d) v;  q and k of mean square one times a gain, rotated by θ in pairs of entries
    MLP          W₂ (SiLU(a) ∘ b),  (a, b) = W₁ x

`network(y_t, t)` takes the diffusion time t in (0, 1]. Before training it is zero. Patches cost detail: what the stem
keeps goes past them, pixel by pixel, to the head. Rotations tell attention how far apart two patches are, the sines
where they lie; both go on beyond the sizes that were trained, so sizes are free.

Made for channels-last memory and bfloat16 autocast. The sum x, the time's embedding and the last convolution stay in
float32 or better whatever autocast says.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.generative.networks.layers import ResidualBlock, TimeEmbedding, check_images, check_settings, initialise
from namm.generative.networks.ncsnpp.layers import PictureConv2d, PreciseConv2d, group_norm
from namm.numerics import at_least_float32, full_precision

LONGEST = 100
"""Ratio of the longest to the shortest wavelength of positions; the shortest is 2π patches."""


class DiT(ModelMixin, ConfigMixin):
    """Transformer of y_t and t; the result has the shape of y_t and is float32 or better.

    Args:
        channels: Image channels C.
        filters: Channels at the full resolution, before and after the transformer.
        width: Length of a token; divisible by 4 `heads`.
        depth: Blocks of attention and MLP.
        heads: Heads of attention.
        patch: Pixels a side of a patch; height and width of the images must be divisible by it.
        dropout: Probability inside the MLPs and residual blocks, in training only.
    """

    @register_to_config
    def __init__(
        self,
        channels: int = 1,
        filters: int = 64,
        width: int = 256,
        depth: int = 8,
        heads: int = 4,
        patch: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "filters": filters, "depth": depth, "heads": heads, "patch": patch}
        check_settings(
            "DiT",
            [
                *((name, value, value >= 1, "be at least 1") for name, value in sizes.items()),
                (
                    "width",
                    width,
                    width >= 1 and width % (4 * max(heads, 1)) == 0,
                    f"be divisible by 4 heads, {4 * heads}",
                ),
                ("dropout", dropout, 0 <= dropout < 1, "lie in [0, 1)"),
            ],
        )
        self.channels, self.filters, self.patch = channels, filters, patch
        self.angles = width // heads // 2
        self.time = TimeEmbedding(width)
        self.stem = PictureConv2d(channels, filters, 3, padding=1)
        self.before = ResidualBlock(filters, filters, width, dropout)
        self.embed = nn.Conv2d(filters, width, patch, stride=patch)
        self.place = nn.Linear(2 * self.angles, width)
        blocks = [Block(width, heads, dropout) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.modulation = nn.Linear(width, 2 * width)
        self.unembed = nn.Linear(width, patch**2 * filters)
        self.after = ResidualBlock(2 * filters, filters, width, dropout)
        self.norm = group_norm(filters)
        self.tail = PreciseConv2d(filters, channels, 3, padding=1)
        initialise(self, self.tail, self.modulation, *(block.modulation for block in blocks))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """y_t (B, C, H, W) and t (B,) or () in (0, 1] -> (B, C, H, W)."""
        self.check_size(y.shape)
        time, dtype = self.time(t, y), self.embed.weight.dtype
        h = self.before(self.stem(y.to(dtype)), time)
        x = self.embed(h)
        rows, columns = x.shape[2:]
        with full_precision(y):
            theta = positions(rows, columns, self.angles, like=at_least_float32(self.embed.weight))
            waves = torch.cat([theta.cos(), theta.sin()], dim=-1)
        x = (x.flatten(2).transpose(1, 2) + self.place(waves.to(dtype))).to(dtype)
        for block in self.blocks:
            x = block(x, time, waves)
        scale, shift = self.modulation(time)[:, None].chunk(2, dim=-1)
        x = self.unembed(modulated(x, scale, shift))
        x = x.reshape(-1, rows, columns, self.patch, self.patch, self.filters).transpose(2, 3)
        pixels = x.reshape(len(y), *y.shape[2:], self.filters).permute(0, 3, 1, 2)
        return self.tail(F.silu(self.norm(self.after(torch.cat([pixels, h], dim=1), time))))

    def check_size(self, shape: Sequence[int]) -> None:
        """Refuse a shape that this network cannot map to itself."""
        check_images("DiT", shape, self.channels, self.patch, "choose another patch")


class Block(nn.Module):
    """Attention and MLP, each on a norm that time scales and shifts and behind a gate that time opens."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        hidden = 64 * -(-width // 24)  # 8/3 of the width, in multiples of 64: as many weights as an MLP of 4 widths
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = RotaryAttention(width, heads)
        self.widen, self.dropout, self.narrow = (
            nn.Linear(width, 2 * hidden),
            nn.Dropout(dropout),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor, time: Tensor, waves: Tensor) -> Tensor:
        """x (B, N, width), τ and [cos θ, sin θ] of N places -> (B, N, width)."""
        gate0, scale0, shift0, gate1, scale1, shift1 = self.modulation(time)[:, None].chunk(6, dim=-1)
        x = x + gate0 * self.attention(modulated(x, scale0, shift0), waves)
        opened, value = self.widen(modulated(x, scale1, shift1)).chunk(2, dim=-1)
        return x + gate1 * self.narrow(self.dropout(F.silu(opened) * value))


class RotaryAttention(nn.Module):
    """Attention among N places; scores depend on the difference of two places, not on where they lie."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.gain = nn.Parameter(torch.ones(2, width // heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        """x (B, N, width) and [cos θ, sin θ] (N, width / heads) -> (B, N, width)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        qk, v = at_least_float32(qkv[:2]), qkv[2]
        unit = F.rms_norm(qk, qk.shape[-1:]) * self.gain[:, None, None, None]
        q, k = rotated(unit, waves).to(v.dtype)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """(1 + scale) norm(x) + shift, the norm over the last axis."""
    return (1 + scale) * F.layer_norm(x, x.shape[-1:]) + shift


def positions(rows: int, columns: int, count: int, *, like: Tensor) -> Tensor:
    """θ (rows · columns, count): row ω_j, then column ω_j, with ω_j = 100^(−j/n), j = 0 … n−1, n = count/2."""
    exponents = torch.arange(0, count, 2, dtype=like.dtype, device=like.device) / count
    row, column = (torch.arange(n, dtype=like.dtype, device=like.device) for n in (rows, columns))
    places = torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1).flatten(0, 1)
    return (places[:, :, None] * LONGEST**-exponents).flatten(1)


def rotated(x: Tensor, waves: Tensor) -> Tensor:
    """Entries j and j + d/2 of x (…, N, d) turned by θ_j as a pair; waves = [cos θ, sin θ] (N, d)."""
    (a, b), (cos, sin) = x.chunk(2, dim=-1), waves.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
