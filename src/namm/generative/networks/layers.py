"""What score networks have in common: the time's embedding and residual blocks that it scales and shifts.

    time         τ = σ(W₂ σ(W₁ [sin(ω s), cos(ω s)])),   s = 999 t                                  σ = SiLU
    residual     (S x + conv₁ drop σ((1 + a) norm₁(conv₀ σ norm₀ x) + b)) / √2,   (a, b) = W τ

S is the identity, or a convolution of width 1 where the number of channels changes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.generative.networks.ncsnpp.layers import SQRT_HALF, SelfAttention, embed_time, group_norm
from namm.numerics import full_precision

TIME_SCALE = 999


def scaled_time(t: Tensor, x: Tensor) -> Tensor:
    """999 t for each image of x: t (B,) or () and x (B, C, H, W) -> (B,), in float32 or better."""
    if t.ndim > 1 or t.numel() not in (1, len(x)):
        raise DataError(f"t must have one entry per image, {len(x)}, or one for all; its shape is {tuple(t.shape)}.")
    precision = torch.promote_types(torch.promote_types(x.dtype, t.dtype), torch.float32)
    return TIME_SCALE * t.to(precision).expand(len(x))


class TimeEmbedding(nn.Module):
    """τ of length `width`, even and at least 4, in the weights' precision whatever autocast says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        """t (B,) or () in (0, 1] and the images x (B, C, H, W) -> (B, width)."""
        with full_precision(x):
            waves = embed_time(scaled_time(t, x), self.first.in_features)
            return F.silu(self.last(F.silu(self.first(waves.to(self.first.weight.dtype)))))


class ResidualBlock(nn.Module):
    """Two convolutions, the second fed with what time scales and shifts.

    Args:
        inputs: Channels of x.
        outputs: Channels of the result.
        time: Length of τ.
        dropout: Probability, before the second convolution.
    """

    def __init__(self, inputs: int, outputs: int, time: int, dropout: float) -> None:
        super().__init__()
        self.norm0 = group_norm(inputs)
        self.conv0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.modulation = nn.Linear(time, 2 * outputs)
        self.norm1 = group_norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x (B, inputs, H, W) and τ (B, time) -> (B, outputs, H, W)."""
        scale, shift = self.modulation(time)[:, :, None, None].chunk(2, dim=1)
        h = self.norm1(self.conv0(F.silu(self.norm0(x))))
        h = self.conv1(self.dropout(F.silu((1 + scale) * h + shift)))
        return (self.shortcut(x) + h) * SQRT_HALF


@torch.no_grad()
def initialise(network: nn.Module, *ends: nn.Conv2d | nn.Linear) -> None:
    """Glorot's uniform weights and no biases; zero weights in `ends` and wherever a branch ends."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    blocks = (module.conv1 for module in network.modules() if isinstance(module, ResidualBlock))
    attentions = (module.out for module in network.modules() if isinstance(module, SelfAttention))
    for end in (*blocks, *attentions, *ends):
        nn.init.zeros_(end.weight)


def check_images(name: str, shape: Sequence[int], channels: int, factor: int, remedy: str) -> None:
    """Refuse images that a network called `name` cannot map to themselves: sizes must be divisible by `factor`."""
    if len(shape) != 4 or shape[1] != channels:
        raise DataError(f"this {name} takes images (B, {channels}, H, W); it was given {tuple(shape)}.")
    if shape[2] % factor or shape[3] % factor:
        raise UsageError(
            f"this {name} needs a height and a width divisible by {factor}; these images are {shape[2]}×{shape[3]}. "
            f"Crop or pad them, or {remedy}."
        )


def check_settings(name: str, conditions: Sequence[tuple[str, object, bool, str]]) -> None:
    """Refuse the first setting (name, value, whether it holds, rule) that does not hold."""
    for setting, value, holds, rule in conditions:
        if not holds:
            raise UsageError(f"{name}: {setting} must {rule}, not {value}.")
