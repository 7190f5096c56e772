"""Figures of samples: what two methods make, how far it is from the rule, and what the data look like beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from namm.errors import DataError
from namm.formatting import format_number
from namm.report.figures import base
from namm.report.figures.base import BAR, BASELINE_COLOUR, DEVIATIONS, OURS_COLOUR, RAW, VALUES, WIDTH, Array, View

PANEL = 3.2  # inches that a picture of the worst image takes


@dataclass(frozen=True)
class Method:
    """Samples of one method."""

    name: str
    images: Array  # those to be shown, (K, C, H, W)
    shown_distances: Array  # their ℓ, (K,)
    distances: Array  # ℓ of all samples, (N,)
    residuals: Array | None = None  # of those to be shown, (K, C′, H′, W′) or (K, C′, 1, 1), if there are such pictures


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
    names, pictures = [method.name for method in methods], [_pictures(method, view) for method in methods]
    found = [base.residual_pictures(m.residuals, m.images, f"residuals of {m.name}") for m in methods]
    residuals = [each for each in found if each is not None]
    captions = [[f"ℓ {format_number(distance, '.2g')}" for distance in method.shown_distances] for method in methods]
    blocks: list[dict[str, Any]] = [
        {"rows": pictures, "signed": view.signed, "label": view.label, "captions": captions}
    ]
    if len(residuals) == len(methods):
        blocks.append({"rows": residuals, "signed": True, "label": residual_label})
    heights = [base.row_height(row.shape, len(row)) + 0.2 for block in blocks for row in block["rows"]]
    foot = [2.4] if with_distances else []
    figure = base.new_figure(sum(heights) + sum(foot))
    parts: Any = figure.subfigures(1 + len(foot), 1, squeeze=False, height_ratios=[sum(heights), *foot])[:, 0]
    # All rows in one column of axes, so that a residual stands below its picture.
    axes = parts[0].subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for own, block in zip(axes.reshape(len(blocks), len(methods)), blocks, strict=True):
        base.picture_rows(parts[0], own, names, **block)
    if with_distances:
        colours = dict(zip(names, (OURS_COLOUR, BASELINE_COLOUR), strict=False))
        base.histograms(parts[-1].subplots(), {m.name: m.distances for m in methods}, colours, floor)
    return figure


def _pictures(method: Method, view: View) -> Array:
    """What is seen of the method's images: (K, H, W)."""
    pictures = view.show(base.require_finite(method.images, f"samples of {method.name}"))
    if pictures.ndim != 3:
        raise DataError(f"a view must make pictures (N, H, W); that of {method.name} made {pictures.shape}.")
    return pictures


# Fig. 9: samples of every distribution
def grids_figure(sets: Mapping[str, Array], *, view: View = RAW, side: int = 3) -> Figure:
    """Sets of images (N, C, H, W) by name, side × side of each, two sets in a row, on one colour scale."""
    pictures = {name: view.show(base.require_finite(images[: side**2], name)) for name, images in sets.items()}
    values = np.concatenate([each.ravel() for each in pictures.values()])
    columns = min(2, len(pictures))
    rows = -(-len(pictures) // columns)
    _, height, width = next(iter(pictures.values())).shape
    block = (WIDTH - BAR) / columns
    figure = base.new_figure(rows * (block * height / width + 0.3), block * columns + BAR)
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.08})
    for axis in axes.flat:
        base.bare(axis)
    for axis, (name, each) in zip(axes.flat, pictures.items(), strict=False):
        shown = base.show_mosaic(axis, each, side, base.limits(values, view.signed), view.signed)
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
