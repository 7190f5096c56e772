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
from namm.report.figures.base import (
    BASELINE,
    DATA,
    OTHER,
    OURS,
    RAW,
    VALUES,
    WIDTH,
    Array,
    View,
    colour_bar,
    histograms,
    legend_above,
    limits,
    new_figure,
    plain_ticks,
    require_finite,
    show_mosaic,
)

CURVES = {"loss": (DATA, "training"), "val/loss": (OTHER, "validation"), "val/constraint": (OURS, "ℓ, validation")}
"""What is drawn of a training's log: name there, colour and name here."""


@dataclass(frozen=True)
class Curve:
    """ℓ of samples as training goes on.

    Attributes:
        name: what to call it.
        seconds: compute spent until then, all that came before included, (K,).
        mean: mean ℓ of the samples, (K,).
        std: its standard deviation over samples, (K,).
        colour: of the line.
    """

    name: str
    seconds: Array
    mean: Array
    std: Array
    colour: str


@dataclass(frozen=True)
class Variant:
    """One setting of the map.

    Attributes:
        name: the setting, such as "σ_max = 0.1".
        mirror_image: g(x) of one image x, (C, H, W).
        distances: ℓ of inverted samples, (N,).
    """

    name: str
    mirror_image: Array
    distances: Array


@dataclass(frozen=True)
class Scored:
    """Figures of merit at one value of a setting, each as mean and standard deviation."""

    value: float
    cd: tuple[float, float]
    mmd: tuple[float, float]
    kid: tuple[float, float] | None = None


# Fig. 4: distance against compute
def efficiency_figure(curves: Sequence[Curve], floor: float | None = None) -> Figure:
    """Mean ℓ ± standard deviation over samples, against compute seconds."""
    figure = new_figure(2.7)
    axes = figure.subplots()
    for curve in curves:
        for values in (curve.seconds, curve.mean, curve.std):
            require_finite(values, f"the curve of {curve.name}")
        below = np.minimum(curve.std, 0.9 * curve.mean)  # a bar through zero has no end on a logarithmic axis
        axes.errorbar(
            curve.seconds, curve.mean, yerr=[below, curve.std], color=curve.colour, marker="o", ms=5, capsize=3,
            label=f"{curve.name}: {format_number(curve.mean[-1], '.2g')}",
        )  # fmt: skip
    if floor is not None:
        axes.plot([], [], " ", label=f"data: mean {format_number(floor, '.2g')}")
    lowest = min(float((curve.mean - curve.std).clip(0.1 * curve.mean).min()) for curve in curves)
    if lowest > 0:
        axes.set_yscale("log")
        plain_ticks(axes.yaxis, lowest, max(float((curve.mean + curve.std).max()) for curve in curves))
    axes.set(xlabel="compute in seconds", ylabel="ℓ of the samples")
    axes.set_xlim(0, 1.08 * max(float(curve.seconds.max()) for curve in curves) or 1.0)
    axes.margins(y=0.15)
    legend_above(axes)
    return figure


# Fig. 6: what σ_max and λ do to mirror images and to ℓ
def sensitivity_figure(studies: Mapping[str, Sequence[Variant]], *, view: View = RAW) -> Figure:
    """For each setting its variants: g(x) of one image, each with its own colours, above histograms of ℓ."""
    figure = new_figure(sum(_study_height(variants, view) for variants in studies.values()))
    heights = [_study_height(variants, view) for variants in studies.values()]
    parts: Any = figure.subfigures(len(studies), 1, height_ratios=heights)
    for part, (name, variants) in zip(np.atleast_1d(parts), studies.items(), strict=True):
        part.suptitle(name, fontsize=10)
        shades = mpl.colormaps[VALUES](np.linspace(0.1, 0.85, len(variants)))
        _variants(part, variants, view, dict(zip((v.name for v in variants), shades, strict=True)), {})
    return figure


