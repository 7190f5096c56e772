"""`namm certify`: how far each image of a file is from a rule, in float64, and whether that is as near as it can be."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from namm.cli.help_text import format_usage
from namm.cli.options import (
    ImageFile,
    Layout,
    answer,
    asks_for_help,
    file_among,
    named_rule,
    open_file,
    parse_with_rule,
    pick,
    rule_of_data,
    rule_settings,
)
from namm.errors import UsageError
from namm.experiments.presets import EXPERIMENTS

OBEYING = 256
"""Images of the data that are looked at first: those of another rule, or read in another order, give no floor."""


@dataclass(frozen=True)
class Certify(ImageFile):
    """Certify images: ℓ of each in float64, beside the data's own and what rounding does to it."""

    data_key: str | None = None
    """The same for the data; `test`, or else `train`, in a file of `namm data`."""
    data_layout: Layout | None = None
    """The same for the data."""


def usage() -> str:
    """The help text that needs no rule."""
    return format_usage(
        "namm certify FILE --constraint RULE [--data FILE] [-o certificate.json] [--PARAMETER VALUE]",
        "Measure ℓ of every image in float64. An image reaches the rule where ℓ is at most three times the floor (the "
        "data's own mean ℓ, or 0) and what the rounding of its pixels does to ℓ, together (docs/guides/exact.md).\n"
        "Exit code 0: all images reach the rule; 1: some do not; 2: wrong usage.",
        {
            "FILE": "samples of `namm sample` or `namm repair`, HDF5, NPY or NPZ file, or a folder of PNGs",
            "--constraint": f"{', '.join(EXPERIMENTS)}, or module:name of your own; not needed where the data are a "
            "file of `namm data`",
            "--data": "real images, the same way: their mean ℓ is the floor",
            "-o": "where the certificate goes as JSON, for namm.Certificate.load",
            "--PARAMETER": "the rule's numbers and more: `namm certify FILE --constraint burgers --help`. A file that "
            "`namm data` wrote brings its own.",
        },
    )


def main(arguments: list[str]) -> int:
    """Certify a file of images."""
    picked, rest = pick(arguments, ("constraint", "data"))
    if not arguments or (asks_for_help(rest) and not picked):
        answer(usage(), arguments)
    data = Path(picked["data"]) if "data" in picked else None
    known = data or file_among(rest)
    name = picked.get("constraint") or (rule_of_data(known) if known is not None else "")
    if not name:
        raise UsageError(f"which rule? Add --constraint {'|'.join(EXPERIMENTS)}, or module:name.")
    settings = rule_settings(name, known if known is not None and known.is_file() else None)
    options = parse_with_rule(Certify, rest, "namm certify", settings, usage())
    if options.out is not None and options.out.suffix != ".json":
        raise UsageError(f"-o must name a JSON file, such as certificate.json, not {options.out}.")

    from namm.datasets.batches import to_tensor
    from namm.digests import signed
    from namm.exact import certify
    from namm.experiments.engine.build import device
    from namm.experiments.engine.user_rule import blamed_on
    from namm.files import write_json

    rule, floor = named_rule(name, options.rule), 0.0
    with ExitStack() as stack:
        images = open_file(options.file, options.key, options.layout, stack)
        real = None if data is None else open_file(data, options.data_key, options.data_layout, stack)
        with blamed_on(name):
            if real is not None:
                rule.check(to_tensor(real[:OBEYING])).require_obeyed()
                floor = float(certify(real, rule, device=device()).after.mean())
            certificate = certify(images, rule, floor=floor, device=device())
    print(certificate)
    if options.out is not None:
        write_json(options.out, signed(certificate.as_json()))
        print(f"the certificate is in {options.out}")
    return 0 if certificate.reached.all() else 1
