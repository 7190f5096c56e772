"""What the commands share in reading their arguments. Imports neither torch nor tyro until it must.

Commands whose options depend on a name are read in two passes: the name and the command's own options are picked out of
the list first, and what is left goes to tyro, which knows every field of the settings of that name.
"""

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

from namm.errors import UsageError
from namm.experiments.engine.processes import is_main, let_speak

T = TypeVar("T")

HELP = ("-h", "--help")


def pick(arguments: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Values of the options `--name VALUE` or `--name=VALUE` for the given names, and all other arguments."""
    found: dict[str, str] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        option, equals, value = argument.partition("=")
        if option.removeprefix("--") not in names or not option.startswith("--"):
            rest.append(argument)
            continue
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise UsageError(f"{option} needs a value: `{option} VALUE`.")
            value = queue.pop(0)
        if option.removeprefix("--") in found:
            raise UsageError(f"{option} is given twice.")
        found[option.removeprefix("--")] = value
    return found, rest


def take_flag(arguments: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Whether `flag`, an option without a value such as `--force`, is given, and all other arguments."""
    return flag in arguments, [argument for argument in arguments if argument != flag]


def take_name(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument, where it is not an option, and the others."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return None, arguments


def refuse_near_misses(arguments: Sequence[str], names: Sequence[str]) -> None:
    """Refuse an option that is almost one of `names`, where all others have a dot in them."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if not option.startswith("--") or "." in option or option in HELP:
            continue
        close = difflib.get_close_matches(option.removeprefix("--"), names, n=1)
        hint = f" Did you mean --{close[0]}?" if close else " Settings are named like --map.train.budget."
        raise UsageError(f"there is no option {option}.{hint}")


def refuse_more(arguments: Sequence[str], usage: str) -> None:
    """Refuse anything where nothing more is expected."""
    if arguments:
        raise UsageError(f"{arguments[0]!r} is not understood here. Usage: {usage}")


def parse(
    kind: type[T], arguments: Sequence[str], *, prog: str, description: str = "", usage: str = "", **options: Any
) -> T | int:
    """An object of `kind` from the arguments; an exit code where they were answered here (help, mistakes).

    `usage`, what tyro does not know of, precedes its help.
    """
    import tyro

    if usage and set(arguments) & set(HELP):
        print(usage + "\n")
    try:
        return tyro.cli(
            kind,
            args=list(arguments),
            prog=prog,
            description=description or None,
            console_outputs=is_main(),
            **options,
        )
    except SystemExit as exit_:
        if not is_main():
            let_speak()
        return exit_.code if isinstance(exit_.code, int) else 1
