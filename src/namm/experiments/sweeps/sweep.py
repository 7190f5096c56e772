"""A sweep: one experiment with all combinations of some settings' values, gathered into one table.

sweep.json    every cell: its values, its status and what it found, or why it failed
sweep.csv     the same as a table

Imports no torch.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from namm._version import __version__
from namm.errors import RunFolderError, UsageError
from namm.experiments.engine.folder import ELSEWHERE, RUN, is_done, now, read_record
from namm.experiments.engine.settings import with_seed
from namm.experiments.engine.settings_file import from_yaml, to_yaml
from namm.experiments.presets import Preset
from namm.experiments.sweeps.cell import Cell, CellOutcome
from namm.files import read_claim, write_atomically, write_json

KIND = "namm sweep"
JSON, CSV = "sweep.json", "sweep.csv"
SEED = "seed"
EVALUATED = ("distance_ours", "distance_baseline", "mmd_ours", "mmd_baseline")
"""Mean ℓ and √MMD² of the method and of the baseline, shown wherever the stage `evaluate` is complete."""

Values = Mapping[str, Any]
"""Values of the settings that are varied, by name."""


@dataclass(frozen=True)
class Row:
    """What is known of the cell of that name."""

    cell: str
    values: Values
    status: Literal["complete", "failed"]
    stage: str | None
    """The last of its stages that is complete."""
    results: Mapping[str, Any]
    """What the last stage that was asked for shows, and the evaluation's headline, as far as they are there."""
    error: str | None


# What to run


def read_values(text: str) -> tuple[str, list[Any]]:
    """The name and values in `map.sigma_max=0.1,0.2`; a value is written as in a settings file: `[1, 2]` is a list."""
    name, equals, values = text.partition("=")
    pieces = [piece.strip() for piece in re.split(r",(?![^\[]*\])", values)]
    if not equals or "." not in name or not all(pieces):
        raise UsageError(f"what is varied looks like map.sigma_max=0.05,0.1,0.2, not like {text!r}.")
    try:
        return name.strip().removeprefix("--").replace("-", "_"), [_value(piece) for piece in pieces]
    except yaml.YAMLError as error:
        raise UsageError(f"the values in {text!r} cannot be read: {' '.join(str(error).split())}.") from error


def _value(text: str) -> Any:
    """A value as YAML reads it, and 1e-3 as the number that it is."""
    return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else yaml.safe_load(text)


def combinations(varied: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """All combinations of the values, and of the seeds where there are any."""
    axes = dict(varied) | ({SEED: list(seeds)} if seeds else {})
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def make_cell(base: Preset, values: Values, until: str | None) -> Cell:
    """The cell of `base` with these values; misspelt names and values of another type are refused."""
    chosen = replace(base, settings=with_seed(base.settings, values[SEED])) if SEED in values else base
    for name, value in values.items():
        chosen = chosen if name == SEED else _with(chosen, name, value)
    name = "_".join(f"{setting}={_word(value)}" for setting, value in values.items())
    return Cell(name, chosen, until)


def _with(base: Preset, name: str, value: Any) -> Preset:
    """`base` with one setting changed, by way of its settings file, which knows names and types."""
    content = yaml.safe_load(to_yaml(base))
    *parts, last = name.split(".")
    inner = content
    for part in parts:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f"there is no setting {name!r}: {part!r} is a value itself.")
    inner[last] = value
    return from_yaml(yaml.safe_dump(content), f"--vary {name}")


def _word(value: Any) -> str:
    """A value as a part of a folder's name."""
    other = r"[^\w.+-]+"
    return re.sub(other, "-", re.sub(f"^{other}|{other}$", "", str(value)))


# What was found


def gather(outcomes: Sequence[CellOutcome], values: Sequence[Values]) -> list[Row]:
    """A row for each cell, in order."""
    return [_row(outcome, each) for outcome, each in zip(outcomes, values, strict=True)]


def _row(outcome: CellOutcome, values: Values) -> Row:
    cell, keys = outcome.cell, outcome.cell.keys
    last: str | None = None
    results: dict[str, Any] = {}
    for stage in cell.stages:
        with suppress(RunFolderError):  # of what cannot be read; the outcome says so
            if not is_done(outcome.folder / stage.name, keys[stage.name]):
                continue
            last = stage.name
            if last in ("evaluate", cell.last):
                found = read_record(outcome.folder / last).results
                selected = EVALUATED if last == "evaluate" else stage.shown
                results |= {name: found[name] for name in selected if name in found}
    return Row(cell.name, values, "failed" if outcome.error else "complete", last, results, outcome.error)


def result_names(rows: Sequence[Row]) -> list[str]:
    """The names of all results, in the order in which stages have them."""
    return list(dict.fromkeys(name for row in rows for name in row.results))


def require_sweep(out: Path) -> None:
    """Refuse a folder that is a run itself, or whose table is somebody else's; changes nothing."""
    if (out / RUN).exists():
        raise RunFolderError(f"{out} is the folder of one run: choose {ELSEWHERE} for the sweep.")
    if out.exists() and not out.is_dir():
        raise RunFolderError(f"{out} is a file, and a sweep needs a folder: choose {ELSEWHERE}.")
    if (out / JSON).exists():
        read_claim(out / JSON, KIND, ELSEWHERE)


def write_table(out: Path, base: Preset, rows: Sequence[Row]) -> None:
    """Write sweep.json and sweep.csv."""
    about = {"kind": KIND, "experiment": base.experiment, "preset": base.name, "made": now(), "version": __version__}
    write_json(out / JSON, about | {"cells": [asdict(row) for row in rows]})
    varied, results = list(rows[0].values), result_names(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cell", *varied, "status", "stage", *results, "error"])
    for row in rows:
        figures = [row.results.get(name) for name in results]
        writer.writerow([row.cell, *(row.values[name] for name in varied), row.status, row.stage, *figures, row.error])
    write_atomically(out / CSV, text.getvalue())
