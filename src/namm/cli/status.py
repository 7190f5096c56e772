"""`namm status`: the stages of a run, what state each is in and what it found."""

from pathlib import Path

from namm.cli.options import HELP, refuse_more
from namm.experiments.engine.folder import find_run

USAGE = "namm status RUN"
COLOURS = {"complete": "green", "partial": "yellow", "stale": "magenta", "aside": "dim", "not there yet": "dim"}


def main(arguments: list[str]) -> int:
    """Show the stages of a run."""
    if set(arguments) & set(HELP) or not arguments:
        print(
            f"usage: {USAGE}\n\nShow the stages of a run (its folder, or its name in `runs`).\n\n"
            "  complete       done, with the settings in settings.yaml\n"
            "  partial        begun; `namm run` goes on with it\n"
            "  stale          made with other settings than settings.yaml has now\n"
            "  aside          made with earlier settings and kept; it comes back when they do\n"
            "  not there yet  not begun"
        )
        return 0 if arguments else 2
    refuse_more(arguments[1:], USAGE)
    _show(find_run(arguments[0]))
    return 0


def _show(run: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from namm.experiments.engine.status import describe_run, stage_states

    about = describe_run(run)
    title = f"{run}: {about.experiment}, preset {about.preset}{', changed' if about.changed else ''}"
    table = Table("stage", "state", "seconds", "results", title=title, title_justify="left")
    for row in stage_states(run):
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        table.add_row(row.folder, f"[{COLOURS[row.state]}]{row.state}[/]", seconds, row.results)
    Console().print(table)
