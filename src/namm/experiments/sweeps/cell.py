"""Many runs of one study: each is a cell, a normal run in a folder of its own.

A cell that is complete is not run again and one that was interrupted goes on. One that raises is reported, its message
is kept in its folder, and the others stand; it is tried again when that is asked for, or when its settings change.

Two stages of the same key are the same work, so a complete one is given to every other cell that would do it too
(`run_sharing`): by hard links, or as a copy where the file system has none. Complete stages are not written to, so what
is shared stays as it is. Nothing depends on it: a folder that cannot be used is left alone, and reported when its cell
is run.

Imports no torch: what there is to do is known before anything is started.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from namm.errors import FolderInUseError, Interrupted, NammError, RunFolderError, UsageError, is_out_of_memory
from namm.experiments.engine.folder import (
    FAILURE,
    RECORD,
    is_done,
    put_stage,
    read_failure,
    read_record,
    run_claim,
    stages_aside,
    write_failure,
)
from namm.experiments.engine.processes import first_to_fail, on_main_process, world
from namm.experiments.engine.run import Logger, rank_zero_log, run
from namm.experiments.engine.stages import MAIN_LINE, STAGES, Stage, stage_keys, stages_until
from namm.experiments.presets import Preset
from namm.files import owned

Where = Literal["here", "local", "slurm"]
JOBS = "jobs"
"""Folder of the jobs' logs, beside the cells' own."""


@dataclass(frozen=True)
class Cell:
    """One run of a study, in a folder of its name."""

    name: str
    preset: Preset
    until: str | None = None

    @property
    def last(self) -> str:
        """The name of its last stage: `until`, or the end of the main line."""
        return self.until or MAIN_LINE

    @property
    def stages(self) -> list[Stage]:
        """The stages that it asks for."""
        return stages_until(self.until, self.preset.settings)

    @property
    def keys(self) -> dict[str, str]:
        """The key of every stage under its settings."""
        return stage_keys(self.preset.settings)

    @property
    def key(self) -> str:
        """That of its last stage: a failure is remembered for these settings alone."""
        return self.keys[self.last]

    def is_complete(self, folder: Path) -> bool:
        """Whether every stage that it asks for is in `folder`."""
        keys = self.keys
        return all(is_done(folder / stage.name, keys[stage.name]) for stage in self.stages)


@dataclass(frozen=True)
class CellOutcome:
    """What became of a cell; `error`, one readable line, is None where it is complete."""

    cell: Cell
    folder: Path
    error: str | None


@dataclass(frozen=True)
class Jobs:
    """How cells are run as jobs."""

    at_once: int | None = None
    """How many at a time; when None, one for each GPU of this machine or for every two cores, or what Slurm allows."""
    slurm: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of Slurm's jobs by the names that submitit has for them: `partition`, `timeout_min`, …"""


# Running


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    on: Where = "here",
    retry: bool = False,
    log: Logger = print,
    progress: bool = True,
    jobs: Jobs | None = None,
) -> list[CellOutcome]:
    """Run every cell in `out / cell.name` and return what became of each, in order.

    Under torchrun, where they run `here` with all processes, a failure ends them all: called again, the others go on.

    Args:
        cells: What to run; their names differ.
        out: Folder of all of them.
        on: `here` runs one after the other in this process; `local` as processes of this machine; `slurm` as jobs.
        retry: Try cells again that failed before with the same settings.
        log: Is given a line for whatever happens.
        progress: Show progress bars.
        jobs: How many at once, and what Slurm is asked for, where they are not run here.
    """
    _require_names(cells)
    log = rank_zero_log(log)
    known = on_main_process(lambda: {cell.name: _known(cell, out / cell.name, retry, log) for cell in cells})
    waiting = [cell for cell in cells if known[cell.name] is None]
    if on != "here" and world() > 1:
        raise UsageError(f"cells on {on!r} get processes of their own: start this without torchrun.")
    if on == "here":
        outcomes = {cell.name: _run_here(cell, out / cell.name, log, progress) for cell in waiting}
    elif waiting:
        from namm.experiments.sweeps.jobs import run_locally, run_on_slurm

        run_as_jobs = run_locally if on == "local" else run_on_slurm
        outcomes = run_as_jobs(waiting, out.resolve(), jobs or Jobs(), log)
    else:
        outcomes = {}
    return [known[cell.name] or outcomes[cell.name] for cell in cells]


def attempt(cell: Cell, folder: Path, *, log: Logger, progress: bool) -> str | None:
    """Run a cell; where it fails, keep the reason in its folder and return it. An interruption is no failure."""
    try:
        on_main_process(lambda: (folder / FAILURE).unlink(missing_ok=True) if folder.is_dir() else None)
        # A study is there to see what settings do, bad ones too: their verdicts stand beside their figures.
        run(cell.preset, folder, until=cell.until, log=log, progress=progress, force=True)
    except (Interrupted, BrokenPipeError):  # the latter: stdout was closed
        raise
    except Exception as error:
        message = in_one_line(error)
        # A fault of the moment or of the machine is not kept: the same cell may well succeed next time.
        of_files = isinstance(error, FolderInUseError | OSError) or isinstance(error.__cause__, OSError)
        if first_to_fail() and not (of_files or is_out_of_memory(error)):
            with suppress(OSError):  # of a folder that cannot be written; the message is reported anyway
                write_failure(folder, cell.key, message)
        if world() > 1:
            raise  # the other processes may be anywhere in the cell: nothing can be done together any more
        return message
    return None


