"""`namm report`: a run as one HTML file."""

import shlex

from namm.cli.options import HELP, refuse_more
from namm.errors import UsageError
from namm.experiments.engine.folder import find_run

USAGE = "namm report RUN [--open] [--trust]"


def main(arguments: list[str]) -> int:
    """Write the report of a run and print where it is."""
    if set(arguments) & set(HELP) or not arguments:
        print(
            f"usage: {USAGE}\n\nWrite what a run found (its folder, or its name in `runs`) as one HTML file that needs "
            "nothing else:\nRUN/report/report.html, or RUN/partial-report.html while stages are missing.\n\n"
            "  --open   show it in the browser\n"
            "  --trust  run a rule of the run's that you have not run before, where its pictures are missing"
        )
        return 0 if arguments else 2
    rest = [argument for argument in arguments if argument != "--open"]
    if not rest:
        raise UsageError(f"which run? Usage: {USAGE}")
    refuse_more(rest[1:], USAGE)
    run = find_run(rest[0])

    from namm.experiments.engine.stages.report import PARTIAL, write_report

    path = write_report(run)
    if path.name == PARTIAL:
        print(f"the run is not complete (`namm status {shlex.quote(str(run))}`), and its report is partial:")
    if "--open" in arguments:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    print(path)
    return 0
