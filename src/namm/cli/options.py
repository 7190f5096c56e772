"""What commands share: reading arguments, answering with help, and rules by name. Imports no torch until it must.

Commands whose options depend on a name are read in two passes: the name and the command's own options are picked out of
the list first, and what is left goes to tyro, which knows every field of the settings of that name.
"""

import difflib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import tyro
import yaml
from tyro.conf import Positional, arg

from namm.cli import HELP, HELP_ALL, ExitEarly
from namm.cli.help_text import ALL, list_options, options_help, two_columns
from namm.errors import DataError, UsageError
from namm.experiments.engine.experiment import Experiment, Rule
from namm.experiments.engine.processes import is_main, wait_for_the_reason
from namm.experiments.presets import EXPERIMENTS, find, require_name

if TYPE_CHECKING:
    from namm.constraints import Constraint
    from namm.datasets.batches import Images
    from namm.experiments.sweeps.cell import Jobs

T = TypeVar("T")

RunName = Annotated[Positional[str], arg(metavar="RUN", help="Folder of the run, or its name in `runs`.")]
Layout = Literal["NCHW", "NHWC"]


@dataclass(frozen=True)
class ImageFile:
    """Options of a command that measures a rule on a file of images."""

    file: Path
    """Images: a file of `namm sample`, HDF5, NPY or NPZ, or a folder of PNGs."""
    key: str | None = None
    """Name of the array in FILE; `images` in a file of samples."""
    layout: Layout | None = None
    """Order of the axes of FILE; our own files and PNGs know theirs."""
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Where the figures go as JSON."""
    rule: Rule = field(default_factory=Rule)
    """The rule's numbers; a rule of the user's own has none that we know."""


def log(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


# Arguments


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether help is asked for, the short one or all of it."""
    return bool(set(arguments) & {*HELP, HELP_ALL})


def parse(kind: type[T], arguments: Sequence[str], prog: str, *, short: str = "", **options: Any) -> T:
    """An object of `kind` from the arguments; help and mistakes are answered here.

    --help prints `short`, by default a line for each option; --help-all goes on with all that tyro knows of them.
    """
    if asks_for_help(arguments):
        short = short or options_help(kind, prog, options.get("description", ""), options.get("default"))
        if HELP_ALL not in arguments:
            answer(short, arguments)
        print(f"{short}\n")
        arguments = ["--help"]
    try:
        return tyro.cli(kind, args=list(arguments), prog=prog, console_outputs=is_main(), **options)
    except SystemExit as answered:
        if not is_main():
            wait_for_the_reason()
        raise ExitEarly(answered.code if isinstance(answered.code, int) else 1) from None


def parse_with_rule(kind: type[T], arguments: Sequence[str], prog: str, rule: Rule, usage: str) -> T:
    """The same for options of a `file` and a `rule`, whose numbers are options among the others."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs)
    default: Any = kind(file=tyro.MISSING, rule=rule)  # type: ignore[call-arg]
    listed = [each for each in list_options(kind, default) if each.name not in ("file", "rule")]
    rows = (each.row() for each in [*listed, *list_options(type(rule), rule)])
    short = f"{usage}\n\n{two_columns(rows)}\n\n{ALL}"
    return parse(kind, arguments, prog, short=short, default=default, config=config)


def pick(
    arguments: Sequence[str], single: Sequence[str], *, several: Sequence[str] = (), flags: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """What is given of a command's own options, by name, and all other arguments.

    Options are `--name VALUE` or `--name=VALUE` for `single`; with any number of values, together or one by one, for
    `several`, which are empty lists by default; and without a value for `flags`, which are False by default.
    """
    picked: dict[str, Any] = {name: [] for name in several} | dict.fromkeys(flags, False)
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        option, equals, value = argument.partition("=")
        name = option[2:] if option.startswith("--") else ""
        if name in several:
            picked[name] += [value] if equals else []
            while queue and not queue[0].startswith("--"):
                picked[name].append(queue.pop(0))
        elif name in flags and not equals:
            picked[name] = True
        elif name in single:
            if not equals and (not queue or queue[0].startswith("--")):
                raise UsageError(f"{option} needs a value: `{option} VALUE`.")
            if name in picked:
                raise UsageError(f"{option} is given twice.")
            picked[name] = value if equals else queue.pop(0)
        else:
            rest.append(argument)
    return picked, rest


def pick_name(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument, where it is not an option, and the others."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return None, arguments


def require_first(arguments: list[str], usage: str, question: str) -> tuple[str, list[str]]:
    """The name that comes first and the other arguments; without one the usage is printed, or `question` asked."""
    name, rest = pick_name(arguments)
    if name is not None:
        return name, rest
    if not arguments or asks_for_help(rest):
        answer(usage, arguments)
    raise UsageError(question)


def answer(usage: str, arguments: Sequence[str]) -> NoReturn:
    """Print the usage; exit code 2 if no arguments were given."""
    print(usage)
    raise ExitEarly(0 if arguments else 2)


def refuse_near_misses(arguments: Sequence[str], names: Sequence[str]) -> None:
    """Refuse an option that is almost one of `names`, where all others have a dot in them."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if not option.startswith("--") or "." in option or asks_for_help([option]):
            continue
        close = difflib.get_close_matches(option.removeprefix("--"), names, n=1)
        hint = f" Did you mean --{close[0]}?" if close else " Settings are named like --map.train.budget."
        raise UsageError(f"there is no option {option}.{hint}")


