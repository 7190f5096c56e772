"""`namm check`: measure a rule on images, ours or the user's own, and show the worst of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from namm.cli.options import HELP, parse, take_name
from namm.cli.rules import named_rule, rule_settings
from namm.errors import UsageError
from namm.experiments.engine.data_settings import Rule
from namm.experiments.presets import EXPERIMENTS

if TYPE_CHECKING:
    from torch import Tensor

    from namm.constraints import Constraint


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
            f"  CONSTRAINT   {', '.join(EXPERIMENTS)}, or module:name of your own: a function (B, C, H, W) -> (B,) or",
            "               a namm.Constraint, found in the current folder, or installed",
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
    file = next((Path(a) for a in rest if a.endswith(".h5") and Path(a).is_file()), None)
    options = _options(name, rule_settings(name, file), rest)
    if isinstance(options, int):
        return options

    if options.out is not None and not options.out.suffix:
        raise UsageError(f"--out must name a picture, such as worst.png, not {options.out}.")

    from namm.datasets import read_images
    from namm.datasets.batches import check_values
    from namm.experiments.engine.user_rule import blamed_on

    rule = named_rule(name, options.rule)
    images = read_images(options.file, key=options.key, layout=options.layout)
    notes = check_values(images, "images")
    with blamed_on(name):
        report = rule.check(images, noise=options.noise)
    print(report)
    picture = options.out or Path(f"{options.file.stem}-worst.png")
    with blamed_on(name):
        residual = _residual(rule, images[report.worst : report.worst + 1])
    title = f"image {report.worst}, distance {report.max:.3g} ({rule.name})"
    _save_picture(images[report.worst], residual, title, picture)
    print(f"  picture   {picture}")
    for note in notes:
        print(f"  note      {note}")
    report.require_obeyed()
    report.require_active()
    return 0


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


def _residual(rule: "Constraint", image: "Tensor") -> "Tensor | None":
    """Where one image breaks the rule, for a rule that tells."""
    import torch

    with torch.no_grad():
        return rule.follow(image).residual(image)[0] if rule.has_residual else None


def _save_picture(image: "Tensor", residual: "Tensor | None", title: str, path: Path) -> None:
    from namm.report.figures import save, worst_residual_figure

    save(worst_residual_figure(image.numpy(), None if residual is None else residual.numpy(), title), path)