def in_one_line(error: Exception) -> str:
    """What an exception says, and its kind where it is none of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NammError) else f"{type(error).__name__}: {text}"


def _known(cell: Cell, folder: Path, retry: bool, log: Logger) -> CellOutcome | None:
    """What is known of a cell before it is run; None where it is to be run."""
    try:
        if cell.is_complete(folder):
            log(f"{cell.name}: done before")
            return CellOutcome(cell, folder, None)
        if not retry and (before := read_failure(folder, cell.key)) is not None:
            log(f"{cell.name}: failed before; --retry tries it again")
            return CellOutcome(cell, folder, before)
    except NammError as error:  # a file in the folder cannot be read
        log(f"{cell.name}: failed: {in_one_line(error)}")
        return CellOutcome(cell, folder, in_one_line(error))
    return None


def _run_here(cell: Cell, folder: Path, log: Logger, progress: bool) -> CellOutcome:
    log(f"{cell.name}: running")
    error = attempt(cell, folder, log=lambda line: log(f"{cell.name}: {line}"), progress=progress)
    log(f"{cell.name}: {'done' if error is None else f'failed: {error}'}")
    return CellOutcome(cell, folder, error)


def _require_names(cells: Sequence[Cell]) -> None:
    """Refuse names that are taken twice or cannot be those of folders, and stages that do not exist."""
    names = [cell.name for cell in cells]
    for cell, name in zip(cells, names, strict=True):
        if names.count(name) > 1:
            raise UsageError(f"two cells are called {name!r}: each needs a folder of its own.")
        if name in ("", ".", "..", JOBS) or Path(name).name != name:
            raise UsageError(f"{name!r} cannot be the name of a cell: it is also that of its folder.")
        _ = cell.stages


# Sharing stages


def run_sharing(
    cells: Sequence[Cell],
    out: Path,
    *,
    on: Where,
    retry: bool,
    log: Logger,
    progress: bool = True,
    jobs: Jobs | None = None,
) -> list[CellOutcome]:
    """Run the cells as `run_cells` does; a stage that several of them have in common is not run by all.

    Here each cell is given what those before it have. Elsewhere, where cells run side by side, one of those with the
    same data draws them first.
    """
    _require_names(cells)

    def go(some: Sequence[Cell]) -> list[CellOutcome]:
        on_main_process(lambda: share(some, out))
        return run_cells(some, out, on=on, retry=retry, log=log, progress=progress, jobs=jobs)

    if on == "here":
        return [outcome for cell in cells for outcome in go([cell])]
    if first := first_of_each(cells, out, retry):
        log("first the data that cells have in common")
        go(first)
    return go(cells)


def share(cells: Sequence[Cell], out: Path) -> None:
    """Give each cell's folder in `out` the stages that some other run in `out` has for the same key."""
    available = complete_stages(out)
    for cell in cells:
        keys, folder = cell.keys, out / cell.name
        with suppress(RunFolderError, OSError):
            missing = [stage.name for stage in cell.stages if not _has(folder, stage.name, keys[stage.name])]
            given = {name: available[keys[name]] for name in missing if keys[name] in available}
            if not given:
                continue
            with owned(folder):
                run_claim(folder, cell.preset.experiment).take()
                moves = any((folder / name).exists() for name in given)
                for name, source in given.items():
                    put_stage(folder, name, partial(shutil.copytree, source, copy_function=_link))
            if moves:
                available = complete_stages(out)


def first_of_each(cells: Sequence[Cell], out: Path, retry: bool) -> list[Cell]:
    """Where several cells have the same data and none has drawn them yet, the first of them, up to its data.

    Cells that failed before and are not to be tried again are left out.
    """
    available = complete_stages(out)
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        if retry or not _failed(cell, out / cell.name):
            alike.setdefault(cell.keys["data"], []).append(cell)
    groups = (same for key, same in alike.items() if len(same) > 1 and key not in available)
    return [replace(same[0], until="data") for same in groups]


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


def _failed(cell: Cell, folder: Path) -> bool:
    try:
        return read_failure(folder, cell.key) is not None
    except RunFolderError:
        return True  # and is reported when the cell is run


def _has(run: Path, name: str, key: str) -> bool:
    """Whether a run has begun the stage of that key, or has a complete one set aside, which comes back by itself."""
    begun = (run / name).exists() and read_record(run / name).key == key
    return begun or any(is_done(folder, key) for folder in stages_aside(run, name))


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
