"""A stage that one run has is not run again by another.

Two stages of the same key are the same work, so a complete one is given to every other run that would do it too: by
hard links, or as a copy where the file system has none. Complete stages are not written to, so what is shared stays as
it is. Nothing depends on it: a folder that cannot be used is left alone, and reported when its run is run.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from namm.errors import RunFolderError
from namm.experiments.engine.folder import (
    DRAFT,
    RECORD,
    claim_run,
    is_done,
    read_failure,
    read_record,
    set_aside,
    stages_aside,
)
from namm.experiments.engine.processes import alone
from namm.experiments.engine.run import Tell
from namm.experiments.engine.stages import STAGES, stage_keys, stages_until
from namm.experiments.sweeps.cell import Cell, CellOutcome, Jobs, Where, require_names, run_cells
from namm.files import owned, rename_durably


def run_sharing(
    cells: Sequence[Cell],
    out: Path,
    *,
    on: Where,
    retry: bool,
    tell: Tell,
    progress: bool = True,
    jobs: Jobs | None = None,
) -> list[CellOutcome]:
    """Run the cells as `run_cells` does; a stage that several of them have in common is not run by all.

    Here each cell is given what those before it have. Elsewhere, where cells run side by side, one of those with the
    same data draws them first.
    """
    require_names(cells)

    def go(some: Sequence[Cell]) -> list[CellOutcome]:
        alone(lambda: share(some, out))
        return run_cells(some, out, on=on, retry=retry, tell=tell, progress=progress, jobs=jobs)

    if on == "here":
        return [outcome for cell in cells for outcome in go([cell])]
    if first := first_of_each(cells, out, retry):
        tell("first the data that cells have in common")
        go(first)
    return go(cells)


def share(cells: Sequence[Cell], out: Path) -> None:
    """Give each cell's folder in `out` the stages that some other run in `out` has for the same key."""
    known = complete_stages(out)
    for cell in cells:
        keys, run = stage_keys(cell.preset.settings), out / cell.name
        wanted = [stage.name for stage in stages_until(cell.until, cell.preset.settings)]
        with suppress(RunFolderError, OSError):
            missing = [name for name in wanted if not _has(run, name, keys[name])]
            found = {name: known[keys[name]] for name in missing if keys[name] in known}
            if not found:
                continue
            with owned(run):
                claim_run(run, cell.preset.experiment)
                moves = any((run / name).exists() for name in found)
                for name, folder in found.items():
                    _give(folder, run, name)
            if moves:
                known = complete_stages(out)


def first_of_each(cells: Sequence[Cell], out: Path, retry: bool) -> list[Cell]:
    """Where several cells have the same data and none has drawn them yet, the first of them, up to its data.

    Cells that failed before and are not to be tried again are left out.
    """
    known = complete_stages(out)
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        if not retry and _failed(cell, out / cell.name):
            continue
        alike.setdefault(stage_keys(cell.preset.settings)["data"], []).append(cell)
    return [
        Cell(same[0].name, same[0].preset, "data") for key, same in alike.items() if len(same) > 1 and key not in known
    ]


def _failed(cell: Cell, folder: Path) -> bool:
    try:
        return read_failure(folder, cell.key) is not None
    except RunFolderError:
        return True  # and is reported when the cell is run


def complete_stages(out: Path) -> dict[str, Path]:
    """The folders of all complete stages of all runs in `out`, by key."""
    found: dict[str, Path] = {}
    for path in sorted(out.glob(f"*/*/{RECORD}")):
        if path.parent.name.partition(".")[0] in STAGES:
            with suppress(RunFolderError, OSError):
                record = read_record(path.parent)
                if record.is_complete(path.parent):
                    found.setdefault(record.key, path.parent)
    return found


def _has(run: Path, name: str, key: str) -> bool:
    """Whether a run has begun the stage of that key, or has a complete one set aside, which comes back by itself."""
    begun = (run / name).exists() and read_record(run / name).key == key
    return begun or any(is_done(folder, key) for folder in stages_aside(run, name))


def _give(folder: Path, run: Path, name: str) -> None:
    """Put the stage in `folder` into `run`, whole or not at all; one of other settings is set aside."""
    draft = run / f".{name}{DRAFT}"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(folder, draft, copy_function=_link)
    if (run / name).exists():
        set_aside(run, name)
    rename_durably(draft, run / name)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
