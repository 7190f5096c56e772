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

On the way down every state is kept, the first of them being the head's; on the way up the block that is fed with a
state takes the one that was kept last. A step to half the resolution keeps the pyramid's state instead of h. What
the time adds in every residual block is handed on in the order in which they run.

Made for channels-last memory and bfloat16 autocast. The time's embedding and the last convolution stay in float32 or
better whatever autocast says.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.generative.networks.layers import scaled_time
from namm.generative.networks.ncsnpp.layers import (
    SQRT_HALF,
    PictureConv2d,
    PreciseConv2d,
    PyramidStep,
    ResidualBlock,
    SelfAttention,
    concatenated,
    double,
    embed_time,
    group_norm,
    halve,
    time_biases,
)
from namm.numerics import full_precision

Block = Callable[..., ResidualBlock]


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
        _check(channels, height, filters, multipliers, blocks, dropout, unshuffle)
        self.channels, self.height, self.unshuffle = channels, height, unshuffle
        self.any_height = not attention
        self.factor = unshuffle * 2 ** (len(multipliers) - 1)
        self.filters, self.rescale_input, self.reference_frequencies = filters, rescale_input, reference_frequencies
        time = 4 * filters
        pixels = channels * unshuffle**2
        widths = [filters * multiplier for multiplier in multipliers]
        attends = [height // unshuffle / 2**level in attention for level in range(len(widths))]
        self.time = nn.Sequential(nn.Linear(filters, time), nn.SiLU(), nn.Linear(time, time))
        self.head = PictureConv2d(pixels, filters, 3, padding=1)
        block = partial(ResidualBlock, time=time, dropout=dropout)
        kept, pyramid = [filters], pixels  # channels of every state that the way up will see, and of the pyramid
        self.down = nn.ModuleList()
        for level, width in enumerate(widths):
            last = level == len(widths) - 1
            joining = None if last else pyramid
            self.down.append(DownLevel(block, kept[-1], width, blocks, attends[level], joining))
            kept += [width] * (blocks if last else blocks + 1)
            pyramid = width
        self.middle = Middle(block, widths[-1])
        self.up, inputs = nn.ModuleList(), widths[-1]
        for level in reversed(range(len(widths))):
            skips = [kept.pop() for _ in range(blocks + 1)]
            self.up.append(UpLevel(block, inputs, skips, widths[level], attends[level], grow=level > 0))
            inputs = widths[level]
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
        with full_precision(x):
            embedded = embed_time(scaled_time(t, x), self.filters, reference=self.reference_frequencies)
            return self.time(embedded.to(self.head.weight.dtype))


def _check(
    channels: int, height: int, filters: int, multipliers: Sequence[int], blocks: int, dropout: float, unshuffle: int
) -> None:
    conditions = [
        ("channels", channels, channels >= 1, "be at least 1"),
        ("height", height, height >= 1, "be at least 1"),
        ("blocks", blocks, blocks >= 1, "be at least 1"),
        ("unshuffle", unshuffle, unshuffle >= 1, "be at least 1"),
        ("filters", filters, filters >= 4 and filters % 2 == 0, "be even and at least 4"),
        ("multipliers", tuple(multipliers), min(multipliers, default=0) >= 1, "be one positive number per resolution"),
        ("dropout", dropout, 0 <= dropout < 1, "lie in [0, 1)"),
    ]
    for name, value, holds, rule in conditions:
        if not holds:
            raise UsageError(f"NCSNpp: {name} must {rule}, not {value}.")
    factor = unshuffle * 2 ** (len(multipliers) - 1)
    if height % factor:
        raise UsageError(
            f"NCSNpp: height must be divisible by {factor} (unshuffle and the resolutions together), and {height} is "
            "not; choose fewer multipliers."
        )


# The two sides of the U-Net


class DownLevel(nn.Module):
    """Residual blocks at one resolution, then the step to the next, where the pyramid joins.

    Args:
        block: Makes a residual block from its channels.
        inputs: Channels of h.
        width: Channels at this resolution.
        blocks: Residual blocks.
        attend: Attention after each of them.
        pyramid: Channels of the pyramid's image at this resolution; None at the last one.
    """

    def __init__(self, block: Block, inputs: int, width: int, blocks: int, attend: bool, pyramid: int | None) -> None:
        super().__init__()
        sizes = [inputs, *[width] * (blocks - 1)]
        self.blocks = nn.ModuleList(block(size, width) for size in sizes)
        self.attentions = nn.ModuleList(SelfAttention(width) if attend else nn.Identity() for _ in sizes)
        self.shrink = None if pyramid is None else block(width, width, resample=halve)
        self.pyramid = None if pyramid is None else PyramidStep(pyramid, width)

    def forward(self, h: Tensor, pyramid: Tensor, added: Iterator[Tensor]) -> tuple[list[Tensor], Tensor]:
        """All that the way up shall see, the last of it being the new h, and the new pyramid."""
        states = []
        for block, attention in zip(self.blocks, self.attentions, strict=True):
            h = attention(block(h, next(added)))
            states.append(h)
        if self.shrink is not None and self.pyramid is not None:
            pyramid = (self.pyramid(pyramid) + self.shrink(h, next(added))) * SQRT_HALF
            states.append(pyramid)
        return states, pyramid


class Middle(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    def __init__(self, block: Block, width: int) -> None:
        super().__init__()
        self.before, self.attention, self.after = block(width, width), SelfAttention(width), block(width, width)

    def forward(self, h: Tensor, added: Iterator[Tensor]) -> Tensor:
        """(B, width, H, W) -> the same shape."""
        return self.after(self.attention(self.before(h, next(added))), next(added))


class UpLevel(nn.Module):
    """Residual blocks at one resolution, each fed with h and one state of the way down, then the step up."""

    def __init__(
        self, block: Block, inputs: int, skips: Sequence[int], width: int, attend: bool, *, grow: bool
    ) -> None:
        super().__init__()
        sizes = [inputs, *[width] * (len(skips) - 1)]
        self.blocks = nn.ModuleList(block(size + skip, width) for size, skip in zip(sizes, skips, strict=True))
        self.attention = SelfAttention(width) if attend else nn.Identity()
        self.grow = block(width, width, resample=double) if grow else None

    def forward(self, h: Tensor, kept: list[Tensor], added: Iterator[Tensor]) -> Tensor:
        """Takes as many states off the end of `kept` as it has blocks."""
        for block in self.blocks:
            h = block(concatenated(h, kept.pop()), next(added))
        h = self.attention(h)
        return h if self.grow is None else self.grow(h, next(added))
