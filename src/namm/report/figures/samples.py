"""Figures of samples: what two methods make, how far it is from the rule, and what the data look like beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from namm.errors import DataError
from namm.report.figures import base
from namm.report.figures.base import (
    BAR,
    BASELINE_COLOUR,
    DEVIATIONS,
    OURS_COLOUR,
    RAW,
    VALUES,
    WIDTH,
    Array,
    Block,
    View,
    distance_captions,
)

PANEL = 3.2  # inches that a picture of the worst image takes


@dataclass(frozen=True)
class Method:
    """Samples of one method."""

    name: str
    images: Array  # those to be shown, (K, C, H, W)
    shown_distances: Array  # their ℓ, (K,)
    distances: Array  # ℓ of all samples, (N,)
    residuals: Array | None = None  # of those to be shown, (K, C′, H′, W′) or (K, C′, 1, 1), if there are such pictures


def image_block(methods: Sequence[Method], view: View) -> Block:
    """What is seen of the methods' images, each with its ℓ."""
    captions = [distance_captions(method.shown_distances) for method in methods]
    rows = [_pictures(method, view) for method in methods]
    return Block(_names(methods), rows, view.label, view.symbol, view.signed, captions)


def residual_block(methods: Sequence[Method], view: View, label: str = "residual") -> Block | None:
    """The residuals of all methods, if the rule has pictures of them."""
    found = [base.residual_pictures(m.residuals, m.images, f"residuals of {m.name}") for m in methods]
    rows = [each for each in found if each is not None]
    if len(rows) < len(methods):
        return None
    return Block(_names(methods), rows, label, "residual", signed=True, offset=view.coordinates.residual)


# Fig. 3: samples beside residuals and distances. Fig. 8: the same of two autoencoders.
def samples_figure(
    methods: Sequence[Method],
    *,
    view: View = RAW,
    floor: float | None = None,
    residual_label: str = "residual",
    with_distances: bool = True,
) -> Figure:
    """Samples of each method in a row, their residuals below on one symmetric scale, histograms of ℓ at the foot."""
    found = (image_block(methods, view), residual_block(methods, view, residual_label))
    blocks = [block for block in found if block is not None]
    foot = [2.4] if with_distances else []
    heights = _row_heights(blocks)
    figure = base.new_figure(sum(heights) + sum(foot))
    parts: Any = figure.subfigures(1 + len(foot), 1, squeeze=False, height_ratios=[sum(heights), *foot])[:, 0]
    _draw(parts[0], blocks, view)
    if with_distances:
        _distances(parts[-1].subplots(), methods, floor)
    return figure


def distances_figure(methods: Sequence[Method], floor: float | None = None) -> Figure:
    """Histograms of ℓ of all samples of each method."""
    figure = base.new_figure(2.6)
    _distances(figure.subplots(), methods, floor)
    return figure


def _distances(axes: Axes, methods: Sequence[Method], floor: float | None) -> None:
    colours = dict(zip(_names(methods), (OURS_COLOUR, BASELINE_COLOUR), strict=False))
    base.histograms(axes, {m.name: m.distances for m in methods}, colours, floor)


def _row_heights(blocks: Sequence[Block]) -> list[float]:
    """Inches of every row of pictures."""
    return [base.row_height(row.shape, len(row)) + 0.2 for block in blocks for row in block.rows]


def _draw(part: Any, blocks: Sequence[Block], view: View) -> None:
    """Every row of every block in one column of axes, so that a residual stands below its picture."""
    heights = _row_heights(blocks)
    axes = list(part.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0])
    for block in blocks:
        own, axes = axes[: len(block.rows)], axes[len(block.rows) :]
        how: dict[str, Any] = {"label": block.label, "signed": block.signed, "captions": block.captions}
        base.picture_rows(part, own, block.names, block.rows, **how)
        if block is blocks[0]:
            own[-1].set_xlabel(view.coordinates.in_words(*block.rows[0].shape[1:]), fontsize=7, labelpad=2)


def _names(methods: Sequence[Method]) -> list[str]:
    return [method.name for method in methods]


