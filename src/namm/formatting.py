"""Results as people read them: a number in one form everywhere, and tables for the terminal and for notebooks."""

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Column
    from rich.text import Text

ABSENT = "–"
"""What stands where nothing was measured."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_number(value: float | None, spec: str = ".3g") -> str:
    """Format a number for people: 0.0123, 0.200, 1234, 4.68·10⁻⁸; a dash for None.

    Args:
        value: the number.
        spec: `.Ng` gives N significant digits, trailing zeros kept; any other is that of Python's `format`.
    """
    if value is None:
        return ABSENT
    significant = re.fullmatch(r"\.([1-9]\d*)g", spec)
    if not significant or not math.isfinite(value):
        return f"{value:{spec}}"
    if value == 0:
        return "0"
    places = int(significant[1]) - 1
    mantissa, exponent = f"{value:.{places}e}".split("e")
    power = int(exponent)
    if -3 <= power < 4:
        return f"{float(f'{mantissa}e{power}'):.{max(0, places - power)}f}"
    return f"{mantissa}·10{str(power).translate(SUPERSCRIPTS)}"


def format_estimate(mean: float, error: float, spec: str = ".3g", error_spec: str = ".2g") -> str:
    """Format a mean and its error or deviation: 0.0123 ± 0.0020."""
    return f"{format_number(mean, spec)} ± {format_number(error, error_spec)}"


def format_duration(seconds: float) -> str:
    """Format a time for people, no finer than it can be known: 40 s, 2 min, 1 h 20 min, 3 days."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s" if seconds < 10 else f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(5 * round(minutes / 5), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{round(seconds / 86400)} days"


SHOWN = {"mmd": "√MMD²", "distance": "ℓ"}
"""Words in the names of results, and what people read."""


def shown_name(name: str) -> str:
    """The name of a result as people read it: `mmd_ours` is √MMD² ours."""
    return " ".join(SHOWN.get(word, word) for word in name.split("_"))


def print_table(
    columns: Sequence["str | Column"], rows: Iterable[Sequence["str | Text"]], *, title: str = "", width: int = 0
) -> None:
    """Print a table on the terminal; `width` columns wide where that is given.

    Strings are printed as they are: names of runs and files may hold what rich takes for markup, such as `[red]`.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    def literal(cell: str | Text) -> Text:
        return Text(cell) if isinstance(cell, str) else cell

    headers = (each if isinstance(each, Column) else Column(literal(each)) for each in columns)
    table = Table(*headers, title=Text(title, "table.title") if title else None, title_justify="left")
    for row in rows:
        table.add_row(*map(literal, row))
    Console(width=width or None).print(table)


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A titled table of names and values for `_repr_html_`; everything is escaped, numbers are for people."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(_cell(value))}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: object) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)
