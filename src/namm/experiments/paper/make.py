"""Making an item: run what is missing, measure what no stage does, write its table, figures and caption."""

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from namm._version import __version__
from namm.errors import DataError, Interrupted, RunFolderError, UsageError
from namm.experiments.count import COUNTER, CountData, make_counter
from namm.experiments.engine.folder import RECORD, now, read_record
from namm.experiments.engine.processes import world
from namm.experiments.engine.run import Logger
from namm.experiments.engine.stages import stages_until
from namm.experiments.paper.items import Base, Item
from namm.experiments.paper.output import ItemOutput
from namm.experiments.sweeps.cell import Cell, CellOutcome, Jobs, Where, in_one_line, run_sharing
from namm.files import write_atomically, write_json

NOT_THE_PAPERS = (
    "The paper's numbers are those of its own sizes, networks and epochs, and √MMD² and FID depend on the numbers of "
    "images: beside this preset they are for orientation."
)


@dataclass(frozen=True)
class Made:
    """An item as it was made: what became of its cells, what it shows, and the files."""

    outcomes: list[CellOutcome]
    output: ItemOutput
    files: list[Path]

    @property
    def failed(self) -> list[CellOutcome]:
        """Cells that are missing."""
        return [outcome for outcome in self.outcomes if outcome.error is not None]


def make(
    item: Item,
    base: Base,
    out: Path,
    *,
    experiments: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    on: Where = "here",
    retry: bool = False,
    log: Logger = print,
    progress: bool = True,
    jobs: Jobs | None = None,
) -> Made:
    """Run what is missing of an item in `out` and write it to `out / item.name`.

    Args:
        item: Which one, of `ITEMS`.
        base: The settings of each experiment.
        out: Folder of all runs; items made in the same one share theirs.
        experiments: Those to show; the paper's by default.
        seeds: One run of everything for each.
        on: Where cells run; the network that counts is trained here, and what no stage measures is measured here.
        retry: Try cells again that failed before.
        log: Is given a line for whatever happens.
        progress: Show progress bars.
        jobs: How many at once, and what Slurm is asked for, where cells are not run here.
    """
    from namm.report.figures import look

    if world() > 1:
        raise UsageError("start `namm paper` without torchrun; --on local and --on slurm spread its runs.")
    chosen = {name: base(name) for name in experiments or item.experiments}
    cells = [_with_counter(cell, out) for cell in item.cells(chosen.__getitem__, list(chosen), seeds)]
    if any(item.needs_inception(cell.preset.settings) or _waits_for_inception(cell, out) for cell in cells):
        _require_inception()
    for cell in cells:
        _require_counter(cell, out, log, progress)
    outcomes = run_sharing(cells, out, on=on, retry=retry, log=log, progress=progress, jobs=jobs)
    if item.measurement is not None:
        outcomes = [_measured(item, outcome, log, progress) for outcome in outcomes]
    with look("light"):
        output = item.show(outcomes)
        files = write(item, outcomes, output, out / item.name)
    return Made(outcomes, output, files)


def _measured(item: Item, outcome: CellOutcome, log: Logger, progress: bool) -> CellOutcome:
    """The outcome after measuring; a failure there is one of the cell."""
    if outcome.error is not None:
        return outcome
    log(f"{outcome.cell.name}: measuring for {item.name}")
    try:
        item.measure(outcome, progress)
    except Interrupted:
        raise
    except Exception as error:
        log(f"{outcome.cell.name}: failed: {in_one_line(error)}")
        return replace(outcome, error=in_one_line(error))
    return outcome


# What is needed first


def _with_counter(cell: Cell, out: Path) -> Cell:
    """The cell with the network in `out`, which all cells share, where it needs one that counts and names none."""
    data = cell.preset.settings.data
    if not isinstance(data, CountData) or data.counter:
        return cell
    settings = replace(cell.preset.settings, data=replace(data, counter=str((out / COUNTER).resolve())))
    return replace(cell, preset=replace(cell.preset, settings=settings))


def _require_counter(cell: Cell, out: Path, log: Logger, progress: bool) -> None:
    """Train the network of all cells, once, where this one needs it."""
    data, path = cell.preset.settings.data, (out / COUNTER).resolve()
    if isinstance(data, CountData) and data.counter == str(path) and not path.exists():
        log(f"training the network that counts galaxies, {path}")
        make_counter(data, path, progress=progress)


