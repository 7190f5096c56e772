"""Figs. 3 and 9: samples of ours and of the baseline, from the evaluation of each experiment's first finished seed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from namm.errors import RunFolderError
from namm.experiments.engine.stages.report import collect
from namm.experiments.paper.measurements import HISTOGRAM
from namm.experiments.paper.output import Part, Runs
from namm.experiments.paper.table1 import FORMATS, METHODS, score_rows
from namm.report.contents import Contents
from namm.report.figures.samples import grids_figure, samples_figure


def fig3(runs: Runs) -> Part:
    """Samples above their residuals and the distances of 128 of each method."""
    return _show(runs, _methods)


def fig9(runs: Runs) -> Part:
    """Nine of each distribution, on one scale of colours."""
    return _show(runs, _grids)


def _methods(contents: Contents) -> tuple[Figure, dict[str, Any]]:
    methods = [replace(method, distances=method.distances[:HISTOGRAM]) for method in contents.methods]
    floor = next(row.distance for row in contents.rows if row.name == "data")
    drawn = {
        method.name: {"distances": method.distances.tolist(), "shown": method.shown_distances.tolist()}
        for method in methods
    }
    return samples_figure(methods, view=contents.view, floor=floor), drawn | {"data": {"mean distance": floor}}


def _grids(contents: Contents) -> tuple[Figure, dict[str, Any]]:
    drawn = {name: {"images": len(images), "mean": float(images.mean())} for name, images in contents.grids.items()}
    return grids_figure(contents.grids, view=contents.view), drawn


def _show(runs: Runs, draw: Callable[[Contents], tuple[Figure, dict[str, Any]]]) -> Part:
    """A figure, with the numbers that it shows, of the first seed, and the scores of all."""
    rows = score_rows([run.metrics()["rows"] for run in runs.complete], runs.reported, (*METHODS, "data"))
    if not runs.complete:
        return Part(FORMATS, rows)
    first = runs.complete[0]
    contents = collect(first.folder)
    if contents.problems:
        raise RunFolderError(f"{first.folder} cannot be shown. {' '.join(contents.problems)}")
    figure, drawn = draw(contents)
    return Part(FORMATS, rows, figure, {"run": first.cell.name, **drawn})
