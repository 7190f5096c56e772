"""An inverse map f for rules of any reach: local, spectral and global corrections of y, none at the start.

    h₀ = head(y, m),     h_k = h_{k−1} + conv(SiLU(conv(h_{k−1}) + Aᵀ (w_k ∘ A h_{k−1} Bᵀ) B)),     x̂ = y + tail(h_K)
    f(y) = x̂ (1 + a₀ + a₁ m) + b₀ + b₁ m + Σ_k c_k T_k,     (a, b, c) = MLP(whitened statistics of y and x̂) / 10

*Local*: convolutions at full resolution; the tail starts at zero, so that f starts as the identity.

*Spectral*: each channel's coefficients in the orthonormal bases A and B of the two axes (Fourier where the boundary is
periodic, cosines where it is not) are multiplied by weights, which reaches across the image in one layer. A size other
than the one trained on uses the frequencies that both have.

*Global*: noise of σ per pixel moves an image's mean by σ/√N only, and among features of size one a network does not
find that. `calibrate` makes it visible, once, before training. Statistics are the mean, mean square and mean modulus of
each channel, over the image and over the mask m where the rule looks, and the products with templates T_k, the
principal directions of ∇ℓ; they are decorrelated and scaled to unit variance on the images that f will see. For a
rule about a sum over a part of the image the one template is that part. f itself never sees the rule: it is a
function of images.

Under autocast the corrections inside the blocks are narrow; what they are added to, the head, the tail and everything
global stay in float32 or better.
"""

import math
from typing import Self, get_args

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.maps.layers import WRAPPED, Boundary, SameConv2d
from namm.numerics import at_least_float32, full_precision

GAIN = 0.1
"""Size of the global corrections for outputs of the MLP of size one."""
LOOKS = 0.1
"""The rule looks at pixels whose mean |∂ℓ/∂x| is at least this fraction of the image's."""
SHARE = 0.02
"""Least share of a template in the gradients' energy."""
RANK = 1e-6
"""Eigenvalues of the statistics' correlation below this fraction of the largest are rounding."""


class RuleNet(ModelMixin, ConfigMixin):
    """Local, spectral and global inverse map; input and output have the same shape.

    Args:
        channels: Image channels C.
        height: Rows of the images that it is trained on.
        width: Columns of the images that it is trained on.
        filters: Channels of the blocks.
        blocks: Residual blocks.
        modes: Frequencies per axis, the lowest.
        templates: Directions of ∇ℓ that global corrections may take.
        hidden: Width of the global network.
        boundary: `zeros`, `circular`, or `cylinder`, where only the top meets the bottom.
    """

    @register_to_config
    def __init__(
        self,
        channels: int = 1,
        height: int = 32,
        width: int = 32,
        filters: int = 24,
        blocks: int = 5,
        modes: int = 64,
        templates: int = 4,
        hidden: int = 64,
        boundary: Boundary = "circular",
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "height": height, "width": width, "filters": filters, "modes": modes}
        for name, value in {**sizes, "hidden": hidden}.items():
            if value < 1:
                raise UsageError(f"RuleNet: {name} must be at least 1, not {value}.")
        if boundary not in get_args(Boundary):
            raise UsageError(f"RuleNet: boundary must be one of {', '.join(get_args(Boundary))}, not {boundary!r}.")
        self.channels = channels
        self.head = SameConv2d(2 * channels, filters, 5, boundary=boundary)
        self.periodic = tuple(axis in WRAPPED[boundary] for axis in (-2, -1))
        self.lowest = (min(height, modes), min(width, modes))
        self.body = nn.ModuleList(Block(filters, self.lowest, boundary) for _ in range(blocks))
        self.tail = SameConv2d(filters, channels, 3, boundary=boundary)
        self.whole = GlobalCorrection(channels, height, width, templates, hidden)
        nn.init.zeros_(self.tail.weight)
        nn.init.zeros_(self.tail.bias)  # type: ignore[arg-type]

    def forward(self, y: Tensor) -> Tensor:
        """f(y): (B, C, H, W) -> (B, C, H, W)."""
        self.check_size(y.shape)
        y = y.to(self.tail.weight.dtype)
        mask, templates = self.whole.regions(y.shape[-2:])
        with full_precision(y):
            h = self.head(torch.cat([y, mask.expand(len(y), -1, -1, -1)], dim=1))
        axes = zip(y.shape[-2:], self.lowest, self.periodic, strict=True)
        rows, columns = (basis(size, modes, periodic, y) for size, modes, periodic in axes)
        for block in self.body:
            h = h + at_least_float32(block(h, rows, columns))
        with full_precision(y):
            return self.whole(y, y + self.tail(h), mask, templates)

    def check_size(self, shape: tuple[int, ...]) -> None:
        """Refuse a shape that this network cannot map to itself."""
        if len(shape) != 4 or shape[1] != self.channels:
            raise DataError(f"this RuleNet takes images (B, {self.channels}, H, W); it was given {tuple(shape)}.")
        if min(shape[2:]) < 4:
            raise DataError(f"images of {shape[2]}×{shape[3]} are too small for a RuleNet: it needs 4 pixels a side.")

    @property
    def is_calibrated(self) -> bool:
        """Whether `calibrate` has been called, on this network or on the one that it was loaded from."""
        return bool(self.whole.calibrated)

    def calibrate(self, y: Tensor, gradients: Tensor) -> Self:
        """Choose mask and templates, and whiten the statistics.

        Args:
            y: Images as f is given them, with noise (N, C, H, W).
            gradients: ∇ℓ at images with noise (M, C, H, W).
        """
        self.check_size(y.shape)
        self.whole.calibrate(y, gradients)
        return self


