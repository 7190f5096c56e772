"""Figures of samples: what two methods make, how far it is from the rule, and what the data look like beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from namm.errors import DataError
from namm.formatting import format_number
from namm.report.figures.base import (
    BASELINE,
    DEVIATIONS,
    OURS,
    RAW,
    VALUES,
    WIDTH,
    Array,
    View,
    as_picture,
    bare,
    colour_bar,
    histograms,
    limits,
    new_figure,
    require_finite,
    show_mosaic,
)

COLOURS = (OURS, BASELINE)
BAR = 0.75  # inches that a colour bar takes
PANEL = 3.2  # inches that a picture of the worst image takes


@dataclass(frozen=True)
class Method:
    """Samples of one method.

    Attributes:
        name: what to call it.
        images: those to be shown, (K, C, H, W).
        shown_distances: their ℓ, (K,).
        distances: ℓ of all samples, (N,).
        residuals: of those to be shown, (K, C′, H′, W′) or (K, C′, 1, 1), if the rule has a picture of it.
    """

    name: str
    images: Array
    shown_distances: Array
    distances: Array
    residuals: Array | None = None


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
    pictures = [_pictures(method, view) for method in methods]
    residuals = [_residual_pictures(method) for method in methods]
    blocks = [(pictures, view.signed, view.label)]
    if all(residual is not None for residual in residuals):
        blocks.append(([r for r in residuals if r is not None], True, residual_label))
    heights = [_height(row) + 0.2 for rows, _, _ in blocks for row in rows]
    foot = [2.4] if with_distances else []
    figure = new_figure(sum(heights) + sum(foot))
    parts: Any = figure.subfigures(1 + len(foot), 1, squeeze=False, height_ratios=[sum(heights), *foot])[:, 0]
    # All rows in one column of axes, so that a residual stands below its picture.
    axes = parts[0].subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for own, (rows, signed, label) in zip(axes.reshape(len(blocks), len(methods)), blocks, strict=True):
        values = np.concatenate([row.ravel() for row in rows])
        for axis, row, method in zip(own, rows, methods, strict=True):
            shown = show_mosaic(axis, row, len(row), limits(values, signed), signed)
            axis.set_ylabel(method.name)
            if rows is pictures:
                _captions(axis, row, [f"ℓ {format_number(distance, '.2g')}" for distance in method.shown_distances])
        colour_bar(parts[0], shown, own, values, label)
    if with_distances:
        named = dict(zip((method.name for method in methods), COLOURS, strict=False))
        histograms(parts[-1].subplots(), {m.name: m.distances for m in methods}, named, floor)
    return figure


# Fig. 9: samples of every distribution
def grids_figure(sets: Mapping[str, Array], *, view: View = RAW, side: int = 3) -> Figure:
    """Sets of images (N, C, H, W) by name, side × side of each, two sets in a row, on one colour scale."""
    pictures = {name: view.show(require_finite(images[: side**2], name)) for name, images in sets.items()}
    values = np.concatenate([each.ravel() for each in pictures.values()])
    ends = limits(values, view.signed)
    columns = min(2, len(pictures))
    rows = -(-len(pictures) // columns)
    _, height, width = next(iter(pictures.values())).shape
    block = (WIDTH - BAR) / columns
    figure = new_figure(rows * (block * height / width + 0.3), block * columns + BAR)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.08})
    for axis in axes.flat:
        bare(axis)
    for axis, (name, each) in zip(axes.flat, pictures.items(), strict=False):
        shown = show_mosaic(axis, each, side, ends, view.signed)
        axis.set_title(name)
    colour_bar(figure, shown, axes, values, view.label, shrink=0.6)
    return figure


def _pictures(method: Method, view: View) -> Array:
    """What is seen of the method's images: (K, H, W)."""
    pictures = view.show(require_finite(method.images, f"samples of {method.name}"))
    if pictures.ndim != 3:
        raise DataError(f"a view must make pictures (N, H, W); that of {method.name} made {pictures.shape}.")
    return pictures


def _residual_pictures(method: Method) -> Array | None:
    """The residuals, (K, H′, W′); several channels as their root mean square, signed as the first is."""
    if method.residuals is None:
        return None
    found = [as_picture(r, x) for r, x in zip(method.residuals, method.images, strict=True)]
    if any(each is None for each in found):
        return None
    stacked = require_finite(np.stack([each for each in found if each is not None]), f"residuals of {method.name}")
    if stacked.shape[1] == 1:
        return stacked[:, 0]
    return np.sign(stacked[:, 0]) * np.sqrt(np.mean(stacked**2, axis=1))


def _height(pictures: Array) -> float:
    """Height of a row of pictures in inches."""
    count, height, width = pictures.shape
    return (WIDTH - BAR) * height / (width * count)


def _captions(axis: Axes, pictures: Array, texts: Sequence[str]) -> None:
    """A text above each picture of a row."""
    step: Any = pictures.shape[2] + max(1, round(0.05 * pictures.shape[2]))
    for k, text in enumerate(texts):
        axis.text(k * step + pictures.shape[2] / 2, -0.6, text, ha="center", va="bottom", fontsize=8)


# The worst image


def worst_residual_figure(image: Array, residual: Array | None, title: str) -> Figure:
    """An image (C, H, W) beside its residual, one row per channel.

    A residual that is one number for the whole image is shown as a constant; one that is no picture at all (not three
    axes), or none, leaves the image alone.
    """
    deviations = as_picture(residual, image)
    columns = 1 if deviations is None else 2
    channels = max(len(image), 0 if deviations is None else len(deviations))
    figure = new_figure(PANEL * channels + 0.6, PANEL * columns + 1)
    axes = figure.subplots(channels, columns, squeeze=False)
    for row in range(channels):
        if row < len(image):
            _panel(figure, axes[row, 0], image[row], "image", channels, row, cmap=VALUES)
        else:
            axes[row, 0].axis("off")
        if deviations is not None:
            limit = float(np.abs(deviations).max()) or 1.0
            colours = {"cmap": DEVIATIONS, "vmin": -limit, "vmax": limit}
            if row < len(deviations):
                _panel(figure, axes[row, 1], deviations[row], "residual", channels, row, **colours)
            else:
                axes[row, 1].axis("off")
    figure.suptitle(title)
    return figure


def _panel(figure: Figure, axes: Any, values: Array, name: str, channels: int, row: int, **colours: Any) -> None:
    shown = axes.imshow(values, interpolation="nearest", **colours)
    axes.set_title(f"{name}, channel {row}" if channels > 1 else name)
    axes.set_xticks([])
    axes.set_yticks([])
    figure.colorbar(shown, ax=axes, shrink=0.8)
