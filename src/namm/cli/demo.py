"""`namm demo`: the whole method on a CPU, told as it goes."""

from dataclasses import dataclass
from pathlib import Path

from namm.cli.options import parse
from namm.cli.run import tell


@dataclass(frozen=True)
class Demo:
    """Go through the whole method on small images, on a CPU, in minutes, and end with a report."""

    out: Path = Path("runs/demo")
    """Folder of the run; one that was interrupted goes on, a finished one is read back."""
    seed: int = 0
    """Seed of data, trainings and samples."""
    quick: bool = False
    """Shrink everything to seconds: to see that it works here, not how well."""


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = parse(Demo, arguments, prog="namm demo")
    if isinstance(options, int):
        return options
    from namm.experiments.demo import demo

    demo(options.out, seed=options.seed, quick=options.quick, tell=tell)
    return 0
