"""Fig. 4: ℓ of samples at milestones of the trainings, against the compute spent until then.

The mirrored model's times include its map's, and those of finetuning everything before it.
"""

from typing import Any

import numpy as np

from namm.experiments.paper.output import Part, Runs, Value, over_seeds
from namm.report.figures.base import BASELINE_COLOUR, OTHER_COLOUR, OURS_COLOUR
from namm.report.figures.studies import Curve, efficiency_figure

CURVES = {
    "mdm": ("ours, not finetuned", OTHER_COLOUR),
    "finetune": ("ours", OURS_COLOUR),
    "dm": ("baseline", BASELINE_COLOUR),
}
FORMATS = {
    **{"method": "", "seeds": "d", "step": "d", "samples": "d"},
    **{"compute seconds": ".4g", "mean ℓ": ".3g", "std ℓ": ".3g"},
}


def fig4(runs: Runs) -> Part:
    """Mean ± standard deviation over samples; over seeds too, where there are several."""
    rows: list[list[Value]] = []
    curves, notes = [], []
    metrics = {run.cell.name: run.metrics() for run in runs.complete}
    milestones: dict[str, Any] = {name: each.get("milestones") or {} for name, each in metrics.items()}
    for method, (title, colour) in CURVES.items():
        seeds = [points for each in milestones.values() if (points := each.get(method))]
        # The same milestone of every seed; the first ones may be lacking where a model had learned too little yet.
        together = list(zip(*(reversed(points) for points in seeds), strict=False))[::-1]
        for points in together:
            seconds, mean, std = ([point[key] for point in points] for key in ("compute_seconds", "mean", "std"))
            step = round(np.mean([point["step"] for point in points]))
            measured = map(over_seeds, (seconds, mean, std))
            rows.append([title, len(points), step, points[0]["n"], *measured])
        if together:
            curves.append(_curve(title, colour, together))
        if lacking := [name for name, each in milestones.items() if not each.get(method)]:
            notes.append(f"{', '.join(lacking)}: no milestones of {method} were measured.")
    if not curves:
        return Part(FORMATS, rows, notes=notes)
    floor = float(np.mean([each["rows"]["data"]["distance"]["mean"] for each in metrics.values()]))
    return Part(FORMATS, rows, efficiency_figure(curves, floor), milestones, notes=notes)


def _curve(name: str, colour: str, milestones: list[Any]) -> Curve:
    """One point for each milestone, pooled over seeds: within a seed the samples scatter, and seeds scatter besides."""
    seconds, mean, std = (
        np.array([[point[key] for point in points] for points in milestones], float)
        for key in ("compute_seconds", "mean", "std")
    )
    return Curve(name, seconds.mean(1), mean.mean(1), np.sqrt((std**2).mean(1) + mean.var(1)), colour)
