"""Table 1: constraint distance, √MMD² and KID before and after finetuning, beside the baseline's and the paper's."""

from collections.abc import Sequence
from typing import Any

from namm.experiments.engine.experiment import Reported
from namm.experiments.paper.output import Part, Runs, Value, over_seeds
from namm.report.contents import ROWS
from namm.report.paper_scores import PaperScores

PAPER_COLUMNS = {"mdm": "without_finetuning", "finetuned": "with_finetuning", "dm": "baseline"}
"""Methods that the paper has too, with the name of its column in `Reported`."""
METHODS = tuple(PAPER_COLUMNS)
OTHERS = ("few", "projected", "repaired", "repair", "data")
"""Our few-step model, other ways to the rule that start from the baseline, and the floor of every figure."""
SCORES = {
    **{"seeds": "d", "ℓ": ".3g", "CD": ".3g", "CD, paper": "g", "√MMD²": ".4f", "√MMD², paper": ".4f"},
    **{"KID": ".4f", "KID, paper": ".4f", "total variation": ".3f", "spread": ".3f"},
}
"""Columns of every table of scores."""
FORMATS = {"method": "", **SCORES}


def table1(runs: Runs) -> Part:
    """CD, √MMD² and KID of every way to a sample, and what finetuning changes."""
    metrics = [run.metrics()["rows"] for run in runs.complete]
    rows = score_rows(metrics, runs.reported, (*METHODS, *OTHERS))
    return Part(FORMATS, rows, findings=_findings(runs, metrics) if metrics else ())


def score_rows(metrics: Sequence[dict[str, Any]], reported: Reported, methods: Sequence[str]) -> list[list[Value]]:
    """A row for each method that was measured or that the paper has; `metrics` are the rows of each seed's."""
    rows: list[list[Value]] = []
    for method in methods:
        scores, paper = [seed[method] for seed in metrics if method in seed], of_paper(reported, method)
        if scores or paper is not None:
            theirs = None if paper is None else (paper.cd, paper.mmd, paper.kid)
            rows.append([ROWS[method][0], *score_columns(scores, reported, theirs)])
    return rows


def score_columns(
    scores: Sequence[dict[str, Any]], reported: Reported, paper: tuple[float, float, float] | None
) -> list[Value]:
    """The columns `SCORES` of the scores of each seed, beside the paper's CD, √MMD² and KID."""
    distances = [each["distance"]["mean"] for each in scores]
    columns = (
        over_seeds([reported.cd(distance) for distance in distances]),
        over_seeds([each["mmd"][0] for each in scores]),
        over_seeds([each["kid"][0] for each in scores if "kid" in each]),
    )
    beside = [value for pair in zip(columns, paper or (None, None, None), strict=True) for value in pair]
    looks = (over_seeds([each[name] for each in scores]) for name in ("total_variation", "spread"))
    return [len(scores), over_seeds(distances), *beside, *looks]


def of_paper(reported: Reported, method: str) -> PaperScores | None:
    """What the paper reports for a method."""
    return getattr(reported, PAPER_COLUMNS[method]) if method in PAPER_COLUMNS else None


def _findings(runs: Runs, metrics: Sequence[dict[str, Any]]) -> list[str]:
    """How far ours is from the baseline, and what finetuning changes, beside what the paper found."""

    def mean(method: str, figure: str) -> float:
        values = [rows[method][figure] for rows in metrics]
        return sum(value["mean"] if isinstance(value, dict) else value[0] for value in values) / len(values)

    before, after, baseline = (getattr(runs.reported, name) for name in PAPER_COLUMNS.values())
    gain = _change(mean("finetuned", "distance"), mean("dm", "distance"))
    distance, mmd = (_change(mean("finetuned", figure), mean("mdm", figure)) for figure in ("distance", "mmd"))
    return [
        f"{runs.experiment}: CD of ours is {gain} the baseline's (paper: {_change(after.cd, baseline.cd)}).",
        f"{runs.experiment}: finetuned, CD is {distance} and √MMD² {mmd} what they were "
        f"(paper: {_change(after.cd, before.cd)} and {_change(after.mmd, before.mmd)}).",
    ]


def _change(new: float, old: float) -> str:
    """How far `new` lies from `old`, which a name for it is to follow."""
    percent = round(100 * (new / old - 1)) if old else 0
    return f"{abs(percent)} % {'below' if percent < 0 else 'above'}" if percent else "within 1 % of"
