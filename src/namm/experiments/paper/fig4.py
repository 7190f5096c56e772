"""Fig. 4: ℓ of samples at milestones of the trainings, against the compute spent until then.

The mirrored model's times include its map's, and those of finetuning everything before it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from namm.experiments.paper.measurements import by_experiment, complete, metrics
from namm.experiments.paper.output import Shown, Table, over_seeds
from namm.experiments.sweeps.cell import CellOutcome
from namm.report.figures import BASELINE, OTHER, OURS
from namm.report.figures.studies import Curve, efficiency_figure

CURVES = {"mdm": ("ours, not finetuned", OTHER), "finetune": ("ours", OURS), "dm": ("baseline", BASELINE)}
FORMATS = {
    "experiment": "",
    "method": "",
    "seeds": "d",
    "step": "d",
    "samples": "d",
    "compute seconds": ".4g",
    "mean ℓ": ".3g",
    "std ℓ": ".3g",
}

Point = dict[str, Any]


def fig4(outcomes: Sequence[CellOutcome]) -> Shown:
    """A figure for each experiment: mean ± standard deviation over samples; over seeds too, where there are several."""
    rows, figures, drawn, notes = [], {}, {}, []
    for experiment, cells in by_experiment(outcomes).items():
        found = {outcome.cell.name: metrics(outcome) for outcome in complete(cells)}
        along = {name: each.get("milestones") or {} for name, each in found.items()}
        curves = []
        for method, (title, colour) in CURVES.items():
            runs = [points for each in along.values() if (points := each.get(method))]
            together = _together(runs)
            rows += [_row(experiment, title, same) for same in together]
            curves += [_curve(title, colour, together)] if together else []
            if lacking := [name for name, each in along.items() if not each.get(method)]:
                notes.append(f"{', '.join(lacking)}: no milestones of {method} were measured.")
        if curves:
            floor = float(np.mean([each["rows"]["data"]["distance"]["mean"] for each in found.values()]))
            figures[f"fig4-{experiment}"] = efficiency_figure(curves, floor)
            drawn[f"fig4-{experiment}"] = along
    return Shown(Table(FORMATS, rows), figures, drawn, notes=notes)


def _together(runs: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """The same milestone of every seed; the first ones may be lacking where a model had learned too little yet."""
    return [list(same) for same in zip(*(reversed(points) for points in runs), strict=False)][::-1]


def _curve(name: str, colour: str, points: Sequence[Sequence[Point]]) -> Curve:
    """One point for each milestone, pooled over seeds: within a seed the samples scatter, and seeds scatter besides."""
    seconds, mean, std = (
        np.array([[point[key] for point in same] for same in points], float)
        for key in ("compute_seconds", "mean", "std")
    )
    return Curve(name, seconds.mean(1), mean.mean(1), np.sqrt((std**2).mean(1) + mean.var(1)), colour)


def _row(experiment: str, name: str, same: Sequence[Point]) -> list[Any]:
    seconds, mean, std = (over_seeds([point[key] for point in same]) for key in ("compute_seconds", "mean", "std"))
    return [experiment, name, len(same), round(np.mean([p["step"] for p in same])), same[0]["n"], seconds, mean, std]
