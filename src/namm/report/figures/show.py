"""`namm.show`: images, how far each is from a rule, and where it breaks it."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from namm.constraints import Constraint
from namm.constraints.base import as_rule
from namm.datasets.batches import Images, check_images, to_tensor
from namm.errors import DataError, UsageError
from namm.formatting import format_number
from namm.report.figures import base
from namm.report.figures.base import Array, Block, View, distance_captions
from namm.report.figures.views import view_of

LARGEST = 200
"""Images of one set that are drawn."""
WIDEST, LARGE, CAPTION = 8.0, 1.6, 0.2  # inches: a row of pictures at most, a picture at most, what stands above it
LETTERS = 12
"""Letters of a set's name in an inch."""
OVERSHOOT = 0.25
"""How far beyond [0, 1] colours may lie that are still shown as they are, clipped."""
COLOURS = 3  # channels


def show(
    images: Images | Mapping[str, Images],
    rule: Constraint | Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    columns: int = 8,
    view: View | Callable[[Array], Array] | None = None,
) -> Figure:
    """Draw images, ℓ above each and, below them, the residual of a rule that has one: a matplotlib figure.

    A notebook displays it by itself; `figure.savefig("images.png")` saves it. Several sets of images share each scale
    of colours. One channel is shown by its values, three as red, green and blue on one scale, any other number
    channel by channel; flows that are to have no divergence by their vorticity.

    Args:
        images: Images (N, C, H, W), a tensor anywhere or an array, or several such sets by name; 200 a set at most.
        rule: ℓ, a constraint or a function.
        columns: Images in a row.
        view: What to show instead: a function from an array (N, C, H, W) to pictures (N, H, W), or a
            `namm.report.figures.View`, which names them, too.

    Raises:
        DataError: NaN or inf in an image, no images, too many, or sets whose images differ in shape.
    """
    if isinstance(columns, bool) or not isinstance(columns, int) or columns < 1:
        raise UsageError(f"columns must be a whole number of at least 1, not {columns!r}.")
    law = None if rule is None else as_rule(rule)
    sets = _checked(images if isinstance(images, Mapping) else {"": images})
    columns = min(columns, max(len(x) for x in sets.values()))
    parts = {
        (name, start): x[start : start + columns] for name, x in sets.items() for start in range(0, len(x), columns)
    }
    names = [name if start == 0 else "" for name, start in parts]
    rows = list(parts.values())
    blocks = _blocks(names, [x.cpu().numpy() for x in rows], view or view_of(law))
    if law is not None:
        blocks[0] = replace(blocks[0], captions=_captions(rows, law))
        residuals = _residuals(rows, law)
        blocks += [] if residuals is None else [Block(names, residuals, "residual", signed=True)]
    with base.look():
        return _draw(blocks, columns)


def _checked(sets: Mapping[str, Images]) -> dict[str, torch.Tensor]:
    """The sets as tensors, refused where they cannot be drawn together."""
    if not sets:
        raise DataError("there is nothing to show: no set of images was given.")
    checked: dict[str, torch.Tensor] = {}
    for name, images in sets.items():
        what = f"the images {name!r}" if name else "the images"
        check_images(images, what)
        if images.shape[0] > LARGEST:
            raise DataError(f"{what} are {images.shape[0]}, and at most {LARGEST} are drawn: show a part, images[:16].")
        x = to_tensor(images[:])
        base.require_finite(x.cpu().numpy(), what)
        first = next(iter(checked.values()), x)
        if x.shape[1:] != first.shape[1:]:
            raise DataError(
                f"{what} are {tuple(x.shape[1:])} and others {tuple(first.shape[1:])}: one figure shows images of one "
                "shape."
            )
        checked[name] = x.float() if x.dtype == torch.bool else x
    return checked


# What is drawn


