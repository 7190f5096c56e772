"""Figures of images behind a measurement: what several methods make of it, and what their settings do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from namm.errors import DataError
from namm.formatting import format_number
from namm.report.figures.base import (
    BASELINE,
    OTHER,
    OURS,
    RAW,
    VALUES,
    WIDTH,
    Array,
    View,
    as_picture,
    colour_bar,
    histograms,
    legend_above,
    limits,
    new_figure,
    plain_ticks,
    require_finite,
    show_mosaic,
)

COLOURS = {"mirror DPS": OURS, "DPS": BASELINE, "CG-DPS": OTHER}
"""By the beginning of a method's name."""
BAR, TITLE = 0.75, 0.25  # inches that a colour bar and a line of text take


@dataclass(frozen=True)
class Reconstruction:
    """What one method makes of one measurement.

    Attributes:
        name: what to call it, such as "CG-DPS-200".
        samples: (n, C, H, W).
        distances: ℓ of samples, of this measurement or of several, (N,).
        shown_distance: ℓ of the first of `samples`.
        residuals: of the samples, (n, C′, H′, W′) or (n, C′, 1, 1), if the rule has a picture of it.
    """

    name: str
    samples: Array
    distances: Array
    shown_distance: float
    residuals: Array | None = None


@dataclass(frozen=True)
class Tried:
    """One setting of one method.

    Attributes:
        name: of the method with its weight, such as "CG-DPS-50".
        zeta: ζ.
        distance: mean ℓ.
        chi2: mean χ² per measured value.
        error: mean error against the truth.
        image: what the colours show of it, the residual of a sample or the sample itself: (C, H, W).
    """

    name: str
    zeta: float
    distance: float
    chi2: float
    error: float
    image: Array | None = None


# Fig. 5: data assimilation
def assimilation_figure(
    truth: Array,
    observed: Array | None,
    methods: Sequence[Reconstruction],
    *,
    view: View = RAW,
    floor: float | None = None,
    residual_label: str = "residual",
) -> Figure:
    """Truth and observation above each method's mean and samples, then spreads, residuals and histograms of ℓ.

    Args:
        truth: (C, H, W).
        observed: The measurement as an image of that shape, NaN where nothing was seen; none if it is no such image.
        methods: In the order to be shown.
        view: What is seen of an image.
        floor: Mean ℓ of the data.
        residual_label: Of the residuals' colours.
    """
    top = [view.show(require_finite(truth, "the truth")[None])]
    if observed is not None:
        top.append(view.show(observed[None]))
    pictures = {m.name: view.show(require_finite(m.samples, f"samples of {m.name}")) for m in methods}
    _, height, width = top[0].shape
    columns = 4 if width <= height else 2
    rows = {"truth": np.concatenate(top)}
    rows |= {name: np.concatenate([each.mean(0)[None], each[: columns - 1]]) for name, each in pictures.items()}
    spreads = {name: each.std(0, ddof=1 if len(each) > 1 else 0) for name, each in pictures.items()}
    residuals = {m.name: _residual(m) for m in methods}
    shown = {name: each for name, each in residuals.items() if each is not None}
    heights = [len(rows) * ((WIDTH - BAR) * height / width / columns + TITLE), *[_strip(spreads)]]
    heights += [_strip(shown)] if shown else []
    foot = 2.0 + 0.18 * (len(methods) + 1)
    figure = new_figure(sum(heights) + foot)
    parts: Any = figure.subfigures(len(heights) + 1, 1, height_ratios=[*heights, foot])
    _images(parts[0], rows, columns, view, observed is not None)
    _side_by_side(parts[1], spreads, False, "spread", {})
    if shown:
        ell = {m.name: f"ℓ {format_number(m.shown_distance, '.2g')}" for m in methods}
        _side_by_side(parts[2], shown, True, residual_label, ell)
    axes = parts[-1].subplots()
    histograms(axes, {m.name: m.distances for m in methods}, colours(list(rows)[1:]), floor)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)  # in one column: these names are long
    return figure


# Fig. 11: what ζ and the weight of the rule do
def guidance_figure(tried: Sequence[Tried], *, signed: bool = True, label: str = "residual") -> Figure:
    """A row of pictures per method and a column per ζ on one scale, above ℓ, χ² and error against ζ."""
    if not tried:
        raise DataError("there is nothing to show: no setting was tried.")
    names, zetas = list(dict.fromkeys(t.name for t in tried)), sorted({t.zeta for t in tried})
    images = {(t.name, t.zeta): t for t in tried if t.image is not None}
    curves = 1.5 * 3 + 0.6
    if not images:
        figure = new_figure(curves)
        _curves(figure, tried, names)
        return figure
    first = next(iter(images.values())).image
    assert first is not None
    side = (WIDTH - BAR) / len(zetas)
    top = len(names) * (side * first.shape[-2] / first.shape[-1] + TITLE) + TITLE
    figure = new_figure(top + curves)
    parts: Any = figure.subfigures(2, 1, height_ratios=[top, curves])
    _table_of_pictures(parts[0], images, names, zetas, signed, label)
    _curves(parts[1], tried, names)
    return figure


def colours(names: Sequence[str]) -> dict[str, Any]:
    """Colour of each method; darker for the larger weight where methods differ in a weight alone."""
    found: dict[str, Any] = {}
    for start, colour in COLOURS.items():
        own = [name for name in names if name == start or name.startswith(f"{start}-")]
        shades = np.linspace(1.0, 0.45, len(own))[::-1]  # of one, the colour itself
        rgb = np.array(mpl.colors.to_rgb(colour))
        found |= {name: tuple(1 - (1 - rgb) * shade) for name, shade in zip(own, shades, strict=True)}
    others = [name for name in names if name not in found]
    return found | dict(zip(others, mpl.colormaps[VALUES](np.linspace(0.1, 0.85, len(others))), strict=True))