def require_hdf5(path: Path, option: str, example: str) -> None:
    """Refuse to write images where nothing would read them back."""
    if path.suffix not in (".h5", ".hdf5"):
        raise UsageError(f"{option} must name an HDF5 file, such as {example}, not {path}.")


def whole_number(option: str, text: str, least: int) -> int:
    """The value of an option that counts something."""
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"--{option} takes whole numbers of {least} or more, not {text!r}.")
    return int(text)


def read_jobs(at_once: str | None, slurm: Sequence[str], on: str) -> "Jobs":
    """What --jobs and --slurm say of cells that run `on`."""
    from namm.experiments.sweeps.cell import Jobs

    number = None if at_once is None else whole_number("jobs", at_once, 1)
    if number is not None and on == "here":
        raise UsageError("--jobs is for cells that run at once: add --on local or --on slurm.")
    if slurm and on != "slurm":
        raise UsageError("--slurm is for cells that run there: add --on slurm.")
    if wrong := [text for text in slurm if "=" not in text]:
        raise UsageError(f"--slurm takes KEY=VALUE, such as partition=gpu, not {wrong[0]!r}.")
    pairs = (text.partition("=") for text in slurm)
    return Jobs(number, {key: yaml.safe_load(value) for key, _, value in pairs})


# Data by name, and rules: one of ours with its numbers, or `module:name` of the user's own


def drawable() -> dict[str, Experiment]:
    """The experiments whose data can be drawn, by the dataset's own name and by the experiment's."""
    known = map(find, EXPERIMENTS)
    return {name: each for each in known for name in (each.dataset or each.name, each.name)}


def rule_settings(name: str, file: Path | None) -> Rule:
    """The numbers of the rule `name`: those that `file` was drawn with, where it is one of ours and says so.

    A rule of the user's own has none that we know.
    """
    if ":" in name:
        return Rule()
    kind = find(require_name(name, EXPERIMENTS, "constraint")).rule
    known = {} if file is None else file_attributes(file)
    plain = {name: value for name, value in known.items() if isinstance(value, bool | int | float | str)}
    return kind(**{field.name: plain[field.name] for field in fields(kind) if field.name in plain})


def file_among(arguments: Sequence[str]) -> Path | None:
    """The first HDF5 file among arguments that are yet to be read: it may bring the numbers of its rule."""
    return next((Path(each) for each in arguments if each.endswith(".h5") and Path(each).is_file()), None)


def file_attributes(file: Path) -> dict[str, Any]:
    """What a file of ours says that it was made from; nothing for any other."""
    from namm.hdf5 import attributes, open_hdf5

    try:
        with open_hdf5(file) as opened:
            known = attributes(opened)
    except DataError:
        return {}  # what is wrong with the file is said when it is read
    return known if "namm_version" in known else {}


def rule_of_data(data: Path) -> str:
    """The name of the rule that a file of `namm data` obeys."""
    dataset = file_attributes(data).get("dataset") if data.is_file() else None
    if not isinstance(dataset, str) or dataset not in drawable():
        raise UsageError(
            f"which rule? {data} is not a file of `namm data`: add --constraint {'|'.join(EXPERIMENTS)}, or "
            "module:name."
        )
    return drawable()[dataset].name


def named_rule(name: str, rule: Rule) -> "Constraint":
    """ℓ of that name, with these numbers where it is one of ours, where models run."""
    from namm.experiments.engine.build import constraint, placed
    from namm.experiments.engine.user_rule import load_rule

    return placed(load_rule(name) if ":" in name else constraint(rule))


# Images


def open_file(path: Path, key: str | None, layout: str | None, stack: ExitStack) -> "Images":
    """The images of an HDF5, NPY or NPZ file or of a folder of PNGs; those of the first two stay there until read.

    Of our own files, where no `key` says otherwise: `images` of a file of samples, `test` of one of data, or `train`
    where it has no other.
    """
    from namm.datasets import open_images, read_images
    from namm.datasets.readers import is_lazy

    if not is_lazy(path) or (path.suffix.lower() == ".npy" and not path.exists()):
        return read_images(path, key=key, layout=layout)
    made_from = file_attributes(path)
    if key is None and "samples" in made_from:
        key = "images"
    if key is None and "dataset" in made_from:
        key = "test" if made_from.get("n_test") else "train"
    return stack.enter_context(open_images(path, key=key, layout=layout))
