"""`namm check`: measure a rule on images, ours or the user's own, and show the worst of them."""

from dataclasses import dataclass, field
from pathlib import Path

from namm.cli.help_text import format_usage
from namm.cli.options import (
    Layout,
    file_among,
    named_rule,
    parse_with_rule,
    require_first,
    rule_settings,
)
from namm.errors import UsageError
from namm.experiments.engine.experiment import Rule
from namm.experiments.presets import EXPERIMENTS
from namm.formatting import format_number


@dataclass(frozen=True)
class Check:
    """Measure how well images keep a rule."""

    file: Path
    """HDF5, NPY or NPZ file, or a folder of PNGs."""
    layout: Layout | None = None
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
    return format_usage(
        "namm check RULE FILE [--layout NCHW|NHWC] [--key KEY] [--out PICTURE] [--PARAMETER VALUE]",
        "Measure how well images keep a rule: the floor (mean, max, worst image), the same with noise, and the "
        "gradient. The worst image is saved beside its residual. "
        "Exit code 0: the rule keeps its contract and the data keep the rule.",
        {
            "RULE": f"{', '.join(EXPERIMENTS)}, or module:name of your own: a function (B, C, H, W) -> (B,) or "
            "a namm.Constraint, found in the current folder, or installed",
            "FILE": "HDF5, NPY or NPZ file, or a folder of PNGs",
            "--PARAMETER": "the rule's numbers, as in `namm check flux FILE --total 120`; `namm check flux --help`. "
            "A file that `namm data` wrote brings its own.",
        },
    )


def main(arguments: list[str]) -> None:
    """Check a rule on a file of images."""
    question = "which rule? Its name comes first: namm check RULE FILE."
    name, rest = require_first(arguments, usage(), question)
    options = parse_with_rule(Check, rest, f"namm check {name}", rule_settings(name, file_among(rest)), usage())
    if options.out is not None and not options.out.suffix:
        raise UsageError(f"--out must name a picture, such as worst.png, not {options.out}.")

    import torch

    from namm.datasets import open_images, read_images
    from namm.datasets.batches import check_values
    from namm.datasets.readers import is_lazy
    from namm.experiments.engine.user_rule import blamed_on
    from namm.report.figures import save, worst_residual_figure

    rule = named_rule(name, options.rule)
    is_there = is_lazy(options.file) and options.file.exists()
    images = (open_images if is_there else read_images)(options.file, key=options.key, layout=options.layout)
    notes = check_values(images, "images")
    with blamed_on(name):
        report = rule.check(images, noise=options.noise)
    print(report)
    image = images[report.worst : report.worst + 1]
    with blamed_on(name), torch.no_grad():
        residual = rule.follow(image).residual(image)[0].numpy() if rule.has_residual else None
    title = f"image {report.worst}, distance {format_number(report.max)} ({rule.name})"
    picture = options.out or Path(f"{options.file.stem}-worst.png")
    save(worst_residual_figure(image[0].numpy(), residual, title), picture)
    print(f"  picture   {picture}")
    for note in notes:
        print(f"  note      {note}")
    report.require_obeyed()
    report.require_active()
