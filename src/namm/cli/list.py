"""`namm list`: the runs in a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from namm.cli.options import parse
from namm.errors import NammError, UsageError
from namm.experiments.engine.folder import RUN, describe_run
from namm.formatting import print_table


@dataclass(frozen=True)
class List:
    """Show the runs in a folder: experiment, preset, stages done, date."""

    folder: Annotated[Positional[Path], arg(metavar="DIR")] = Path("runs")
    """The folder."""


def main(arguments: list[str]) -> None:
    """Show the runs in a folder."""
    folder = parse(List, arguments, "namm list").folder
    if not folder.is_dir():
        if arguments:
            raise UsageError(f"there is no folder {folder}.")
        print("there are no runs here yet; `namm run NAME` makes one in the folder runs.")
        return
    runs = sorted(path.parent for path in [*folder.glob(f"*/{RUN}"), *folder.glob(RUN)])
    if not runs:
        print(f"there are no runs in {folder}.")
        return
    print_table(["run", "experiment", "preset", "stages done", "last change"], map(_row, runs))


def _row(run: Path) -> tuple[str, ...]:
    try:
        about = describe_run(run)
    except NammError as error:
        return str(run), "", "", f"unreadable: {error}", ""
    preset = about.preset + (", changed" if about.changed else "")
    return str(run), about.experiment, preset, " ".join(about.done) or "none", about.date[:16].replace("T", " ")
