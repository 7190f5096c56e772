"""Figures of comparisons: distance against compute, what the settings of the map do, and how trainings went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from namm.formatting import format_number
from namm.report.figures import base
from namm.report.figures.base import (
    BASELINE_COLOUR,
    DATA_COLOUR,
    OTHER_COLOUR,
    OURS_COLOUR,
    RAW,
    VALUES,
    WIDTH,
    Array,
    View,
)

CURVES = {
    "loss": (DATA_COLOUR, "training"),
    "val/loss": (OTHER_COLOUR, "validation"),
    "val/constraint": (OURS_COLOUR, "ℓ, validation"),
}
"""What is drawn of a training's log: name there, colour and name here."""
POINTS: dict[str, Any] = {"marker": "o", "ms": 5, "capsize": 3}


# Fig. 4: distance against compute
@dataclass(frozen=True)
class Curve:
    """Mean ℓ of samples and its standard deviation as training goes on, against all compute seconds so far: (K,)."""

    name: str
    seconds: Array
    mean: Array
    std: Array
    colour: str


def efficiency_figure(curves: Sequence[Curve], floor: float | None = None) -> Figure:
    """Mean ℓ ± standard deviation over samples, against compute seconds."""
    figure = base.new_figure(2.7)
    axes = figure.subplots()
    for curve in curves:
        for values in (curve.seconds, curve.mean, curve.std):
            base.require_finite(values, f"the curve of {curve.name}")
        below = np.minimum(curve.std, 0.9 * curve.mean)  # a bar through zero has no end on a logarithmic axis
        label = f"{curve.name}: {format_number(curve.mean[-1], '.2g')}"
        axes.errorbar(curve.seconds, curve.mean, [below, curve.std], color=curve.colour, label=label, **POINTS)
    base.label_floor(axes, floor)
    lowest = min(float((curve.mean - curve.std).clip(0.1 * curve.mean).min()) for curve in curves)
    if lowest > 0:
        axes.set_yscale("log")
        base.plain_ticks(axes.yaxis, lowest, max(float((curve.mean + curve.std).max()) for curve in curves))
    axes.set(xlabel="compute in seconds", ylabel="ℓ of the samples")
    axes.set_xlim(0, 1.08 * max(float(curve.seconds.max()) for curve in curves) or 1.0)
    axes.margins(y=0.15)
    base.legend_above(axes)
    return figure


# Tab. 2: what σ_max and λ do, in numbers
@dataclass(frozen=True)
class Scored:
    """Figures of merit at one value of a setting, each as mean and standard deviation."""

    value: float
    cd: tuple[float, float]
    mmd: tuple[float, float]
    kid: tuple[float, float] | None = None


def ablation_figure(studies: Mapping[str, Sequence[Scored]]) -> Figure:
    """For each setting CD, √MMD² and, where measured, KID against its value, mean ± standard deviation."""
    rows = [("CD", "cd", OURS_COLOUR), ("√MMD²", "mmd", OTHER_COLOUR)]
    if all(scored.kid is not None for study in studies.values() for scored in study):
        rows.append(("KID", "kid", BASELINE_COLOUR))
    figure = base.new_figure(1.5 * len(rows) + 0.4)
    axes = figure.subplots(len(rows), len(studies), squeeze=False, sharex="col", sharey="row")
    for column, (name, study) in zip(axes.T, studies.items(), strict=True):
        values = base.require_finite(np.array([scored.value for scored in study], float), name)
        for axis, (label, key, colour) in zip(column, rows, strict=True):
            mean, std = base.require_finite(np.array([getattr(scored, key) for scored in study], float), label).T
            axis.errorbar(values, mean, std, color=colour, **POINTS)
        if (values > 0).all():
            column[-1].set_xscale("log")
        column[-1].set_xlabel(name)
    for axis, (label, _, _) in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(label)
    return figure


# Figs. 6 and 7: mirror images above distances
@dataclass(frozen=True)
class Variant:
    """One setting of the map, such as "σ_max = 0.1": g(x) of one image x (C, H, W), and ℓ of inverted samples (N,)."""

    name: str
    mirror_image: Array
    distances: Array


