"""NCSN++, the score network of the paper (Sec. 3.2 and App. D.2): a U-Net with a pyramid of the input.

    h = conv(x),  p = x,  s = 999 t,  τ = W₂ SiLU(W₁ [sin(ω s), cos(ω s)])
    down     at each resolution residual blocks [with attention], every h kept; then halve h, h ← p ← (conv(φ p) + h)/√2
    middle   residual block, attention, residual block
    up       at each resolution residual blocks on (h, an h that was kept) [and attention]; then double h
    out      conv(SiLU(norm h))

`network(y_t, t)` takes the diffusion time t in (0, 1]. The factor 999 is applied inside, so that any module with these
two arguments can stand in its place. What comes out is what the diffusion trains it for: in the paper the noise ε, so
that the score is −network(y_t, t)/std(t). Before training it is zero. The published network replaces x by 2x − 1 first,
even in mirror space; ours does so only when asked.

Made for channels-last memory and bfloat16 autocast. The time's embedding and the last convolution stay in float32 or
better whatever autocast says.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.generative.networks.ncsnpp.layers import (
    PictureConv2d,
    PreciseConv2d,
    ResidualBlock,
    SelfAttention,
    embed_time,
    group_norm,
    time_biases,
)
from namm.generative.networks.ncsnpp.levels import Middle, down_path, up_path
from namm.numerics import full_precision

TIME_SCALE = 999


class NCSNpp(ModelMixin, ConfigMixin):
    """U-Net of y_t and t; the result has the shape of y_t and is float32 or better.

    Args:
        channels: Image channels C.
        height: Height of the images; decides which resolutions `attention` names. The width is free.
        filters: Channels at the full resolution; even, at least 4.
        multipliers: Channels at each resolution in units of `filters`; their number is the number of resolutions.
        blocks: Residual blocks per resolution.
        attention: Heights of feature maps that attend to themselves, besides the middle, which always does.
        dropout: Probability inside the residual blocks, in training only.
        unshuffle: Pixels a side that become channels before the first layer: 2 halves every resolution.
        rescale_input: Replace y_t by 2 y_t − 1 first, as the published network does. Off for standardised images.
        reference_frequencies: Round ω to float32 in float64 too, as the published network does; changes float64 only.
    """

    has_kernels = True
    """It has kernels for what surrounds its convolutions; `namm.gpu` records them."""

    @register_to_config
    def __init__(
        self,
        channels: int = 1,
        height: int = 64,
        filters: int = 64,
        multipliers: Sequence[int] = (1, 2, 2, 2),
        blocks: int = 4,
        attention: Sequence[int] = (16,),
        dropout: float = 0.1,
        unshuffle: int = 1,
        rescale_input: bool = False,
        reference_frequencies: bool = False,
    ) -> None:
        super().__init__()
        _validate(channels, height, filters, multipliers, blocks, dropout, unshuffle)
        self.channels, self.height, self.unshuffle = channels, height, unshuffle
        self.any_height = not attention
        self.factor = unshuffle * 2 ** (len(multipliers) - 1)
        self.filters, self.rescale_input, self.reference_frequencies = filters, rescale_input, reference_frequencies
        self._check_height()

        time = 4 * filters
        pixels = channels * unshuffle**2
        widths = [filters * multiplier for multiplier in multipliers]
        attends = [height // unshuffle / 2**level in attention for level in range(len(widths))]
        self.time = nn.Sequential(nn.Linear(filters, time), nn.SiLU(), nn.Linear(time, time))
        self.head = PictureConv2d(pixels, filters, 3, padding=1)
        self.down, kept = down_path(pixels, filters, widths, blocks, attends, time, dropout)
        self.middle = Middle(widths[-1], time, dropout)
        self.up = up_path(kept, widths, blocks, attends, time, dropout)
        self.norm = group_norm(widths[0])
        self.tail = PreciseConv2d(widths[0], pixels, 3, padding=1)
        self._blocks = tuple(m for m in self.modules() if isinstance(m, ResidualBlock))  # in the order they run in
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Glorot's uniform weights and no bias; zero weights wherever a branch or the network ends."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            match module:
                case SelfAttention():
                    for part in module.qkv.weight.chunk(3):
                        nn.init.xavier_uniform_(part)
                    nn.init.zeros_(module.out.weight)
                case ResidualBlock():
                    nn.init.zeros_(module.conv1.weight)
        nn.init.zeros_(self.tail.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """y_t: (B, C, H, W) and t: (B,) or () in (0, 1] -> (B, C, H, W)."""
        self.check_size(x.shape)
        added = iter(time_biases(self._blocks, F.silu(self._embed(x, t))))
        if self.rescale_input:
            x = 2 * x - 1
        pyramid = F.pixel_unshuffle(x.to(self.head.weight.dtype), self.unshuffle)
        h = self.head(pyramid)
        kept = [h]
        for level in self.down:
            states, pyramid = level(kept[-1], pyramid, added)
            kept += states
        h = self.middle(kept[-1], added)
        for level in self.up:
            h = level(h, kept, added)
        return F.pixel_shuffle(self.tail(F.silu(self.norm(h))), self.unshuffle)

    def check_size(self, shape: Sequence[int]) -> None:
        """Refuse a shape that this network cannot map to itself."""
        if len(shape) != 4 or shape[1] != self.channels:
            raise DataError(f"this NCSNpp takes images (B, {self.channels}, H, W); it was given {tuple(shape)}.")
        if shape[2] % self.factor or shape[3] % self.factor:
            raise DataError(
                f"this NCSNpp makes images {self.factor} times smaller, so height and width must be divisible by "
                f"{self.factor}; these images are {shape[2]}×{shape[3]}. Crop or pad them, or choose fewer multipliers."
            )
        if shape[2] != self.height and not self.any_height:
            raise DataError(
                f"this NCSNpp is made for images {self.height} high, which decides where it has attention; these are "
                f"{shape[2]}×{shape[3]}. Make it with height={shape[2]}, or without attention for any height."
            )

    def _embed(self, x: Tensor, t: Tensor) -> Tensor:
        """τ: (B, 4 filters), in float32 or better up to the weights' precision."""
        if t.ndim > 1 or t.numel() not in (1, len(x)):
            raise DataError(
                f"t must have one entry per image, {len(x)}, or one for all; its shape is {tuple(t.shape)}."
            )
        with full_precision(x):
            precision = torch.promote_types(torch.promote_types(x.dtype, t.dtype), torch.float32)
            scaled = TIME_SCALE * t.to(precision).expand(len(x))
            embedded = embed_time(scaled, self.filters, reference=self.reference_frequencies)
            return self.time(embedded.to(self.head.weight.dtype))

    def _check_height(self) -> None:
        if self.height % self.factor:
            raise UsageError(
                f"NCSNpp: height must be divisible by {self.factor} (unshuffle and the resolutions together), "
                f"and {self.height} is not; choose fewer multipliers."
            )


def _validate(
    channels: int, height: int, filters: int, multipliers: Sequence[int], blocks: int, dropout: float, unshuffle: int
) -> None:
    counts = {"channels": channels, "height": height, "blocks": blocks, "unshuffle": unshuffle}
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"NCSNpp: {name} must be at least 1, not {value}.")
    if filters < 4 or filters % 2:
        raise UsageError(f"NCSNpp: filters must be even and at least 4, not {filters}.")
    if not multipliers or min(multipliers) < 1:
        raise UsageError(f"NCSNpp: multipliers must be one positive number per resolution, not {tuple(multipliers)}.")
    if not 0 <= dropout < 1:
        raise UsageError(f"NCSNpp: dropout must lie in [0, 1), not {dropout}.")
