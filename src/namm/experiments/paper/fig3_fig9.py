"""Figs. 3 and 9: samples of ours and of the baseline, from the evaluation of each experiment's first finished seed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from namm.errors import RunFolderError
from namm.experiments.engine.stages.report import collect
from namm.experiments.paper.measurements import HISTOGRAM, by_experiment, complete, metrics
from namm.experiments.paper.output import Shown, Table
from namm.experiments.paper.table1 import FORMATS, METHODS, no_kid, score_rows
from namm.experiments.sweeps.cell import CellOutcome
from namm.report.contents import Contents
from namm.report.figures.samples import grids_figure, samples_figure

Draw = Callable[[Contents], tuple[Figure, Any]]
"""A figure and the numbers that it shows."""


def fig3(outcomes: Sequence[CellOutcome]) -> Shown:
    """Samples above their residuals and the distances of 128 of each method."""
    return _pictures("fig3", outcomes, _methods)


def fig9(outcomes: Sequence[CellOutcome]) -> Shown:
    """Nine of each distribution, on one scale of colours."""
    return _pictures("fig9", outcomes, _grids)


def _methods(contents: Contents) -> tuple[Figure, Any]:
    methods = [replace(method, distances=method.distances[:HISTOGRAM]) for method in contents.methods]
    floor = next(row.distance for row in contents.rows if row.name == "data")
    figure = samples_figure(methods, view=contents.view, floor=floor)
    drawn = {
        method.name: {"distances": method.distances.tolist(), "shown": method.shown_distances.tolist()}
        for method in methods
    }
    return figure, drawn | {"data": {"mean distance": floor}}


def _grids(contents: Contents) -> tuple[Figure, Any]:
    figure = grids_figure(contents.grids, view=contents.view)
    return figure, {
        name: {"images": len(images), "mean": float(images.mean())} for name, images in contents.grids.items()
    }


def _pictures(item: str, outcomes: Sequence[CellOutcome], draw: Draw) -> Shown:
    """A figure for each experiment, and the scores that belong to it."""
    rows, figures, drawn, without = [], {}, {}, []
    for experiment, cells in by_experiment(outcomes).items():
        done = complete(cells)
        found = [metrics(outcome)["rows"] for outcome in done]
        rows += score_rows(experiment, found, cells[0].cell.preset.reported, (*METHODS, "data"))
        if found and "kid" not in found[0]["finetuned"]:
            without.append(experiment)
        if done:
            contents = collect(done[0].folder)
            if contents.problems:
                raise RunFolderError(f"{done[0].folder} cannot be shown. {' '.join(contents.problems)}")
            name = f"{item}-{experiment}"
            figures[name], numbers = draw(contents)
            drawn[name] = {"run": done[0].cell.name, **numbers}
    return Shown(Table(FORMATS, rows), figures, drawn, notes=no_kid(without))
