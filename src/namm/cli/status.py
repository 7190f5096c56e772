"""`namm status`: the stages of a run, what state each is in and what it found."""

from dataclasses import dataclass

from rich.text import Text

from namm.cli.options import RunName, parse
from namm.experiments.engine.folder import describe_run, find_run, stage_states
from namm.formatting import format_number, print_table

COLOURS = {"complete": "green", "partial": "yellow", "stale": "magenta", "aside": "dim", "not there yet": "dim"}


@dataclass(frozen=True)
class Status:
    """Show the stages of a run.

    - complete: done, with the settings in settings.yaml
    - partial: begun; `namm run` goes on with it
    - stale: made with other settings than settings.yaml has now
    - aside: made with earlier settings and kept; it comes back when they do
    - not there yet: not begun
    """

    run: RunName


def main(arguments: list[str]) -> None:
    """Show the stages of a run."""
    run = find_run(parse(Status, arguments, "namm status").run)
    about = describe_run(run)
    title = f"{run}: {about.experiment}, preset {about.preset}{', changed' if about.changed else ''}"
    rows = (
        (
            stage.folder,
            Text(stage.state, COLOURS[stage.state]),
            "" if stage.seconds is None else format_number(stage.seconds, ".1f"),
            stage.results,
        )
        for stage in stage_states(run)
    )
    print_table(["stage", "state", "seconds", "results"], rows, title=title)
