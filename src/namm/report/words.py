"""What a report says around its verdict, in words that depend on the numbers."""

from namm.evaluation.milestone import half_way
from namm.report import html
from namm.report.contents import Contents
from namm.report.html import Content, Markup, number

ROWS = {
    "data": ("data", "other real images: the floor"),
    "mdm": ("ours, not finetuned", "f(ỹ), ỹ sampled in mirror space"),
    "finetuned": ("ours", "the same ỹ through the finetuned f"),
    "dm": ("baseline", "the same model, trained on the images"),
    "projected": ("baseline + project", "its samples, moved onto the rule"),
    "repaired": ("baseline repaired", "f(g(x)) of its samples"),
}
FAIR = 0.98
"""Compute of the baseline over ours, below which it had less."""


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