def _pictures(method: Method, view: View) -> Array:
    """What is seen of the method's images: (K, H, W)."""
    pictures = view.show(base.require_finite(method.images, f"samples of {method.name}"))
    if pictures.ndim != 3:
        raise DataError(f"a view must make pictures (N, H, W); that of {method.name} made {pictures.shape}.")
    return pictures


# Not in the paper: both spaces
@dataclass(frozen=True)
class MirrorSpace:
    """Images of both spaces: real ones and g of them, samples of mirror space and f of them."""

    data: Method  # x
    mirror: Method  # g(x)
    sampled: Method  # ŷ
    made: Method  # f(ŷ)

    @property
    def methods(self) -> tuple[Method, ...]:
        """All four, those of data space first."""
        return self.data, self.made, self.mirror, self.sampled


def mirror_blocks(space: MirrorSpace, view: View) -> list[Block]:
    """Data space and mirror space, each on a scale of its own, and the residuals of all where they have some."""
    blocks: list[Block | None] = [image_block([space.data, space.made], view)]
    mirror = image_block([space.mirror, space.sampled], view)
    blocks.append(replace(mirror, label=f"{mirror.label}, of mirror images", symbol="y"))
    blocks.append(residual_block(space.methods, view))
    return [block for block in blocks if block is not None]


def mirror_figure(space: MirrorSpace, *, view: View = RAW) -> Figure:
    """x above f(ŷ), g(x) above ŷ, and where each of them breaks the rule."""
    blocks = mirror_blocks(space, view)
    figure = base.new_figure(sum(_row_heights(blocks)))
    _draw(figure, blocks, view)
    return figure


# Fig. 9: samples of every distribution
def grids_block(sets: Mapping[str, Array], view: View, count: int) -> Block:
    """The first `count` images of every set."""
    rows = [view.show(base.require_finite(images[:count], name)) for name, images in sets.items()]
    return Block(list(sets), rows, view.label, view.symbol, view.signed)


def grids_figure(sets: Mapping[str, Array], *, view: View = RAW, side: int = 3) -> Figure:
    """Sets of images (N, C, H, W) by name, side × side of each, two sets in a row, on one colour scale."""
    block = grids_block(sets, view, side**2)
    values = np.concatenate([each.ravel() for each in block.rows])
    columns = min(2, len(block.rows))
    rows = -(-len(block.rows) // columns)
    _, height, width = block.rows[0].shape
    across = (WIDTH - BAR) / columns
    figure = base.new_figure(rows * (across * height / width + 0.3), across * columns + BAR)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.08})
    for axis in axes.flat:
        base.bare(axis)
    for axis, (name, each) in zip(axes.flat, zip(block.names, block.rows, strict=True), strict=False):
        shown = base.show_mosaic(axis, each, side, block.ends, view.signed)
        axis.set_title(name)
    base.colour_bar(figure, shown, axes, values, view.label, shrink=0.6)
    return figure


# The worst image
def worst_residual_figure(image: Array, residual: Array | None, title: str) -> Figure:
    """An image (C, H, W) beside its residual, one row per channel.

    A residual that is one number for the whole image is shown as a constant; one that is no picture at all (not three
    axes), or none, leaves the image alone.
    """
    panels: dict[str, tuple[Array, dict[str, Any]]] = {"image": (image, {"cmap": VALUES})}
    if (deviations := base.as_picture(residual, image)) is not None:
        limit = float(np.abs(deviations).max()) or 1.0
        panels["residual"] = deviations, {"cmap": DEVIATIONS, "vmin": -limit, "vmax": limit}
    channels = max(len(values) for values, _ in panels.values())
    figure = base.new_figure(PANEL * channels + 0.6, PANEL * len(panels) + 1)
    axes = figure.subplots(channels, len(panels), squeeze=False)
    for column, (name, (values, colours)) in zip(axes.T, panels.items(), strict=True):
        for channel, axis in enumerate(column[: len(values)]):
            shown = axis.imshow(values[channel], interpolation="nearest", **colours)
            axis.set(title=f"{name}, channel {channel}" if channels > 1 else name, xticks=[], yticks=[])
            figure.colorbar(shown, ax=axis, shrink=0.8)
        for axis in column[len(values) :]:
            axis.axis("off")
    figure.suptitle(title)
    return figure
