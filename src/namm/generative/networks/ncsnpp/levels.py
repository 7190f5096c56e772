"""The two sides of a U-Net: what one resolution of NCSN++ holds on the way down, in the middle and on the way up.

On the way down every state is kept, the first of them being the head's; on the way up the block that is fed with a
state takes the one that was kept last. A step to half the resolution keeps the pyramid's state instead of h. What
the time adds in every residual block is handed on in the order in which they run.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from namm.generative.networks.ncsnpp.layers import (
    SQRT_HALF,
    Double,
    Halve,
    PyramidStep,
    ResidualBlock,
    SelfAttention,
    beside,
)


class DownLevel(nn.Module):
    """Residual blocks at one resolution, then the step to the next, where the pyramid joins.

    Args:
        inputs: Channels of h.
        width: Channels at this resolution.
        blocks: Residual blocks.
        attend: Attention after each of them.
        time: Length of τ.
        dropout: Probability in the residual blocks.
        pyramid: Channels of the pyramid's image at this resolution; None at the last one.
    """

    def __init__(
        self, inputs: int, width: int, blocks: int, attend: bool, time: int, dropout: float, pyramid: int | None
    ) -> None:
        super().__init__()
        sizes = [inputs, *[width] * (blocks - 1)]
        self.blocks = nn.ModuleList(ResidualBlock(size, width, time, dropout) for size in sizes)
        self.attentions = nn.ModuleList(SelfAttention(width) if attend else nn.Identity() for _ in sizes)
        self.shrink = None if pyramid is None else ResidualBlock(width, width, time, dropout, Halve)
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

    def __init__(self, width: int, time: int, dropout: float) -> None:
        super().__init__()
        self.before = ResidualBlock(width, width, time, dropout)
        self.attention = SelfAttention(width)
        self.after = ResidualBlock(width, width, time, dropout)

    def forward(self, h: Tensor, added: Iterator[Tensor]) -> Tensor:
        """(B, width, H, W) -> the same shape."""
        return self.after(self.attention(self.before(h, next(added))), next(added))


class UpLevel(nn.Module):
    """Residual blocks at one resolution, each fed with h and one state of the way down, then the step up."""

    def __init__(
        self, inputs: int, skips: Sequence[int], width: int, attend: bool, time: int, dropout: float, *, grow: bool
    ) -> None:
        super().__init__()
        sizes = [inputs, *[width] * (len(skips) - 1)]
        self.blocks = nn.ModuleList(
            ResidualBlock(size + skip, width, time, dropout) for size, skip in zip(sizes, skips, strict=True)
        )
        self.attention = SelfAttention(width) if attend else nn.Identity()
        self.grow = ResidualBlock(width, width, time, dropout, Double) if grow else None

    def forward(self, h: Tensor, kept: list[Tensor], added: Iterator[Tensor]) -> Tensor:
        """Takes as many states off the end of `kept` as it has blocks."""
        for block in self.blocks:
            h = block(beside(h, kept.pop()), next(added))
        h = self.attention(h)
        return h if self.grow is None else self.grow(h, next(added))


def down_path(
    pixels: int,
    filters: int,
    widths: Sequence[int],
    blocks: int,
    attends: Sequence[bool],
    time: int,
    dropout: float,
) -> tuple[nn.ModuleList, list[int]]:
    """The levels of the way down, highest resolution first, and the channels of every state they keep.

    Args:
        pixels: Channels of the image that starts the pyramid.
        filters: Channels of the head's state.
        widths: Channels at each resolution.
        blocks: Residual blocks at each resolution.
        attends: Whether each resolution has attention.
        time: Length of τ.
        dropout: Probability in the residual blocks.
    """
    levels, kept, pyramid = nn.ModuleList(), [filters], pixels
    for level, width in enumerate(widths):
        last = level == len(widths) - 1
        inputs = kept[-1]
        levels.append(DownLevel(inputs, width, blocks, attends[level], time, dropout, None if last else pyramid))
        kept += [width] * (blocks if last else blocks + 1)
        pyramid = width
    return levels, kept


def up_path(
    kept: Sequence[int], widths: Sequence[int], blocks: int, attends: Sequence[bool], time: int, dropout: float
) -> nn.ModuleList:
    """The levels of the way up, lowest resolution first; `kept` are the channels that `down_path` reports."""
    levels, left, inputs = nn.ModuleList(), list(kept), widths[-1]
    for level in reversed(range(len(widths))):
        skips = [left.pop() for _ in range(blocks + 1)]
        levels.append(UpLevel(inputs, skips, widths[level], attends[level], time, dropout, grow=level > 0))
        inputs = widths[level]
    return levels
