"""`namm trust`: show the Python code of a run's rule, and allow it to be run."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from namm.cli.options import parse
from namm.experiments.engine.folder import SETTINGS, find_run
from namm.experiments.own import OwnData


@dataclass(frozen=True)
class Trust:
    """Print the Python code of the rule of a run, and record it as code that may be run on your account.

    Nothing is run now; code that changes later is refused again.
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder of the run, its name in `runs`, or a file of settings."""


def main(arguments: list[str]) -> None:
    """Show a run's rule and record it as trusted; runs none of it."""
    name = parse(Trust, arguments, "namm trust").run

    from namm.experiments.engine.rule_source import locate
    from namm.experiments.engine.settings_file import read_yaml
    from namm.experiments.engine.user_rule import describe, record_path, record_trusted

    data = read_yaml(Path(name) if Path(name).is_file() else find_run(name) / SETTINGS).settings.data
    if not isinstance(data, OwnData) or (source := locate(data.constraint, data.folder)).is_ours:
        print(f"the rule of {shlex.quote(name)} is one of namm's own: there is nothing to allow.")
        return
    for file in source.files.values():
        if file.content is not None:
            print(f"# {_visible(str(file.path))}")
            print(_visible(file.content.decode(errors="replace")) if file.is_source else "(compiled code)", end="\n\n")
    if not source.files:
        print(describe(source))
    record_trusted(source, data.constraint)
    print(f"{data.constraint} is recorded in {record_path()}: commands that take this run may run it from now on.")


def _visible(text: str) -> str:
    """`text` without characters that a terminal obeys, or that reorder what is read."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
