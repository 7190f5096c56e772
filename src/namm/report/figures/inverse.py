"""Figures of images behind a measurement: what several methods make of it, and what their settings do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from namm.errors import DataError
from namm.formatting import format_number
from namm.report.figures import base
from namm.report.figures.base import BASELINE_COLOUR, OTHER_COLOUR, OURS_COLOUR, RAW, VALUES, Array, View

COLOURS = {"mirror DPS": OURS_COLOUR, "DPS": BASELINE_COLOUR, "CG-DPS": OTHER_COLOUR}
"""By the beginning of a method's name."""
TITLE = 0.25  # inches that a line of text takes


@dataclass(frozen=True)
class Reconstruction:
    """What one method, such as "CG-DPS-200", makes of one measurement."""

    name: str
    samples: Array  # (n, C, H, W)
    distances: Array  # ℓ of samples, of this measurement or of several, (N,)
    shown_distance: float  # ℓ of the first of `samples`
    residuals: Array | None = None  # of the samples, (n, C′, H′, W′) or (n, C′, 1, 1), if there are such pictures


@dataclass(frozen=True)
class Tried:
    """One setting of one method, with mean ℓ, χ² per measured value and error against the truth."""

    name: str  # of the method with its weight, such as "CG-DPS-50"
    zeta: float
    distance: float
    chi2: float
    error: float
    image: Array | None = None  # the residual of a sample, or the sample itself: (C, H, W)


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
    top = [view.show(image[None]) for image in (base.require_finite(truth, "the truth"), observed) if image is not None]
    pictures = {m.name: view.show(base.require_finite(m.samples, f"samples of {m.name}")) for m in methods}
    _, height, width = top[0].shape
    columns = 4 if width <= height else 2
    rows = {"truth": np.concatenate(top)}
    rows |= {name: np.concatenate([each.mean(0)[None], each[: columns - 1]]) for name, each in pictures.items()}
    spreads = {name: each.std(0, ddof=1 if len(each) > 1 else 0) for name, each in pictures.items()}
    strips: list[tuple[dict[str, Array], dict[str, Any]]] = [(spreads, {"label": "spread", "from_zero": True})]
    residuals: dict[str, Array] = {}
    for m in methods:
        first = None if m.residuals is None else m.residuals[:1]
        found = base.residual_pictures(first, m.samples[:1], f"the residual of {m.name}")
        if found is not None:
            residuals[f"{m.name}\nℓ {format_number(m.shown_distance, '.2g')}"] = found[0]
    if residuals:
        strips.append((residuals, {"label": residual_label, "signed": True}))
    heights = [len(rows) * (base.row_height(top[0].shape, columns) + TITLE)]
    for shown, _ in strips:  # with two lines of text
        heights.append(base.row_height(next(iter(shown.values())).shape, len(shown)) + 2 * TITLE + 0.1)
    foot = 2.0 + 0.18 * (len(methods) + 1)
    figure = base.new_figure(sum(heights) + foot)
    parts: Any = figure.subfigures(len(heights) + 1, 1, height_ratios=[*heights, foot])
    axes = parts[0].subplots(len(rows), 1, squeeze=False)[:, 0]
    texts: list[list[str]] = [["truth", "observed"], ["mean", *["sample"] * (columns - 1)], *[[]] * len(methods)]
    captions = [own[: len(row)] for own, row in zip(texts, rows.values(), strict=False)]
    seen: dict[str, Any] = {"label": view.label, "signed": view.signed, "columns": columns}
    base.picture_rows(parts[0], axes, list(rows), list(rows.values()), captions=captions, **seen)
    for part, (shown, how) in zip(parts[1:-1], strips, strict=True):
        row = np.stack(list(shown.values()))
        base.picture_rows(part, [part.subplots()], [""], [row], captions=[list(shown)], **how)
    axis = parts[-1].subplots()
    base.histograms(axis, {m.name: m.distances for m in methods}, colours(list(pictures)), floor)
    base.legend_above(axis, columns=1)  # these names are long
    return figure


# Fig. 11: what ζ and the weight of the rule do
def guidance_figure(tried: Sequence[Tried], *, signed: bool = True, label: str = "residual") -> Figure:
    """A row of pictures per method and a column per ζ on one scale, above ℓ, χ² and error against ζ."""
    if not tried:
        raise DataError("there is nothing to show: no setting was tried.")
    names, zetas = list(dict.fromkeys(t.name for t in tried)), sorted({t.zeta for t in tried})
    distances = {(t.name, t.zeta): f"ℓ {format_number(t.distance, '.2g')}" for t in tried if t.image is not None}
    panels = {(t.name, t.zeta): base.one_channel(t.image) for t in tried if t.image is not None}
    curves = 1.5 * 3 + 0.6
    if not panels:
        figure = base.new_figure(curves)
        _curves(figure, tried, names)
        return figure
    base.require_finite(np.stack(list(panels.values())), "the pictures")
    blank = np.full_like(next(iter(panels.values())), np.nan)
    top = len(names) * (base.row_height(blank.shape, len(zetas)) + TITLE) + TITLE
    figure = base.new_figure(top + curves)
    parts: Any = figure.subfigures(2, 1, height_ratios=[top, curves])
    rows = [np.stack([panels.get((name, zeta), blank) for zeta in zetas]) for name in names]
    captions = [[distances.get((name, zeta), "") for zeta in zetas] for name in names]
    captions[0] = [f"ζ {zeta:g}\n{text}" for zeta, text in zip(zetas, captions[0], strict=True)]
    axes = parts[0].subplots(len(names), 1, squeeze=False)[:, 0]
    base.picture_rows(parts[0], axes, names, rows, signed=signed, label=label, captions=captions)
    _curves(parts[1], tried, names)
    return figure


def _curves(part: Any, tried: Sequence[Tried], names: Sequence[str]) -> None:
    """ℓ, χ² and error against ζ."""
    axes, shades = part.subplots(3, 1, sharex=True), colours(names)
    for axis, (key, label) in zip(axes, (("distance", "ℓ"), ("chi2", "χ² per value"), ("error", "error")), strict=True):
        drawn = []
        for name in names:
            points = np.array(sorted((t.zeta, getattr(t, key)) for t in tried if t.name == name), float)
            points = points[np.isfinite(points).all(1) & (points > 0).all(1)]  # a setting may have failed altogether
            axis.plot(*points.T, color=shades[name], marker="o", ms=4, label=name)
            drawn += points[:, 1].tolist()
        axis.set(xscale="log", yscale="log", ylabel=label)
        if drawn:
            base.plain_ticks(axis.yaxis, min(drawn), max(drawn) * (1 + 1e-9))
    axes[1].axhline(1.0, color="0.5", lw=0.8, ls=":")
    zetas = [t.zeta for t in tried]
    base.plain_ticks(axes[-1].xaxis, min(zetas), max(zetas) * (1 + 1e-9))
    axes[-1].set_xlabel("ζ")
    base.legend_above(axes[0])


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