def _blocks(names: Sequence[str], rows: Sequence[Array], view: View | Callable[[Array], Array] | None) -> list[Block]:
    """The pictures of rows of images (K, C, H, W): one block, or one for each channel."""
    channels = rows[0].shape[1]
    if view is not None:
        view = view if isinstance(view, View) else View(view, "")
        return [Block(names, [_viewed(row, view) for row in rows], view.label, signed=view.signed)]
    if channels == COLOURS:
        return [_coloured(names, rows)]
    if channels == 1:
        return [Block(names, [row[:, 0] for row in rows], base.RAW.label)]
    return [Block(names, [row[:, c] for row in rows], f"channel {c}") for c in range(channels)]


def _viewed(row: Array, view: View) -> Array:
    pictures = np.asarray(view.show(row))
    if pictures.shape[:1] != row.shape[:1] or pictures.ndim != 3:
        raise DataError(f"a view must make pictures (N, H, W); of images {row.shape} it made {pictures.shape}.")
    return base.require_finite(pictures, "what the view makes of the images")


def _coloured(names: Sequence[str], rows: Sequence[Array]) -> Block:
    """Three channels as red, green and blue, opaque: as they are where they lie in [0, 1], else on one scale."""
    values = np.concatenate(rows)
    low, high = (0.0, 1.0)
    if values.min() < -OVERSHOOT or values.max() > 1 + OVERSHOOT:
        low, high = base.limits(values, signed=False)
    scaled = [((row - low) / (high - low)).clip(0, 1).transpose(0, 2, 3, 1) for row in rows]
    opaque = [np.concatenate([each, np.ones_like(each[..., :1])], axis=-1) for each in scaled]
    return Block(names, opaque, f"red, green, blue: {format_number(low, '.2g')} to {format_number(high, '.2g')}")


@torch.no_grad()
def _captions(rows: Sequence[torch.Tensor], rule: Constraint) -> list[list[str]]:
    """ℓ of every image."""
    return [distance_captions(rule(row).tolist()) for row in rows]


@torch.no_grad()
def _residuals(rows: Sequence[torch.Tensor], rule: Constraint) -> list[Array] | None:
    """Where images break the rule, (K, H′, W′) by row, for a rule that has pictures of it."""
    if not rule.has_residual:
        return None
    pictures = [
        base.residual_pictures(rule.follow(row).residual(row).cpu().numpy(), row.cpu().numpy(), "the residuals")
        for row in rows
    ]
    return None if any(each is None for each in pictures) else pictures  # type: ignore[return-value]


# Drawing


def _draw(blocks: Sequence[Block], columns: int) -> Figure:
    """All blocks below each other, a row of pictures on each axes."""
    cell = min(LARGE, WIDEST / columns)
    heights = [
        cell * row.shape[1] / row.shape[2] + (CAPTION if block.captions else CAPTION / 2)
        for block in blocks
        for row in block.rows
    ]
    lines = zip(blocks[0].names, heights, strict=False)
    names = [textwrap.fill(name, max(4, int(LETTERS * height))) for name, height in lines]
    figure = base.new_figure(sum(heights) + CAPTION, max(cell * columns, 2.0) + base.BAR)
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for number, block in enumerate(blocks):
        own: list[Axes] = list(axes[number * len(names) : (number + 1) * len(names), 0])
        if block.rows[0].ndim == 4:
            _draw_colours(own, names, block, columns)
        else:
            how: dict[str, Any] = {"label": block.label, "signed": block.signed, "captions": block.captions}
            base.picture_rows(figure, own, names, block.rows, columns=columns, **how)
    return figure


def _draw_colours(axes: Sequence[Axes], names: Sequence[str], block: Block, columns: int) -> None:
    """Rows of pictures (K, H, W, 4), what their colours mean below the last."""
    for axis, name, row, texts in zip(axes, names, block.rows, block.captions or [()] * len(names), strict=True):
        base.bare(axis)
        axis.imshow(base.mosaic(row, columns).filled(0.0), interpolation="nearest")
        axis.set_ylabel(name)
        base.write_above(axis, texts, row.shape[2])
    axes[-1].set_xlabel(block.label)
