"""A small U-Net: residual blocks that time scales and shifts, attention where the image is small.

    h = conv(y)
    down     at each resolution but the lowest residual blocks, h kept; then h ← conv(h), of width 2 and stride 2
    middle   residual blocks, attention, residual blocks
    up       h ← [conv(h) on pixels twice as large, the h that was kept], then residual blocks
    out      conv(SiLU(norm h))

`network(y_t, t)` takes the diffusion time t in (0, 1]. Before training it is zero. Where NCSN++ keeps one state per
block, it keeps one per resolution; it has no pyramid of the input, and it resamples by convolutions without filters.

Made for channels-last memory and bfloat16 autocast. The time's embedding and the last convolution stay in float32 or
better whatever autocast says.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.generative.networks.layers import ResidualBlock, TimeEmbedding, check_images, check_settings, initialise
from namm.generative.networks.ncsnpp.layers import PictureConv2d, PreciseConv2d, SelfAttention, group_norm


class UNet(ModelMixin, ConfigMixin):
    """U-Net of y_t and t; the result has the shape of y_t and is float32 or better.

    Args:
        channels: Image channels C.
        height: Height of images by which `attention` names resolutions. Images of other sizes can be given, too.
        filters: Channels at the full resolution.
        multipliers: Channels at each resolution in units of `filters`; their number is the number of resolutions.
        blocks: Residual blocks per resolution, on the way down and on the way up.
        attention: Heights of feature maps that attend to themselves, besides the lowest resolution, which always does.
        dropout: Probability inside the residual blocks, in training only.
        unshuffle: Pixels a side that become channels before the first layer: 2 halves every resolution.
    """

    @register_to_config
    def __init__(
        self,
        channels: int = 1,
        height: int = 64,
        filters: int = 64,
        multipliers: Sequence[int] = (1, 2, 2, 2),
        blocks: int = 2,
        attention: Sequence[int] = (16,),
        dropout: float = 0.1,
        unshuffle: int = 1,
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "height": height, "filters": filters, "blocks": blocks, "unshuffle": unshuffle}
        check_settings(
            "UNet",
            [
                *((name, value, value >= 1, "be at least 1") for name, value in sizes.items()),
                ("multipliers", tuple(multipliers), min(multipliers, default=0) >= 1, "be positive, one or more"),
                ("dropout", dropout, 0 <= dropout < 1, "lie in [0, 1)"),
            ],
        )
        self.channels, self.unshuffle = channels, unshuffle
        self.factor = unshuffle * 2 ** (len(multipliers) - 1)
        pixels, time = channels * unshuffle**2, 4 * filters
        widths = [filters * multiplier for multiplier in multipliers]
        attends = [height / (unshuffle * 2**level) in attention for level in range(len(widths))]

        def level(inputs: int, width: int, attend: bool) -> Level:
            return Level([inputs, *[width] * blocks], time, dropout, attend)

        self.time = TimeEmbedding(time)
        self.head = PictureConv2d(pixels, filters, 3, padding=1)
        steps = list(zip(widths[:-1], widths[1:], attends, strict=False))
        self.down = nn.ModuleList(level(width, width, attend) for width, _, attend in steps)
        self.shrink = nn.ModuleList(nn.Conv2d(width, wide, 2, stride=2) for width, wide, _ in steps)
        self.middle = nn.ModuleList(level(widths[-1], widths[-1], attend) for attend in (True, False))
        self.grow = nn.ModuleList(nn.Conv2d(wide, width, 1) for width, wide, _ in reversed(steps))
        self.up = nn.ModuleList(level(2 * width, width, attend) for width, _, attend in reversed(steps))
        self.norm = group_norm(filters * multipliers[0])
        self.tail = PreciseConv2d(widths[0], pixels, 3, padding=1)
        initialise(self, self.tail)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """y_t (B, C, H, W) and t (B,) or () in (0, 1] -> (B, C, H, W)."""
        self.check_size(y.shape)
        time = self.time(t, y)
        h = self.head(F.pixel_unshuffle(y.to(self.head.weight.dtype), self.unshuffle))
        kept = []
        for level, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(level(h, time))
            h = shrink(kept[-1])
        for level in self.middle:
            h = level(h, time)
        for grow, level in zip(self.grow, self.up, strict=True):
            h = level(torch.cat([F.interpolate(grow(h), scale_factor=2.0), kept.pop()], dim=1), time)
        return F.pixel_shuffle(self.tail(F.silu(self.norm(h))), self.unshuffle)

    def check_size(self, shape: Sequence[int]) -> None:
        """Refuse a shape that this network cannot map to itself."""
        check_images("UNet", shape, self.channels, self.factor, "choose fewer multipliers")


class Level(nn.Module):
    """Residual blocks between numbers of channels, then attention or none, at one resolution."""

    def __init__(self, widths: Sequence[int], time: int, dropout: float, attend: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(*each, time, dropout) for each in pairwise(widths))
        self.attention = SelfAttention(widths[-1]) if attend else nn.Identity()

    def forward(self, h: Tensor, time: Tensor) -> Tensor:
        """h (B, widths[0], H, W) and τ -> (B, widths[-1], H, W)."""
        for block in self.blocks:
            h = block(h, time)
        return self.attention(h)