# Tab. 2: the same in numbers
def ablation_figure(studies: Mapping[str, Sequence[Scored]]) -> Figure:
    """For each setting CD, √MMD² and, where measured, KID against its value, mean ± standard deviation."""
    rows = [("CD", "cd", OURS), ("√MMD²", "mmd", OTHER)]
    if all(scored.kid is not None for study in studies.values() for scored in study):
        rows.append(("KID", "kid", BASELINE))
    figure = new_figure(1.5 * len(rows) + 0.4)
    axes = figure.subplots(len(rows), len(studies), squeeze=False, sharex="col", sharey="row")
    for column, (name, study) in enumerate(studies.items()):
        values = require_finite(np.array([scored.value for scored in study], float), name)
        for row, (label, key, colour) in enumerate(rows):
            mean, std = require_finite(np.array([getattr(scored, key) for scored in study], float), label).T
            axes[row, column].errorbar(values, mean, yerr=std, color=colour, marker="o", ms=5, capsize=3)
            axes[row, 0].set_ylabel(label)
        if (values > 0).all():
            axes[-1, column].set_xscale("log")
        axes[-1, column].set_xlabel(name)
    return figure


# Fig. 7: the gradient of a convex network, or any network, as g
def forward_maps_figure(
    image: Array, variants: Sequence[Variant], baseline: Array | None = None, *, view: View = RAW
) -> Figure:
    """An image (C, H, W) and what each g makes of it, above histograms of ℓ; `baseline` is ℓ of the plain model's."""
    shown = [Variant("data x", image, np.zeros(0)), *variants]
    colours = dict(zip((v.name for v in variants), (OURS, OTHER, DATA), strict=False)) | {"baseline": BASELINE}
    figure = new_figure(_study_height(shown, view))
    _variants(figure, shown, view, colours, {} if baseline is None else {"baseline": baseline})
    return figure


# Fig. 10: σ fixed or drawn
def fixed_noise_figure(stages: Mapping[str, tuple[Array, Array]]) -> Figure:
    """By stage (before and after finetuning) ℓ with σ drawn from [0, σ_max], and ℓ with σ = σ_max always."""
    figure = new_figure(2.5 * len(stages))
    parts: Any = figure.subfigures(len(stages), 1)
    for part, (name, (drawn, fixed)) in zip(np.atleast_1d(parts), stages.items(), strict=True):
        both = {"σ ~ U(0, σ_max)": drawn, "σ = σ_max": fixed}
        part.suptitle(name, fontsize=10)
        axes = part.subplots()
        histograms(axes, both, dict(zip(both, (OURS, OTHER), strict=True)))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)  # two columns are wider than the figure
    return figure


# Not in the paper: how the trainings went
def training_figure(trainings: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """The losses of each training against its steps, from the lines of its log."""
    columns = min(2, len(trainings))
    rows = -(-len(trainings) // columns)
    figure = new_figure(1.9 * rows + 0.3)
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
    labels, drawn = {}, []
    for key, (colour, label) in CURVES.items():
        points = np.array([(line["step"], line[key]) for line in lines if key in line], float)
        points = points[np.isfinite(points).all(axis=1)] if len(points) else points
        if len(points):
            marker = "." if len(points) < 30 else ""
            (labels[label],) = axis.plot(points[:, 0], points[:, 1], color=colour, marker=marker)
            drawn += points[:, 1].tolist()
    if drawn and min(drawn) > 0:
        axis.set_yscale("log")
        plain_ticks(axis.yaxis, min(drawn), max(drawn))
    return labels


def _study_height(variants: Sequence[Variant], view: View) -> float:
    _, height, width = view.show(variants[0].mirror_image[None]).shape
    return (WIDTH / len(variants)) * height / width + 0.9 + 2.5


def _variants(
    figure: Any, variants: Sequence[Variant], view: View, colours: Mapping[str, Any], others: Mapping[str, Array]
) -> None:
    """A row of mirror images, each with its own colour scale, above histograms of ℓ."""
    pictures = [view.show(require_finite(v.mirror_image, f"the image of {v.name}")[None]) for v in variants]
    _, height, width = pictures[0].shape
    top, bottom = figure.subfigures(2, 1, height_ratios=[(WIDTH / len(variants)) * height / width + 0.9, 2.5])
    axes = top.subplots(1, len(variants), squeeze=False)[0]
    for axis, variant, picture in zip(axes, variants, pictures, strict=True):
        shown = show_mosaic(axis, picture, 1, limits(picture, view.signed), view.signed)
        axis.set_title(variant.name)
        colour_bar(top, shown, axis, picture, "", location="bottom", aspect=15, ticks=MaxNLocator(2))
    distances = {v.name: v.distances for v in variants if v.distances.size}
    histograms(bottom.subplots(), {**distances, **others}, colours)
