"""`namm report`: a run as one HTML file."""

import shlex
import webbrowser
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from namm.cli.options import RunName, parse
from namm.experiments.engine.folder import find_run


@dataclass(frozen=True)
class Report:
    """Write what a run found as one HTML file that needs nothing else.

    It is RUN/report/report.html, or RUN/partial-report.html while stages are missing. With --trust, a rule of the run's
    that you have not run before is run where its pictures are missing: it is Python code.
    """

    run: RunName
    open: Annotated[bool, FlagCreatePairsOff] = False
    """Show it in the browser."""


def main(arguments: list[str]) -> None:
    """Write the report of a run and print where it is."""
    options = parse(Report, arguments, "namm report")
    run = find_run(options.run)

    from namm.experiments.engine.stages.report import PARTIAL, write_report

    path = write_report(run)
    if path.name == PARTIAL:
        print(f"the run is not complete (`namm status {shlex.quote(str(run))}`), and its report is partial:")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    print(path)