class Block(nn.Module):
    """conv(SiLU(conv(h) + spectral(h)))."""

    def __init__(self, filters: int, modes: tuple[int, int], boundary: Boundary) -> None:
        super().__init__()
        self.conv0 = SameConv2d(filters, filters, 3, boundary=boundary)
        self.conv1 = SameConv2d(filters, filters, 3, boundary=boundary)
        self.spectrum = nn.Parameter(0.02 * torch.randn(filters, *modes))

    def forward(self, h: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """h (B, F, H, W) and the bases A and B of its axes -> the shape of h."""
        weight = self.spectrum[:, : len(rows), : len(columns)]  # a smaller image has fewer frequencies
        spectral = rows.T @ (weight * (rows @ h @ columns.T)) @ columns
        update: Tensor = self.conv1(F.silu(self.conv0(h) + spectral))
        return update


class GlobalCorrection(nn.Module):
    """x̂ (1 + a₀ + a₁ m) + b₀ + b₁ m + Σ_k c_k T_k with coefficients from whitened statistics of y and x̂."""

    mask: Tensor
    templates: Tensor
    centre: Tensor
    whitening: Tensor
    calibrated: Tensor

    def __init__(self, channels: int, height: int, width: int, templates: int, hidden: int) -> None:
        super().__init__()
        self.parts = (channels, channels, channels, channels, templates)
        count = 6 * channels + templates
        self.register_buffer("mask", torch.ones(channels, height, width))
        self.register_buffer("templates", torch.zeros(templates, channels, height, width))
        self.register_buffer("centre", torch.zeros(count))
        self.register_buffer("whitening", torch.zeros(count, count))
        self.register_buffer("calibrated", torch.zeros(()))
        self.first = nn.Linear(2 * count, hidden)
        self.last = nn.Linear(hidden, sum(self.parts))
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, y: Tensor, estimate: Tensor, mask: Tensor, templates: Tensor) -> Tensor:
        """(B, C, H, W) twice -> (B, C, H, W)."""
        seen = [(statistics(x, mask, templates) - self.centre) @ self.whitening for x in (y, estimate)]
        outputs = GAIN * self.last(F.silu(self.first(torch.cat(seen, dim=1))))
        *fields, steps = outputs.split(self.parts, dim=1)
        gain, masked_gain, offset, masked_offset = (each[..., None, None] for each in fields)
        moved = torch.einsum("bk,kchw->bchw", steps, templates)
        return estimate * (1 + gain + masked_gain * mask) + offset + masked_offset * mask + moved

    def regions(self, size: torch.Size) -> tuple[Tensor, Tensor]:
        """Mask (C, H, W) and templates (K, C, H, W) at a size."""
        if size == self.mask.shape[-2:]:
            return self.mask, self.templates
        mask = F.interpolate(self.mask[None], tuple(size), mode="nearest")[0]
        return mask, F.interpolate(self.templates, tuple(size), mode="bilinear") if len(self.templates) else (
            self.templates.new_zeros(0, len(mask), *size)
        )

    @torch.no_grad()
    def calibrate(self, y: Tensor, gradients: Tensor) -> None:
        """Where the rule looks, the directions of its gradients, and what whitens the statistics, in float64."""
        looks = gradients.abs().mean(0).to(self.mask)
        self.mask.copy_(looks >= LOOKS * looks.mean())
        self.templates.copy_(principal_directions(gradients, len(self.templates)))
        seen = torch.cat([statistics(part, self.mask, self.templates) for part in y.to(self.mask).split(64)]).double()
        centre, scale = seen.mean(0), seen.std(0)
        varies = scale > RANK * seen.abs().mean().clamp_min(1e-30)
        scale = torch.where(varies, scale, 1.0)
        correlation = torch.where(varies[:, None] & varies, torch.cov(((seen - centre) / scale).T), 0.0)
        values, vectors = torch.linalg.eigh(correlation)
        kept = values > RANK * values[-1].clamp_min(1e-30)
        self.centre.copy_(centre)
        self.whitening.copy_(vectors / scale[:, None] * torch.where(kept, values, torch.inf).rsqrt())
        self.calibrated.fill_(1)