def _waits_for_inception(cell: Cell, out: Path) -> bool:
    """Whether the cell is still to be evaluated with Inception features."""
    settings = cell.preset.settings
    asked = settings.evaluate.kid_subsets > 0 or settings.evaluate.n_fid > 0
    evaluates = any(stage.name == "evaluate" for stage in stages_until(cell.until, settings))
    with suppress(RunFolderError):  # a folder that cannot be read is reported when its cell is run
        return asked and evaluates and not cell.is_complete(out / cell.name)
    return False


def _require_inception() -> None:
    """Refuse, before hours are spent, what would lack the features at its end."""
    from namm.evaluation.inception import load_inception

    try:
        load_inception()
    except DataError as error:
        raise UsageError(str(error)) from error


# What is written


def write(item: Item, outcomes: Sequence[CellOutcome], output: ItemOutput, folder: Path) -> list[Path]:
    """Write the table as Markdown, CSV and JSON, figures as PNG and PDF, and a caption; return the files."""
    from namm.report.figures import save

    about = _provenance(outcomes)
    missing = [f"{outcome.cell.name} is missing: {outcome.error}" for outcome in outcomes if outcome.error is not None]
    notes = [*missing, *output.notes]
    caption = _caption(item, about, notes)
    findings = "\n".join(f"- {finding}" for finding in output.findings)
    page = [f"# {item.name}: {item.shows}", output.table.markdown(), *filter(None, [findings]), caption]
    texts = {"md": "\n\n".join(page), "csv": output.table.csv(), "caption.txt": caption}
    for suffix, text in texts.items():
        write_atomically(folder / f"{item.name}.{suffix}", text)
    content = {"item": item.name, "shows": item.shows, "rows": output.table.plain(), "drawn": output.drawn}
    content |= {"findings": list(output.findings), "notes": notes, "made of": about}
    write_json(folder / f"{item.name}.json", content)
    pictures = [folder / f"{name}.{suffix}" for name in output.figures for suffix in ("png", "pdf")]
    for path in pictures:
        save(output.figures[path.stem], path)
    return [folder / f"{item.name}.{suffix}" for suffix in (*texts, "json")] + pictures


def _provenance(outcomes: Sequence[CellOutcome]) -> dict[str, Any]:
    """What was run, with what."""
    cells = [outcome.cell for outcome in outcomes]
    records = [path.parent for outcome in outcomes for path in outcome.folder.glob(f"*/{RECORD}")]
    return {
        "preset": sorted({cell.preset.name for cell in cells}),
        "experiments": list(dict.fromkeys(cell.preset.experiment for cell in cells)),
        "seeds": sorted({cell.preset.settings.map.train.seed for cell in cells}),
        "cells": {outcome.cell.name: "complete" if outcome.error is None else "missing" for outcome in outcomes},
        "runs made by namm": sorted({read_record(folder).version for folder in records}),
        "shown by": f"namm {__version__}, torch {version('torch')}, Python {platform.python_version()}",
        "shown (UTC)": now(),
    }


def _caption(item: Item, about: Mapping[str, Any], notes: Sequence[str]) -> str:
    """What was run, in words."""
    done = sum(state == "complete" for state in about["cells"].values())
    seeds = ", ".join(map(str, about["seeds"]))
    lines = [
        f"{item.name}: {item.shows}. Preset {', '.join(about['preset'])}; {', '.join(about['experiments'])}; "
        f"seed{'s' if len(about['seeds']) > 1 else ''} {seeds}; {done} of {len(about['cells'])} runs complete.",
        "± is the standard deviation over seeds, and absent for one seed. CD = 100·λ·ℓ with the paper's λ, whatever λ "
        "the map was trained with." + ("" if about["preset"] == ["paper"] else f" {NOT_THE_PAPERS}"),
        f"Runs made by namm {', '.join(about['runs made by namm']) or '(none)'}; shown by {about['shown by']}, "
        f"{about['shown (UTC)']}.",
        *notes,
    ]
    return "\n\n".join(lines) + "\n"
