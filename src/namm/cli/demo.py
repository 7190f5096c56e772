"""`namm demo`: the whole method on a CPU, told as it goes."""

from dataclasses import dataclass
from pathlib import Path

from namm.cli.options import log, parse


@dataclass(frozen=True)
class Demo:
    """Go through the whole method on small images, on a CPU, in minutes, and end with a report."""

    out: Path = Path("runs/demo")
    """Folder of the run; one that was interrupted goes on, a finished one is read back."""
    seed: int = 0
    """Seed of data, trainings and samples."""
    quick: bool = False
    """Shrink everything to seconds: to see that it works here, not how well."""


def main(arguments: list[str]) -> None:
    """Run the demonstration."""
    options = parse(Demo, arguments, "namm demo")

    from namm.experiments.demo import demo

    demo(options.out, seed=options.seed, quick=options.quick, log=log)
