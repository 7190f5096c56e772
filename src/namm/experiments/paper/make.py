"""Making an item: run what is missing, measure what no stage does, write tables and figures."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from namm.errors import DataError, Interrupted, RunFolderError, UsageError
from namm.experiments.count import COUNTER, CountData, make_counter
from namm.experiments.engine.processes import world
from namm.experiments.engine.run import Tell
from namm.experiments.engine.stages import stages_until
from namm.experiments.paper.items import Item
from namm.experiments.paper.output import Shown, write
from namm.experiments.paper.runs_needed import Base
from namm.experiments.sweeps.cell import Cell, CellOutcome, Jobs, Where, in_one_line
from namm.experiments.sweeps.link_stages import run_sharing


@dataclass(frozen=True)
class Made:
    """An item as it was made: what became of its cells, what it shows, and the files."""

    outcomes: list[CellOutcome]
    shown: Shown
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
    tell: Tell = print,
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
        tell: Is given a line for whatever happens.
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
        _require_counter(cell, out, tell, progress)
    outcomes = run_sharing(cells, out, on=on, retry=retry, tell=tell, progress=progress, jobs=jobs)
    if item.measure is not None:
        outcomes = [_measured(item, outcome, tell, progress) for outcome in outcomes]
    with look("light"):
        shown = item.show(outcomes)
        files = write(item, outcomes, shown, out / item.name)
    return Made(outcomes, shown, files)


def _measured(item: Item, outcome: CellOutcome, tell: Tell, progress: bool) -> CellOutcome:
    """The outcome after measuring; a failure there is one of the cell."""
    if outcome.error is not None or item.measure is None:
        return outcome
    tell(f"{outcome.cell.name}: measuring for {item.name}")
    try:
        item.measure(outcome, progress)
    except Interrupted:
        raise
    except Exception as error:
        tell(f"{outcome.cell.name}: failed: {in_one_line(error)}")
        return replace(outcome, error=in_one_line(error))
    return outcome


def _with_counter(cell: Cell, out: Path) -> Cell:
    """The cell with the network in `out`, which all cells share, where it needs one that counts and names none."""
    data = cell.preset.settings.data
    if not isinstance(data, CountData) or data.counter:
        return cell
    settings = replace(cell.preset.settings, data=replace(data, counter=str((out / COUNTER).resolve())))
    return replace(cell, preset=replace(cell.preset, settings=settings))


def _require_counter(cell: Cell, out: Path, tell: Tell, progress: bool) -> None:
    """Train the network of all cells, once, where this one needs it."""
    data, path = cell.preset.settings.data, (out / COUNTER).resolve()
    if isinstance(data, CountData) and data.counter == str(path) and not path.exists():
        tell(f"training the network that counts galaxies, {path}")
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
