"""`namm trust`: show the Python code of a run's rule, and allow it to be run."""

import shlex
from pathlib import Path

from namm.cli.options import HELP, refuse_more
from namm.experiments.engine.folder import find_run
from namm.experiments.own import OwnData

USAGE = "namm trust RUN"


def main(arguments: list[str]) -> int:
    """Show a run's rule and record it as trusted; runs none of it."""
    if set(arguments) & set(HELP) or not arguments:
        print(
            f"usage: {USAGE}\n\nPrint the Python code of the rule of a run (its folder, its name in `runs`, or a file "
            "of settings), and\nrecord it as code that may be run on your account. Nothing is run now; code that "
            "changes later is refused again."
        )
        return 0 if arguments else 2
    refuse_more(arguments[1:], USAGE)

    from namm.experiments.engine.folder import SETTINGS
    from namm.experiments.engine.settings_file import read_yaml

    given = Path(arguments[0])
    data = read_yaml(given if given.is_file() else find_run(arguments[0]) / SETTINGS).settings.data
    if not isinstance(data, OwnData):
        print(f"the rule of {shlex.quote(arguments[0])} is one of namm's own: there is nothing to allow.")
        return 0
    _allow(data)
    return 0


def _allow(data: OwnData) -> None:
    from namm.experiments.engine.rule_source import locate
    from namm.experiments.engine.trust import describe, record, record_path

    source = locate(data.constraint, data.folder)
    for file in source.files.values():
        if file.content is not None:
            print(f"# {_visible(str(file.path))}")
            print(_visible(file.content.decode(errors="replace")) if file.is_source else "(compiled code)", end="\n\n")
    if not source.files:
        print(describe(source))
    record(source, data.constraint)
    print(f"{data.constraint} is recorded in {record_path()}: commands that take this run may run it from now on.")


def _visible(text: str) -> str:
    """`text` without characters that a terminal obeys, or that reorder what is read."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
