"""Every figure a function from arrays to a matplotlib figure; `base` has what they share, and how one is saved."""

from namm.report.figures.base import BASELINE_COLOUR as BASELINE
from namm.report.figures.base import OTHER_COLOUR as OTHER
from namm.report.figures.base import OURS_COLOUR as OURS
from namm.report.figures.base import Array, View, look, new_figure, plain_ticks, png, save
from namm.report.figures.samples import worst_residual_figure

__all__ = [
    "BASELINE",
    "OTHER",
    "OURS",
    "Array",
    "View",
    "look",
    "new_figure",
    "plain_ticks",
    "png",
    "save",
    "worst_residual_figure",
]