def _images(part: Any, rows: Mapping[str, Array], columns: int, view: View, has_observed: bool) -> None:
    """The truth's row and each method's, on one scale that the truth and the means give."""
    values = np.concatenate([row[np.isfinite(row)] for row in rows.values()])
    axes = part.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axis, (name, row) in zip(axes, rows.items(), strict=True):
        blank = np.full((columns - len(row), *row.shape[1:]), np.nan)
        shown = show_mosaic(axis, np.concatenate([row, blank]), columns, limits(values, view.signed), view.signed)
        axis.set_ylabel(name)
        if name == "truth":
            _captions(axis, row, ["truth", "observed"] if has_observed else ["truth"])
        elif axis is axes[1]:
            _captions(axis, row, ["mean", *["sample"] * (len(row) - 1)])
    colour_bar(part, shown, axes, values, view.label)


def _side_by_side(part: Any, pictures: Mapping[str, Array], signed: bool, label: str, below: Mapping[str, str]) -> None:
    """One picture per method with its name above, on one scale."""
    stacked = np.stack(list(pictures.values()))
    axis = part.subplots()
    shown = show_mosaic(axis, stacked, len(stacked), _scale(stacked, signed), signed)
    _captions(axis, stacked, [f"{name}\n{below[name]}" if name in below else name for name in pictures])
    colour_bar(part, shown, axis, stacked, label)


def _scale(values: Array, signed: bool) -> tuple[float, float]:
    """Colours from zero up for what cannot be negative, as a spread, and about zero for what can."""
    low, high = limits(values, signed)
    return (low, high) if signed else (0.0, high or 1.0)


def _table_of_pictures(
    part: Any, images: Mapping[tuple[str, float], Tried], names: list[str], zetas: list[float], signed: bool, label: str
) -> None:
    panels = {key: _one_channel(t.image) for key, t in images.items() if t.image is not None}
    values = np.concatenate([panel.ravel() for panel in panels.values()])
    ends = limits(require_finite(values, "the pictures"), signed)
    size = next(iter(panels.values())).shape
    axes = part.subplots(len(names), 1, squeeze=False)[:, 0]
    for axis, name in zip(axes, names, strict=True):
        row = np.stack([panels.get((name, zeta), np.full(size, np.nan)) for zeta in zetas])
        shown = show_mosaic(axis, row, len(zetas), ends, signed)
        axis.set_ylabel(name)
        first = [f"ζ {zeta:g}\n" if axis is axes[0] else "" for zeta in zetas]
        told = [
            f"ℓ {format_number(images[name, zeta].distance, '.2g')}" if (name, zeta) in images else "" for zeta in zetas
        ]
        _captions(axis, row, [a + b for a, b in zip(first, told, strict=True)])
    colour_bar(part, shown, axes, values, label)


def _curves(part: Any, tried: Sequence[Tried], names: Sequence[str]) -> None:
    """ℓ, χ² and error against ζ."""
    axes = part.subplots(3, 1, sharex=True)
    shades = colours(names)
    for axis, (key, label) in zip(axes, (("distance", "ℓ"), ("chi2", "χ² per value"), ("error", "error")), strict=True):
        drawn = []
        for name in names:
            own = sorted((t for t in tried if t.name == name), key=lambda t: t.zeta)
            points = np.array([(t.zeta, getattr(t, key)) for t in own], float)
            points = points[np.isfinite(points).all(1) & (points > 0).all(1)]  # a setting may have failed altogether
            axis.plot(points[:, 0], points[:, 1], color=shades[name], marker="o", ms=4, label=name)
            drawn += points[:, 1].tolist()
        axis.set(xscale="log", yscale="log", ylabel=label)
        if drawn:
            plain_ticks(axis.yaxis, min(drawn), max(drawn) * (1 + 1e-9))
    axes[1].axhline(1.0, color="0.5", lw=0.8, ls=":")
    zetas = [t.zeta for t in tried]
    plain_ticks(axes[-1].xaxis, min(zetas), max(zetas) * (1 + 1e-9))
    axes[-1].set_xlabel("ζ")
    legend_above(axes[0])


def _residual(method: Reconstruction) -> Array | None:
    """Residual of the first sample, (H′, W′)."""
    if method.residuals is None:
        return None
    picture = as_picture(method.residuals[0], method.samples[0])
    return None if picture is None else _one_channel(require_finite(picture, f"the residual of {method.name}"))


def _one_channel(picture: Array) -> Array:
    """(C, H, W) → (H, W); several channels as their root mean square, signed as the first is."""
    if len(picture) == 1:
        return picture[0]
    return np.asarray(np.sign(picture[0]) * np.sqrt(np.mean(picture**2, axis=0)))


def _strip(pictures: Mapping[str, Array]) -> float:
    """Height of a row of pictures in inches, with two lines of text."""
    height, width = next(iter(pictures.values())).shape
    return (WIDTH - BAR) * height / (width * len(pictures)) + 2 * TITLE + 0.1


def _captions(axis: Axes, pictures: Array, texts: Sequence[str]) -> None:
    """A text above each picture of a row."""
    step: Any = pictures.shape[2] + max(1, round(0.05 * pictures.shape[2]))
    for k, text in enumerate(texts):
        axis.text(k * step + pictures.shape[2] / 2, -0.6, text, ha="center", va="bottom", fontsize=8)
