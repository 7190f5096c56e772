"""The report's tables and curves as CSV files, in full precision, inside the page."""

import base64
import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from namm.report.contents import Contents, Row
from namm.report.figures.studies import Curve

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""What spreadsheets take for the beginning of a formula."""
PAIRS = {"mmd": ("mmd", "mmd_std"), "kid": ("kid", "kid_std")}
"""Values of a row that are a mean and a standard deviation."""


def csv_files(c: Contents, curves: Sequence[Curve]) -> dict[str, str]:
    """Every table of the page that has content, by name, as a data URI of a CSV file."""
    tables = {
        "changed": (("setting", f"preset {c.preset}", "here"), c.changed),
        "numbers": _table([_values(row) for row in c.rows]),
        "certificates": _table([{"row": name, **_flat(each)} for name, each in c.certificates.items()]),
        "cost": _table([{"side": side, **asdict(cost)} for side, costs in _sides(c).items() for cost in costs]),
        "tuning": _table(list((c.tuning or {}).get("trials", ()))),
        "stages": _table([asdict(stage) for stage in c.stages]),
        "distances": _columns({m.name: m.distances.astype(str).tolist() for m in c.methods}),
        "efficiency": _table([point for curve in curves for point in _points(curve)]),
        "training": _table([{"training": name, **line} for name, lines in c.trainings.items() for line in lines]),
    }
    return {name: _data_uri(csv_text(head, rows)) for name, (head, rows) in tables.items() if rows}


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file; numbers keep all their digits, and no text is a formula."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([_cell(name) for name in head])
    writer.writerows([_cell(value) for value in row] for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) and not _is_number(value) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _table(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Records as columns, in the order in which they first appear; what a record lacks is empty."""
    head = list(dict.fromkeys(name for record in records for name in record))
    return head, [[record.get(name, "") for name in head] for record in records]


def _columns(values: Mapping[str, Sequence[Any]]) -> tuple[list[str], list[tuple[Any, ...]]]:
    return list(values), list(zip_longest(*values.values(), fillvalue=""))


def _values(row: Row) -> dict[str, Any]:
    """A row of the evaluation with one number to a column; what was not measured is left out."""
    found: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name in PAIRS and value is not None:
            found |= dict(zip(PAIRS[name], value, strict=True))
        elif isinstance(value, Mapping):
            found |= {f"{name}_{key}": each for key, each in value.items()}
        elif value is not None:
            found[name] = value
    return found


def _flat(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a certificate's summary, without its notes."""
    return {name: value for name, value in certificate.items() if isinstance(value, int | float | str)}


def _sides(c: Contents) -> dict[str, Sequence[Any]]:
    return {"ours": c.ours, "baseline": c.baseline, "few": c.few, "repair": c.repair}


def _points(curve: Curve) -> list[dict[str, Any]]:
    columns = zip(curve.seconds.tolist(), curve.mean.tolist(), curve.std.tolist(), strict=True)
    return [{"method": curve.name, "seconds": s, "mean": mean, "std": std} for s, mean, std in columns]


def _data_uri(text: str) -> str:
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
