"""The headline of a report in words that depend on the numbers: a loss is called a loss, and noise is called noise."""

import numpy as np

from namm.evaluation.milestone import half_way
from namm.report import html
from namm.report.contents import Contents, Row
from namm.report.html import Content, Markup, number

ROWS = {
    "data": ("data", "other real images: the floor"),
    "mdm": ("ours, not finetuned", "f(ỹ), ỹ sampled in mirror space"),
    "finetuned": ("ours", "the same ỹ through the finetuned f"),
    "dm": ("baseline", "the same model, trained on the images"),
    "projected": ("baseline + project", "its samples, moved onto the rule"),
    "repaired": ("baseline repaired", "f(g(x)) of its samples"),
}
SMOOTH, NOISY = 0.85, 1.15
"""Total variation, or spread, over the data's, beyond which words say so."""
CLOSE = 0.05
"""Part of √MMD² that words do not make a difference of."""
FAIR = 0.98
"""Compute of the baseline over ours, below which it had less."""


def about_distance(ours: Row, base: Row, floor: Row) -> Markup:
    """Which method is closer to the rule, and by how much; a difference within two standard errors is none."""
    error = 2 * float(np.hypot(ours.standard_error, base.standard_error))
    if abs(ours.distance - base.distance) <= error:
        verdict = "as far from the rule as the baseline's, to within the error of the means"
    elif ours.distance < base.distance:
        verdict = f"{100 * (1 - ours.distance / base.distance):.0f} % closer to the rule than the baseline's"
    else:
        verdict = "farther from the rule than the baseline's"
    values = (number(ours.distance), " against ", number(base.distance), "; the data themselves have ")
    return html.joined(["Our samples are ", verdict, ": mean ℓ is ", *values, number(floor.distance), "."])


def about_resemblance(ours: Row, base: Row, floor: Row) -> Markup:
    """Which method is closer to the data; a difference within the scatter over subsets, or within 5 %, is none.

    Subsets that are most of the samples hardly scatter, and two trainings that differ by their seed do.
    """
    difference = ours.mmd[0] - base.mmd[0]
    verdict = f"{'less' if difference > 0 else 'more'} than the baseline's"
    if abs(difference) <= max(float(np.hypot(ours.mmd[1], base.mmd[1])), CLOSE * base.mmd[0]):
        verdict = "as well as the baseline's, to within the scatter over subsets or 5 %"
    values = (number(ours.mmd[0]), " against ", number(base.mmd[0]), ", where real data score ", number(floor.mmd[0]))
    return html.joined([f"They resemble held-out data {verdict}: √MMD² is ", *values, "."])


def about_variety(ours: Row, base: Row) -> Markup:
    """Whether the rule is kept by making less than the data hold."""
    warnings = []
    if ours.total_variation < SMOOTH:
        warnings.append("they are smoother than the data, and part of what they gain in ℓ may be that")
    if ours.total_variation > NOISY:
        warnings.append("they are rougher than the data")
    if ours.spread < SMOOTH:
        warnings.append("they are less varied than the data")
    verdict = "; ".join(warnings) or "so the rule is not kept by smoothing or by repetition"
    values = (number(ours.total_variation), " (baseline ", number(base.total_variation), ") and their spread ")
    spread = (number(ours.spread), " (baseline ", number(base.spread), ")")
    return html.joined(["Their total variation over the data's is ", *values, *spread, f": {verdict}."])


def about_compute(c: Contents) -> Markup:
    """What both sides cost, and whether that is fair."""
    ours, base = (sum(cost.seconds for cost in side) for side in (c.ours, c.baseline))
    steps = sum(cost.steps or 0 for cost in c.baseline)
    priced = base if c.step_seconds is None else steps * c.step_seconds
    fair: list[Content] = ["."]
    if priced < FAIR * ours:
        fair = [": the baseline had less, and the comparison favours ours."]
    elif base < FAIR * ours:
        fair = [". The machine was busier for ours: at its speed then, the baseline's steps would have taken ",
                number(priced), " s."]  # fmt: skip
    values = (number(ours), " s of compute for ours and ", number(base), " s for the baseline")
    return html.joined(["All this with ", *values, *fair])


def about_more_compute(c: Contents) -> Markup:
    """What the second half of its compute brought the baseline, where its samples half-way were measured."""
    along = c.milestones.get("dm", ())
    if (half := half_way(along)) is None:
        return Markup("")
    end = along[-1]
    first = (number(half.mean), " after half of its steps (", number(half.compute_seconds), " s) and ")
    last = (number(end.mean), " at the end (", number(end.compute_seconds), f" s), each over {end.n} samples.")
    return html.joined(["Does the baseline only need more compute? The mean ℓ of its samples is ", *first, *last])


def about_others(c: Contents) -> Markup:
    """The other ways to the rule that start from the baseline, where they were measured."""
    shown = [(ROWS[name][0], row) for name in ("projected", "repaired") if (row := c.row(name))]
    if not shown:
        return Markup("")
    each = (
        html.joined([f"{name} (mean ℓ ", number(row.distance), ", √MMD² ", number(row.mmd[0]), ")"])
        for name, row in shown
    )
    return html.joined(["Other ways to bring the baseline's samples to the rule: ", html.joined(each, ", "), "."])
