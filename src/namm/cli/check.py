"""`namm check`: measure a rule on images, ours or the user's own, and show the worst of them."""

import importlib
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from namm.cli.options import HELP, parse, take_name
from namm.errors import ConstraintError, UsageError
from namm.experiments.data_settings import BurgersRule, CountRule, DivergenceRule, FluxRule, PeriodicRule, Rule
from namm.experiments.presets import require_name

if TYPE_CHECKING:
    from namm.constraints import Constraint

RULES: dict[str, type[Rule]] = {
    "flux": FluxRule,
    "burgers": BurgersRule,
    "divergence": DivergenceRule,
    "periodic": PeriodicRule,
    "count": CountRule,
}


@dataclass(frozen=True)
class Options:
    """What to check, and how to read it."""

    file: Path
    """HDF5, NPY or NPZ file, or a folder of PNGs."""
    layout: Literal["NCHW", "NHWC"] | None = None
    """Order of the file's axes; our own files and PNGs know theirs."""
    key: str | None = None
    """Name of the array in an HDF5 or NPZ file; of our own files `train` is read."""
    noise: float = 0.1
    """Noise that the floor is compared with, in standard deviations of the data."""
    out: Path | None = None
    """Where the picture of the worst image goes (default: FILE-worst.png)."""
    rule: Rule = field(default_factory=Rule)
    """The rule's numbers; a rule of the user's own has none that we know."""


def usage() -> str:
    """The help text that needs no rule."""
    return "\n".join(
        [
            "usage: namm check CONSTRAINT FILE [--layout NCHW|NHWC] [--key KEY] [--out PICTURE] [--PARAMETER VALUE]",
            "",
            "Measure how well images keep a rule: the floor (mean, max, worst image), the same with noise, and the",
            "gradient. The worst image is saved beside its residual.",
            "",
            f"  CONSTRAINT   {', '.join(RULES)}, or module:name of your own: a function (B, C, H, W) -> (B,) or",
            "               a namm.Constraint, imported with the current folder on the path",
            "  FILE         HDF5, NPY or NPZ file, or a folder of PNGs",
            "  --PARAMETER  the rule's numbers, as in `namm check flux FILE --total 120`; `namm check flux --help`.",
            "               A file that `namm data` wrote brings its own.",
            "",
            "Exit code 0: the rule keeps its contract and the data keep the rule.",
        ]
    )


def main(arguments: list[str]) -> int:
    """Check a rule on a file of images."""
    name, rest = take_name(arguments)
    if name is None:
        if not arguments or set(rest) & set(HELP):
            print(usage())
            return 0 if arguments else 2
        raise UsageError("which constraint? Its name comes first: namm check CONSTRAINT FILE.")
    own = ":" in name
    if not own:
        require_name(name, RULES, "constraint")
    options = _options(name, Rule() if own else _recorded(RULES[name], rest), rest)
    if isinstance(options, int):
        return options

    from namm.datasets import read_images

    rule = load_rule(name) if own else _ours(options.rule)
    images = read_images(options.file, key=options.key, layout=options.layout)
    report = rule.check(images, noise=options.noise)
    print(report)
    picture = options.out or Path(f"{options.file.stem}-worst.png")
    _save_picture(rule, images[report.worst : report.worst + 1], report.worst, picture)
    print(f"  picture   {picture}")
    report.require_obeyed()
    return 0


def _recorded(kind: type[Rule], arguments: list[str]) -> Rule:
    """The rule with the numbers that the file was drawn with, where it is one of ours and says so."""
    file = next((Path(a) for a in arguments if a.endswith(".h5") and Path(a).is_file()), None)
    if file is None:
        return kind()
    import h5py

    try:
        with h5py.File(file, "r") as opened:
            said = {name: value.item() for name, value in opened.attrs.items() if hasattr(value, "item")}
            ours = "namm_version" in opened.attrs
    except OSError:
        return kind()  # what is wrong with the file is said when it is read
    return kind(**{f.name: said[f.name] for f in fields(kind) if ours and f.name in said})


def _options(name: str, rule: Rule, arguments: list[str]) -> Options | int:
    """The options, with the rule's parameters among them, or an exit code."""
    import tyro

    return parse(
        Options,
        arguments,
        prog=f"namm check {name}",
        description="Measure how well images keep a rule.",
        default=Options(file=tyro.MISSING, rule=rule),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
    )


def _ours(rule: Rule) -> "Constraint":
    from namm.experiments.build import constraint

    return constraint(rule)


def load_rule(name: str) -> "Constraint":
    """The rule that `module:name` names: a `Constraint`, a class of them that needs no arguments, or a function."""
    from namm.constraints import Constraint, constraint

    module, _, attribute = name.partition(":")
    found = _import(module, attribute)
    if isinstance(found, type) and issubclass(found, Constraint):
        try:
            found = found()
        except TypeError as error:
            raise UsageError(
                f"{name} is a class that cannot be made without arguments ({error}): name an object of it instead."
            ) from error
    if isinstance(found, Constraint):
        return found
    if not callable(found):
        raise UsageError(f"{name} is {found!r}; it must be a function (B, C, H, W) -> (B,) or a namm.Constraint.")
    return constraint(found)


def _import(module: str, attribute: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise ConstraintError(f"importing {module} failed: {error}.") from error
        raise UsageError(
            f"there is no module {module!r}, neither here ({os.getcwd()}) nor installed: "
            "CONSTRAINT is module:name, without .py."
        ) from error
    except Exception as error:
        raise ConstraintError(f"importing {module} failed: {type(error).__name__}: {error}.") from error
    names = [n for n in vars(imported) if not n.startswith("_")]
    return getattr(imported, require_name(attribute, names, f"name in {module} called"))


def _save_picture(rule: "Constraint", image: Any, index: int, path: Path) -> None:
    from namm.report.figures import save, worst_residual_figure

    residual = rule.residual(image)[0] if rule.has_residual else None
    distance = float(rule(image)[0])
    title = f"image {index}, distance {distance:.3g} ({rule.name})"
    save(worst_residual_figure(image[0].numpy(), None if residual is None else residual.numpy(), title), path)
