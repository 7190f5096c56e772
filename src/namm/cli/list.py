"""`namm list`: the runs in a folder."""

from pathlib import Path

from namm.cli.options import HELP, refuse_more
from namm.errors import NammError, UsageError

USAGE = "namm list [DIR]"


def main(arguments: list[str]) -> int:
    """Show the runs in a folder, `runs` by default."""
    if set(arguments) & set(HELP):
        print(f"usage: {USAGE}\n\nShow the runs in a folder, `runs` by default: experiment, preset, stages done, date.")
        return 0
    refuse_more(arguments[1:], USAGE)
    folder = Path(arguments[0] if arguments else "runs")
    if not folder.is_dir():
        if not arguments:
            print("there are no runs here yet; `namm run NAME` makes one in the folder runs.")
            return 0
        raise UsageError(f"there is no folder {folder}.")

    from namm.experiments.engine.folder import RUN

    runs = sorted(p.parent for p in [*folder.glob(f"*/{RUN}"), *folder.glob(RUN)])
    if not runs:
        print(f"there are no runs in {folder}.")
        return 0
    _show(runs)
    return 0


def _show(runs: list[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "experiment", "preset", "stages done", "last change")
    for run in runs:
        table.add_row(str(run), *_row(run))
    Console().print(table)


def _row(run: Path) -> tuple[str, str, str, str]:
    from namm.experiments.engine.status import describe_run

    try:
        about = describe_run(run)
    except NammError as error:
        return "", "", f"unreadable: {error}", ""
    preset = about.preset + (", changed" if about.changed else "")
    return about.experiment, preset, " ".join(about.done) or "none", about.date[:16].replace("T", " ")
