"""What an item shows, as files: a table as Markdown, CSV and JSON, figures as PNG and PDF, and a caption.

What could not be measured is absent, a dash in the table, and a note says why.
"""

import csv
import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from namm._version import __version__
from namm.experiments.engine.folder import RECORD, now, read_record
from namm.experiments.paper.items import Item
from namm.experiments.paper.runs_needed import seed_of
from namm.experiments.sweeps.cell import CellOutcome
from namm.files import write_atomically, write_json
from namm.formatting import format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf")
NOT_THE_PAPERS = (
    "The paper's numbers are those of its own sizes, networks and epochs, and √MMD² and FID depend on the numbers of "
    "images: beside this preset they are for orientation."
)


@dataclass(frozen=True)
class OverSeeds:
    """One figure, measured once for each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.values)

    @property
    def std(self) -> float | None:
        """Over the seeds; one seed has none."""
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
        formats = list(self.formats.values())
        texts = [[_text(value, spec) for value, spec in zip(row, formats, strict=True)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.titles, *texts, strict=True)]
        lines = [self.titles, ["-" * width for width in widths], *texts]
        return "\n".join(
            "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )

    def csv(self) -> str:
        """All digits; a column over seeds is followed by its standard deviation."""
        seeded = [any(isinstance(row[k], OverSeeds) for row in self.rows) for k in range(len(self.titles))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        titles = ([title, f"{title} std"] if two else [title] for title, two in zip(self.titles, seeded, strict=True))
        writer.writerow([each for pair in titles for each in pair])
        for row in self.rows:
            cells = (_two(value) if two else [value] for value, two in zip(row, seeded, strict=True))
            writer.writerow([each for pair in cells for each in pair])
        return text.getvalue()

    def plain(self) -> list[dict[str, Any]]:
        """For JSON: a mapping for each row."""
        return [{title: _plain(value) for title, value in zip(self.titles, row, strict=True)} for row in self.rows]


@dataclass(frozen=True)
class Shown:
    """An item's content.

    Attributes:
        table: its numbers; those behind the pictures, where it is a figure.
        figures: by the name of their file.
        drawn: the numbers that the figures show, by the same name.
        words: what the numbers say, a sentence each.
        notes: what is missing, and why.
    """

    table: Table
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    drawn: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    notes: Sequence[str] = ()


def write(item: Item, outcomes: Sequence[CellOutcome], shown: Shown, folder: Path) -> list[Path]:
    """Write everything into `folder` and return the files."""
    from namm.report.figures import save

    about = provenance(outcomes)
    notes = [*failures(outcomes), *shown.notes]
    said = caption(item, about, notes)
    table = shown.table.markdown()
    page = [f"# {item.name}: {item.shows}", table, *_bullets(shown.words), said]
    files = {
        "md": "\n\n".join(part.rstrip("\n") for part in page) + "\n",
        "csv": shown.table.csv(),
        "caption.txt": said,
    }
    for suffix, text in files.items():
        write_atomically(folder / f"{item.name}.{suffix}", text)
    content = {"item": item.name, "shows": item.shows, "rows": shown.table.plain(), "drawn": shown.drawn}
    write_json(folder / f"{item.name}.json", content | {"words": list(shown.words), "notes": notes, "made of": about})
    pictures = [folder / f"{name}.{suffix}" for name in shown.figures for suffix in FORMATS]
    for path in pictures:
        save(shown.figures[path.stem], path)
    return [folder / f"{item.name}.{suffix}" for suffix in (*files, "json")] + pictures


def failures(outcomes: Sequence[CellOutcome]) -> list[str]:
    """Which cells are missing, and why."""
    return [f"{outcome.cell.name} is missing: {outcome.error}" for outcome in outcomes if outcome.error is not None]


def provenance(outcomes: Sequence[CellOutcome]) -> dict[str, Any]:
    """What was run, with what."""
    cells = [outcome.cell for outcome in outcomes]
    return {
        "preset": sorted({cell.preset.name for cell in cells}),
        "experiments": list(dict.fromkeys(cell.preset.experiment for cell in cells)),
        "seeds": sorted({seed_of(cell) for cell in cells}),
        "cells": {outcome.cell.name: "complete" if outcome.error is None else "missing" for outcome in outcomes},
        "runs made by namm": sorted(set().union(*(_versions(outcome.folder) for outcome in outcomes))),
        "shown by": f"namm {__version__}, torch {version('torch')}, Python {platform.python_version()}",
        "shown (UTC)": now(),
    }


def caption(item: Item, about: Mapping[str, Any], notes: Sequence[str]) -> str:
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


def _versions(run: Path) -> set[str]:
    return {read_record(path.parent).version for path in run.glob(f"*/{RECORD}")}


def _bullets(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _text(value: Value, spec: str) -> str:
    if isinstance(value, OverSeeds):
        std = "" if value.std is None else f" ± {format_number(value.std, spec)}"
        return f"{format_number(value.mean, spec)}{std}"
    return value if isinstance(value, str) else format_number(value, spec)


def _two(value: Value) -> list[Value]:
    return [value.mean, value.std] if isinstance(value, OverSeeds) else [value, None]


def _plain(value: Value) -> Any:
    if isinstance(value, OverSeeds):
        return {"mean": value.mean, "std": value.std, "values": list(value.values)}
    return value
