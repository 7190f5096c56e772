"""The short help of every command, which fits a screen: how it is called, what it does, a line for each option.

`namm COMMAND --help` prints it; `--help-all` goes on with everything that tyro knows of the options. What an option
does is the first sentence of its field's docstring, so that nothing is said twice.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

WIDTH = 100
"""Columns of a help text."""
NAMES = 34
"""Columns of the longest name of an option that what it does stands beside."""
ALL = "--help-all says more of each option"


class Option(NamedTuple):
    """An option as a person types it, what it does, and its default as text; empty where it has none."""

    name: str
    written: str
    about: str
    default: str

    def row(self) -> tuple[str, str]:
        """Both columns of the help."""
        return self.written, self.about + (f" [{self.default}]" if self.default else "")


def format_usage(synopsis: str, about: str, options: Mapping[str, str] | None = None) -> str:
    """A help text: how a command is called, what it does, and its options, wrapped and in two columns."""
    calls = "\n".join(f"{'       ' if k else 'usage: '}{line}" for k, line in enumerate(synopsis.split("\n")))
    lines = (textwrap.fill(line, WIDTH) for line in about.split("\n"))
    text = "\n\n".join(lines).replace("\n\n- ", "\n- ")
    return "\n\n".join(filter(None, [calls, text, two_columns((options or {}).items())]))


def two_columns(rows: Iterable[tuple[str, str]]) -> str:
    """Names, and beside them what they mean; a name that is too long has a line to itself."""
    listed = list(rows)
    margin = 4 + min(NAMES, max((len(name) for name, _ in listed), default=0))
    lines = []
    for name, text in listed:
        first = f"  {name}".ljust(margin)
        if len(first) > margin:
            lines.append(first)
            first = " " * margin
        lines.append(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * margin) or first)
    return "\n".join(lines)


def options_help(kind: type, prog: str, about: str = "", default: Any = None) -> str:
    """The help of a command whose options are the fields of a dataclass; its docstring says what the command does."""
    listed = list_options(kind, default)
    needed = [each.written for each in listed if not each.written.startswith("-")]
    synopsis = " ".join([prog, *needed, "[options]"])
    return format_usage(synopsis, about or paragraphs(kind), dict(each.row() for each in listed)) + f"\n\n{ALL}"


def paragraphs(kind: type) -> str:
    """The docstring of a class, a paragraph or an item of a list to a line."""
    blocks = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    return "\n".join(each if each.startswith("- ") else " ".join(each.split()) for each in blocks)


def list_options(kind: type, default: Any = None) -> list[Option]:
    """The fields of a dataclass of options, in order, with the defaults of `default` where that is given."""
    hints, docs = get_type_hints(kind, include_extras=True), field_docs(kind)
    listed = []
    for each in fields(kind):
        hint, notes = _bare(hints[each.name])
        said = {name: value for note in notes for name, value in getattr(note, "__dict__", {}).items() if value}
        value = _default(each) if default is None else getattr(default, each.name)
        if is_dataclass(value):  # settings of their own, which --help-all lists
            continue
        option = f"--{each.name.replace('_', '-')}"
        if tyro.conf.Positional in get_args(Annotated[int, *notes, None])[1:]:
            written = said.get("metavar") or each.name.upper()
        else:
            names = [*said.get("aliases", ()), option, *([f"--no-{option[2:]}"] if value is True else [])]
            written = f"{', '.join(names)} {_placeholder(hint)}".rstrip()
        about = first_sentence(said.get("help") or docs.get(each.name, ""))
        listed.append(Option(each.name, written, about, _shown(value)))
    return listed


def _default(of: Field[Any]) -> Any:
    """What a field is where it is not given, as things are here and now; MISSING where it must be."""
    return of.default if of.default_factory is MISSING else of.default_factory()


def _bare(hint: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations, and these."""
    if get_origin(hint) is not Annotated:
        return hint, []
    inner, *notes = get_args(hint)
    bare, more = _bare(inner)
    return bare, [*more, *notes]


def _placeholder(hint: Any) -> str:
    """What stands for an option's value."""
    kinds = [each for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) is Literal:
        return "|".join(map(str, kinds)) if len(kinds) <= 4 else "NAME"
    if get_origin(hint) is tuple:
        return f"{_placeholder(kinds[0])} ..."
    if kinds:
        return _placeholder(kinds[0])
    return {bool: "", int: "N", float: "X", Path: "PATH"}.get(hint, "TEXT")


def _shown(value: Any) -> str:
    """A default as a person would type it; nothing where it only means that the option was not given."""
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    is_value = isinstance(value, int | str | Path) and value is not False
    return str(value) if is_value else ""


def first_sentence(text: str) -> str:
    """A docstring up to its first full stop, on one line."""
    line = " ".join(text.split())
    return line.partition(". ")[0].removesuffix(".")


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, those that it inherits among them."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not is_dataclass(each):
            continue
        body = ast.parse(inspect.getsource(each)).body[0].body  # type: ignore[attr-defined]
        for statement, below in pairwise(body):
            match statement, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str() as text)):
                    found[name] = text
    return found


def setting_rows(settings: Any, about: Mapping[str, str]) -> list[tuple[str, str]]:
    """Rows of those of the settings, by dotted name, that `settings` has: as one types them, with their values."""
    rows = []
    for name, text in about.items():
        *places, last = name.split(".")
        part = reduce(getattr, places, settings)
        if hasattr(part, last):
            value = getattr(part, last)
            typed = f'"{value}"' if isinstance(value, str) and " " in value else _shown(value)
            rows.append((f"--{name.replace('_', '-')} {typed}", text))
    return rows
