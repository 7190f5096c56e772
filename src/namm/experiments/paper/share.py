"""A stage that one run has is not run again by another.

Two stages of the same key are the same work, so a complete one is given to every other run that would do it too: by
hard links, or as a copy where the file system has none. Complete stages are not written to, so what is shared stays as
it is.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from namm.experiments.cells import Cell
from namm.experiments.folder import DRAFT, RECORD, claim_run, read_record
from namm.experiments.stages import STAGES, stage_keys, stages_until
from namm.files import owned, rename_durably


def share(cells: Sequence[Cell], out: Path) -> None:
    """Give each cell's folder in `out` the stages that some other run in `out` has for the same key."""
    known = complete_stages(out)
    for cell in cells:
        keys, run = stage_keys(cell.preset.settings), out / cell.name
        wanted = [stage.name for stage in stages_until(cell.until, cell.preset.settings)]
        found = {name: known[keys[name]] for name in wanted if keys[name] in known and not (run / name).exists()}
        if found:
            with owned(run):
                claim_run(run, cell.preset.experiment)
                for name, folder in found.items():
                    _give(folder, run, name)


def first_of_each(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """Where several cells have the same data and none has drawn them yet, the first of them, up to its data."""
    known = complete_stages(out)
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(stage_keys(cell.preset.settings)["data"], []).append(cell)
    return [
        Cell(same[0].name, same[0].preset, "data") for key, same in alike.items() if len(same) > 1 and key not in known
    ]


def complete_stages(out: Path) -> dict[str, Path]:
    """The folders of all complete stages of all runs in `out`, by key."""
    found: dict[str, Path] = {}
    for path in sorted(out.glob(f"*/*/{RECORD}")):
        if path.parent.name.partition(".")[0] in STAGES:
            record = read_record(path.parent)
            if record.is_complete(path.parent):
                found.setdefault(record.key, path.parent)
    return found


def _give(folder: Path, run: Path, name: str) -> None:
    """Put the stage in `folder` into `run`, whole or not at all."""
    draft = run / f".{name}{DRAFT}"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(folder, draft, copy_function=_link)
    rename_durably(draft, run / name)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
