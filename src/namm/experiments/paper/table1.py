"""Table 1: constraint distance, MMD and KID before and after finetuning, beside the baseline's and the paper's."""

from collections.abc import Sequence
from typing import Any

from namm.experiments.engine.experiment import Reported, Scores
from namm.experiments.paper.measurements import by_experiment, complete, metrics
from namm.experiments.paper.output import Shown, Table, Value, over_seeds
from namm.experiments.sweeps.cell import CellOutcome
from namm.report.contents import ROWS

METHODS = ("mdm", "finetuned", "dm")
"""Those that the paper has too."""
OTHERS = ("projected", "repaired", "data")
"""Other ways to the rule that start from the baseline, and the floor of every figure."""
FIGURES = {
    "seeds": "d",
    "ℓ": ".3g",
    "CD": ".3g",
    "CD, paper": "g",
    "MMD": ".4f",
    "MMD, paper": ".4f",
    "KID": ".4f",
    "KID, paper": ".4f",
    "total variation": ".3f",
}
"""Columns of every table of scores."""
FORMATS = {"experiment": "", "method": "", **FIGURES, "spread": ".3f"}


def table1(outcomes: Sequence[CellOutcome]) -> Shown:
    """CD, MMD and KID of every way to a sample, and what finetuning changes."""
    rows, words, without = [], [], []
    for experiment, cells in by_experiment(outcomes).items():
        found = [metrics(outcome)["rows"] for outcome in complete(cells)]
        reported = cells[0].cell.preset.reported
        rows += score_rows(experiment, found, reported, (*METHODS, *OTHERS))
        if found:
            words.append(_improvement(experiment, found, reported))
            words.append(_finetuning(experiment, found, reported))
        if found and "kid" not in found[0]["finetuned"]:
            without.append(experiment)
    return Shown(Table(FORMATS, rows), words=words, notes=no_kid(without))


def no_kid(experiments: Sequence[str]) -> list[str]:
    """Why these experiments have no KID."""
    if not experiments:
        return []
    return [f"KID was not measured for {', '.join(experiments)}: evaluate.kid_subsets is 0 in this preset."]


def score_rows(
    experiment: str, found: Sequence[dict[str, Any]], reported: Reported, methods: Sequence[str]
) -> list[list[Value]]:
    """A row for each method that was measured or that the paper has; `found` are the rows of each seed's metrics."""
    return [
        score_row(experiment, ROWS[method][0], [rows[method] for rows in found if method in rows], reported, paper)
        for method in methods
        if (paper := of_paper(reported, method)) is not None or any(method in rows for rows in found)
    ]


def score_row(
    experiment: str, name: str, scores: Sequence[dict[str, Any]], reported: Reported, paper: Scores | None
) -> list[Value]:
    """One row under `FORMATS` of one method's scores, one for each seed."""
    distance = [each["distance"]["mean"] for each in scores]
    return [
        experiment,
        name,
        len(scores),
        over_seeds(distance),
        over_seeds([reported.cd(each) for each in distance]),
        None if paper is None else paper.cd,
        over_seeds([each["mmd"][0] for each in scores]),
        None if paper is None else paper.mmd,
        over_seeds([each["kid"][0] for each in scores if "kid" in each]),
        None if paper is None else paper.kid,
        over_seeds([each["total_variation"] for each in scores]),
        over_seeds([each["spread"] for each in scores]),
    ]


def without_paper(table: Table) -> Table:
    """The table without the paper's columns, where the paper has no numbers."""
    kept = [k for k, title in enumerate(table.titles) if not title.endswith(", paper")]
    formats = {title: spec for title, spec in table.formats.items() if not title.endswith(", paper")}
    return Table(formats, [[row[k] for k in kept] for row in table.rows])


def of_paper(reported: Reported, method: str) -> Scores | None:
    """What the paper reports for a method."""
    columns = {"mdm": reported.without_finetuning, "finetuned": reported.with_finetuning, "dm": reported.baseline}
    return columns.get(method)


def _improvement(experiment: str, found: Sequence[dict[str, Any]], reported: Reported) -> str:
    ours, base = (_mean(found, method, "distance") for method in ("finetuned", "dm"))
    paper = _change(reported.with_finetuning.cd, reported.baseline.cd)
    return f"{experiment}: CD of ours is {_change(ours, base)} the baseline's (paper: {paper})."


def _finetuning(experiment: str, found: Sequence[dict[str, Any]], reported: Reported) -> str:
    before, after = reported.without_finetuning, reported.with_finetuning
    distance, mmd = (
        _change(_mean(found, "finetuned", figure), _mean(found, "mdm", figure)) for figure in ("distance", "mmd")
    )
    return (
        f"{experiment}: finetuned, CD is {distance} and MMD {mmd} what they were "
        f"(paper: {_change(after.cd, before.cd)} and {_change(after.mmd, before.mmd)})."
    )


def _mean(found: Sequence[dict[str, Any]], method: str, figure: str) -> float:
    values = [rows[method][figure] for rows in found]
    return sum(value["mean"] if isinstance(value, dict) else value[0] for value in values) / len(values)


def _change(new: float, old: float) -> str:
    """How far `new` lies from `old`, which a name for it is to follow."""
    percent = round(100 * (new / old - 1)) if old else 0
    return f"{abs(percent)} % {'below' if percent < 0 else 'above'}" if percent else "within 1 % of"
