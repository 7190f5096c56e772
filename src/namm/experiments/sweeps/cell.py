"""Many runs of one study: each is a cell, a normal run in a folder of its own.

A cell that is complete is not run again and one that was interrupted goes on. One that raises is reported, its message
is kept in its folder, and the others stand; it is tried again when that is asked for, or when its settings change.

Imports no torch: what there is to do is known before anything is started.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from namm.errors import FolderInUseError, Interrupted, NammError, UsageError, is_out_of_memory
from namm.experiments.engine.folder import forget_failure, is_done, read_failure, write_failure
from namm.experiments.engine.processes import alone, first_to_fail, world
from namm.experiments.engine.run import Tell, of_main, run
from namm.experiments.engine.stages import MAIN_LINE, stage_keys, stages_until
from namm.experiments.presets import Preset

Where = Literal["here", "local", "slurm"]
JOBS = "jobs"
"""Folder of the jobs' logs, beside the cells' own."""


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        name: Also the name of its folder.
        preset: Which experiment, with its settings.
        until: The last stage; the end of the main line if there is none.
    """

    name: str
    preset: Preset
    until: str | None = None

    @property
    def last(self) -> str:
        """The name of its last stage."""
        return self.until or MAIN_LINE

    @property
    def key(self) -> str:
        """That of its last stage: a failure is remembered for these settings alone."""
        return stage_keys(self.preset.settings)[self.last]

    def is_complete(self, folder: Path) -> bool:
        """Whether every stage that it asks for is in `folder`."""
        settings = self.preset.settings
        keys = stage_keys(settings)
        return all(is_done(folder / stage.name, keys[stage.name]) for stage in stages_until(self.until, settings))


@dataclass(frozen=True)
class CellOutcome:
    """What became of a cell; `error`, one readable line, is None where it is complete."""

    cell: Cell
    folder: Path
    error: str | None


@dataclass(frozen=True)
class Jobs:
    """How cells are run as jobs.

    Attributes:
        at_once: How many at a time: on this machine one for each GPU by default, or for every two cores; on Slurm as
            many as it allows.
        slurm: Parameters of Slurm's jobs by the names that submitit has for them: `partition`, `timeout_min`, …
    """

    at_once: int | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    on: Where = "here",
    retry: bool = False,
    tell: Tell = print,
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
        tell: Is given a line for whatever happens.
        progress: Show progress bars.
        jobs: How many at once, and what Slurm is asked for, where they are not run here.
    """
    require_names(cells)
    for cell in cells:
        stages_until(cell.until, cell.preset.settings)
    tell = of_main(tell)
    standing = alone(lambda: {cell.name: _standing(cell, out / cell.name, retry, tell) for cell in cells})
    waiting = [cell for cell in cells if standing[cell.name] is None]
    if on == "here":
        found = {cell.name: _run_here(cell, out / cell.name, tell, progress) for cell in waiting}
    else:
        found = _run_as_jobs(waiting, out, on, jobs or Jobs(), tell)
    known = {name: outcome for name, outcome in standing.items() if outcome is not None} | found
    return [known[cell.name] for cell in cells]


def attempt(cell: Cell, folder: Path, *, tell: Tell, progress: bool) -> str | None:
    """Run a cell; where it fails, keep the reason in its folder and return it. An interruption is no failure."""
    try:
        alone(lambda: forget_failure(folder))
        # A study is there to see what settings do, bad ones too: their verdicts stand beside their figures.
        run(cell.preset, folder, until=cell.until, tell=tell, progress=progress, force=True)
    except (Interrupted, BrokenPipeError):  # the latter: nobody reads what is told
        raise
    except Exception as error:
        message = in_one_line(error)
        if first_to_fail() and not _may_pass(error):
            with suppress(OSError):  # of a folder that cannot be written; the message is reported anyway
                write_failure(folder, cell.key, message)
        if world() > 1:
            raise  # the other processes may be anywhere in the cell: nothing can be done together any more
        return message
    return None


def _may_pass(error: Exception) -> bool:
    """Whether the fault is that of the moment or of the machine, so that the same cell may well succeed next time."""
    of_files = isinstance(error, FolderInUseError | OSError) or isinstance(error.__cause__, OSError)
    return of_files or is_out_of_memory(error)


def in_one_line(error: Exception) -> str:
    """What an exception says, and its kind where it is none of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NammError) else f"{type(error).__name__}: {text}"


def _standing(cell: Cell, folder: Path, retry: bool, tell: Tell) -> CellOutcome | None:
    """What is known of a cell before it is run; None where it is to be run."""
    try:
        if cell.is_complete(folder):
            tell(f"{cell.name}: done before")
            return CellOutcome(cell, folder, None)
        if not retry and (before := read_failure(folder, cell.key)) is not None:
            tell(f"{cell.name}: failed before; --retry tries it again")
            return CellOutcome(cell, folder, before)
    except NammError as error:  # a file in the folder cannot be read
        tell(f"{cell.name}: failed: {in_one_line(error)}")
        return CellOutcome(cell, folder, in_one_line(error))
    return None


def _run_here(cell: Cell, folder: Path, tell: Tell, progress: bool) -> CellOutcome:
    tell(f"{cell.name}: running")
    error = attempt(cell, folder, tell=lambda line: tell(f"{cell.name}: {line}"), progress=progress)
    tell(f"{cell.name}: {'done' if error is None else f'failed: {error}'}")
    return CellOutcome(cell, folder, error)


def _run_as_jobs(
    cells: Sequence[Cell], out: Path, on: Literal["local", "slurm"], jobs: Jobs, tell: Tell
) -> dict[str, CellOutcome]:
    if world() > 1:
        raise UsageError(f"cells on {on!r} get processes of their own: start this without torchrun.")
    from namm.experiments.sweeps import jobs as machinery

    run_them = machinery.run_locally if on == "local" else machinery.run_on_slurm
    return run_them(cells, out.resolve(), jobs, tell) if cells else {}


def require_names(cells: Sequence[Cell]) -> None:
    """Refuse names that are taken twice or cannot be those of folders."""
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two cells are called {name!r}: each needs a folder of its own.")
        if name in ("", ".", "..", JOBS) or Path(name).name != name:
            raise UsageError(f"{name!r} cannot be the name of a cell: it is also that of its folder.")