def statistics(x: Tensor, mask: Tensor, templates: Tensor) -> Tensor:
    """Mean, mean square and mean modulus of each channel, whole and under the mask, and the products with templates."""
    weight = mask / mask.mean((1, 2), keepdim=True).clamp_min(1e-6)
    moments = [(w * v).mean((2, 3)) for w in (torch.ones_like(weight), weight) for v in (x, x.square(), x.abs())]
    return torch.cat([*moments, torch.einsum("bchw,kchw->bk", x, templates) / x[0].numel()], dim=1)


def principal_directions(gradients: Tensor, count: int) -> Tensor:
    """The first principal directions of normalised gradients (M, C, H, W), of root mean square one: (count, C, H, W).

    Directions of less than `SHARE` of the energy are zero.
    """
    rows = gradients.flatten(1).double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    energy, vectors = torch.linalg.eigh(rows @ rows.T)
    kept = min(count, len(rows))
    directions = vectors.flip(1)[:, :kept].T @ rows
    directions = directions / directions.square().mean(1, keepdim=True).sqrt().clamp_min(1e-300)
    share = energy.flip(0)[:kept] / energy.sum().clamp_min(1e-300)
    found = rows.new_zeros(count, rows.shape[1])
    found[:kept] = torch.where(share[:, None] >= SHARE, directions, 0.0)
    return found.reshape(count, *gradients.shape[1:])


def basis(size: int, modes: int, periodic: bool, like: Tensor) -> Tensor:
    """The lowest frequencies of an axis as orthonormal rows: (min(modes, size), size).

    1, cos, sin, cos 2, sin 2 … of a period where it is periodic; cosines of half periods elsewhere.
    """
    place = torch.arange(size, dtype=torch.float64, device=like.device)
    k = torch.arange(min(size, modes), dtype=torch.float64, device=like.device)[:, None]
    if periodic:
        angle = 2 * math.pi * torch.div(k + 1, 2, rounding_mode="floor") * place / size
        waves = torch.where(k % 2 == 0, torch.sin(angle) + (k == 0), torch.cos(angle))
    else:
        waves = torch.cos(math.pi * k * (place + 0.5) / size)
    return (waves / waves.norm(dim=1, keepdim=True)).to(like.dtype)