def sensitivity_figure(studies: Mapping[str, Sequence[Variant]], *, view: View = RAW) -> Figure:
    """For each setting its variants: g(x) of one image, each with its own colours, above histograms of ℓ."""
    heights = [sum(_heights(variants, view)) for variants in studies.values()]
    figure = base.new_figure(sum(heights))
    parts: Any = figure.subfigures(len(studies), 1, height_ratios=heights)
    for part, (name, variants) in zip(np.atleast_1d(parts), studies.items(), strict=True):
        part.suptitle(name, fontsize=10)
        shades = mpl.colormaps[VALUES](np.linspace(0.1, 0.85, len(variants)))
        _variants(part, variants, view, dict(zip((v.name for v in variants), shades, strict=True)), {})
    return figure


def forward_maps_figure(
    image: Array, variants: Sequence[Variant], baseline: Array | None = None, *, view: View = RAW
) -> Figure:
    """An image (C, H, W) and what each g makes of it, above histograms of ℓ; `baseline` is ℓ of the plain model's."""
    shown = [Variant("data x", image, np.zeros(0)), *variants]
    colours = dict(zip((v.name for v in variants), (OURS_COLOUR, OTHER_COLOUR, DATA_COLOUR), strict=False))
    colours |= {"baseline": BASELINE_COLOUR}
    figure = base.new_figure(sum(_heights(shown, view)))
    _variants(figure, shown, view, colours, {} if baseline is None else {"baseline": baseline})
    return figure


def _heights(variants: Sequence[Variant], view: View) -> tuple[float, float]:
    """Inches of a row of mirror images, and of the histograms below."""
    _, height, width = view.show(variants[0].mirror_image[None]).shape
    return (WIDTH / len(variants)) * height / width + 0.9, 2.5


def _variants(
    figure: Any, variants: Sequence[Variant], view: View, colours: Mapping[str, Any], others: Mapping[str, Array]
) -> None:
    """A row of mirror images, each with its own colour scale, above histograms of ℓ."""
    top, bottom = figure.subfigures(2, 1, height_ratios=_heights(variants, view))
    for axis, variant in zip(top.subplots(1, len(variants), squeeze=False)[0], variants, strict=True):
        picture = view.show(base.require_finite(variant.mirror_image, f"the image of {variant.name}")[None])
        shown = base.show_mosaic(axis, picture, 1, base.limits(picture, view.signed), view.signed)
        axis.set_title(variant.name)
        base.colour_bar(top, shown, axis, picture, "", location="bottom", aspect=15, ticks=MaxNLocator(2))
    distances = {v.name: v.distances for v in variants if v.distances.size}
    base.histograms(bottom.subplots(), {**distances, **others}, colours)


# Fig. 10: σ fixed or drawn
def fixed_noise_figure(stages: Mapping[str, tuple[Array, Array]]) -> Figure:
    """By stage (before and after finetuning) ℓ with σ drawn from [0, σ_max], and ℓ with σ = σ_max always."""
    figure = base.new_figure(2.5 * len(stages))
    parts: Any = figure.subfigures(len(stages), 1)
    for part, (name, (drawn, fixed)) in zip(np.atleast_1d(parts), stages.items(), strict=True):
        both = {"σ ~ U(0, σ_max)": drawn, "σ = σ_max": fixed}
        part.suptitle(name, fontsize=10)
        axes = part.subplots()
        base.histograms(axes, both, dict(zip(both, (OURS_COLOUR, OTHER_COLOUR), strict=True)))
        base.legend_above(axes, columns=1)  # two columns are wider than the figure
    return figure


# Not in the paper: how the trainings went
def training_figure(trainings: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """The losses of each training against its steps, from the lines of its log."""
    columns = min(2, len(trainings))
    rows = -(-len(trainings) // columns)
    figure = base.new_figure(1.9 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False)
    labels: dict[str, Any] = {}
    for axis, (name, lines) in zip(axes.flat, trainings.items(), strict=False):
        labels |= _training(axis, lines)
        axis.set_title(name)
    for axis in axes.flat[len(trainings) :]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("steps")
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=3)
    return figure


def _training(axis: Axes, lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Draw one training; its lines by label."""
    labels, drawn = {}, []
    for key, (colour, label) in CURVES.items():
        points = np.array([(line["step"], line[key]) for line in lines if key in line], float).reshape(-1, 2)
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            (labels[label],) = axis.plot(*points.T, color=colour, marker="." if len(points) < 30 else "")
            drawn += points[:, 1].tolist()
    if drawn and min(drawn) > 0:
        axis.set_yscale("log")
        base.plain_ticks(axis.yaxis, min(drawn), max(drawn))
    return labels
