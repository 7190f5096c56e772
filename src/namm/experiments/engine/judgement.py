"""The verdict on a run, from what its stages have measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from namm.evaluation.verdict import Figures, Verdict, judge, judge_map
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.run_parts import is_complete

METRICS = "metrics.json"
"""What the stage `evaluate` measured: every row's scores, the verdicts, and what both sides cost."""


def judge_rows(
    rows: Mapping[str, Mapping[str, Any]], map_figures: Mapping[str, Any] | None = None
) -> dict[str, Verdict]:
    """The verdict on every row that the baseline is compared with; that on the row `finetuned` is the run's."""
    figures = {name: Figures.from_row(row) for name, row in rows.items()}
    data, baseline = figures.pop("data"), figures.pop("dm")
    how: dict[str, Any] = {"map_figures": map_figures, "repaired": figures.get("repaired")}
    return {name: judge(row, baseline, data, **how) for name, row in figures.items()}


def run_verdict(run: Path, stage: str | None = "finetune") -> Verdict | None:
    """The verdict on a run: on its evaluation where that is complete, else on its map; None where neither is.

    Runs of version 0.1 kept none, and are judged by the figures that they kept.

    Args:
        run: The run's folder.
        stage: The stage whose f the samples go through; `map` for those that are not finetuned.
    """
    learned = read_record(run / "map").results if is_complete(run, "map") else None
    if is_complete(run, "evaluate"):
        metrics = json.loads((run / "evaluate" / METRICS).read_text())
        if "verdict" in metrics and stage == "finetune":
            return Verdict.from_json(metrics["verdict"])
        return judge_rows(metrics["rows"], learned)["finetuned" if stage == "finetune" else "mdm"]
    return None if learned is None else judge_map(learned)
