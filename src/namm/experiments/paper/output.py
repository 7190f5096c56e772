"""What an item shows: a table with a row for each thing compared and a column for each number, figures, sentences.

Each item has a function from the runs of one experiment to a `Part`; `show_all` joins those of all experiments. What
could not be measured is absent, a dash in the table, and a note says why.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from namm.experiments.engine.experiment import Reported
from namm.experiments.paper.measurements import FinishedRun
from namm.experiments.sweeps.cell import CellOutcome
from namm.formatting import format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Tables


@dataclass(frozen=True)
class OverSeeds:
    """One figure, measured once for each seed; one seed has no standard deviation."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.values)

    @property
    def std(self) -> float | None:
        """Over the seeds."""
        return stdev(self.values) if len(self.values) > 1 else None


Value = str | int | float | OverSeeds | None


def over_seeds(values: Sequence[float]) -> OverSeeds | None:
    """The values as one figure; none where there are none."""
    return OverSeeds(tuple(values)) if values else None


@dataclass(frozen=True)
class Table:
    """Rows of values under titles; `formats` are those of `format_number`, by title, for numbers."""

    formats: Mapping[str, str]
    rows: Sequence[Sequence[Value]]

    @property
    def titles(self) -> list[str]:
        """Titles of the columns."""
        return list(self.formats)

    def markdown(self) -> str:
        """The table in Markdown, for a file or a terminal."""
        formats = self.formats.values()
        texts = [[_text(value, spec) for value, spec in zip(row, formats, strict=True)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.titles, *texts, strict=True)]
        lines = [self.titles, ["-" * width for width in widths], *texts]
        padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in padded)

    def csv(self) -> str:
        """All digits; a column over seeds is followed by its standard deviation."""
        seeded = {k for row in self.rows for k, value in enumerate(row) if isinstance(value, OverSeeds)}

        def line(row: Sequence[Any], two: Callable[[Any], tuple[Any, Any]]) -> list[Any]:
            return [cell for k, value in enumerate(row) for cell in (two(value) if k in seeded else (value,))]

        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(line(self.titles, lambda title: (title, f"{title} std")))
        for row in self.rows:
            writer.writerow(line(row, lambda value: (value.mean, value.std) if value is not None else (None, None)))
        return text.getvalue()

    def plain(self) -> list[dict[str, Any]]:
        """For JSON: a mapping for each row."""
        return [{title: _plain(value) for title, value in zip(self.titles, row, strict=True)} for row in self.rows]


def _text(value: Value, spec: str) -> str:
    if isinstance(value, OverSeeds):
        std = "" if value.std is None else f" ± {format_number(value.std, spec)}"
        return f"{format_number(value.mean, spec)}{std}"
    return value if isinstance(value, str) else format_number(value, spec)


def _plain(value: Value) -> Any:
    if isinstance(value, OverSeeds):
        return {"mean": value.mean, "std": value.std, "values": list(value.values)}
    return value


# Items


@dataclass(frozen=True)
class Runs:
    """All runs of one experiment that an item asked for, those that failed too."""

    experiment: str
    outcomes: Sequence[CellOutcome]

    @cached_property
    def complete(self) -> list[FinishedRun]:
        """Those that did not fail."""
        return [FinishedRun(outcome) for outcome in self.outcomes if outcome.error is None]

    @property
    def reported(self) -> Reported:
        """What the paper reports for the experiment."""
        return self.outcomes[0].cell.preset.reported


@dataclass(frozen=True)
class Part:
    """What an item shows of one experiment.

    Attributes:
        formats: Of the table's columns, by title.
        rows: Of the table.
        figure: If there is anything to draw.
        drawn: The numbers that the figure shows.
        findings: What the numbers say, a sentence each.
        notes: What is missing, and why.
    """

    formats: Mapping[str, str]
    rows: Sequence[Sequence[Value]]
    figure: "Figure | None" = None
    drawn: Any = None
    findings: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ItemOutput:
    """What an item shows of all experiments; figures, and the numbers in them, by the name of the figure's file."""

    table: Table
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    drawn: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[str] = ()
    notes: Sequence[str] = ()


def show_all(name: str, show: Callable[[Runs], Part], outcomes: Sequence[CellOutcome]) -> ItemOutput:
    """What `show` makes of each experiment's runs, as one table and a figure for each; KID's absence is noted."""
    experiments = dict.fromkeys(outcome.cell.preset.experiment for outcome in outcomes)
    parts = {
        each: show(Runs(each, [outcome for outcome in outcomes if outcome.cell.preset.experiment == each]))
        for each in experiments
    }
    formats = {"experiment": "", **next(iter(parts.values())).formats}
    table = Table(formats, [[each, *row] for each, part in parts.items() for row in part.rows])
    notes = list(dict.fromkeys(note for part in parts.values() for note in part.notes))
    scored = [row for row in table.plain() if "KID" in row and row["seeds"]]
    with_kid = {row["experiment"] for row in scored if row["KID"] is not None}
    lacking = [each for each in dict.fromkeys(row["experiment"] for row in scored) if each not in with_kid]
    if lacking:
        notes.append(f"KID was not measured for {', '.join(lacking)}: evaluate.kid_subsets is 0 in this preset.")
    return ItemOutput(
        table,
        {f"{name}-{each}": part.figure for each, part in parts.items() if part.figure is not None},
        {f"{name}-{each}": part.drawn for each, part in parts.items() if part.figure is not None},
        [finding for part in parts.values() for finding in part.findings],
        notes,
    )
