"""Results as people read them: a number in one form everywhere, and small tables in notebooks."""

import math
import re
from collections.abc import Iterable
from html import escape

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


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A titled table of names and values for `_repr_html_`; everything is escaped, numbers are for people."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(_cell(value))}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: object) -> str:
    return format_number(value) if value is None or isinstance(value, float) else str(value)
