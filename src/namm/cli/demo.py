"""`namm demo`: learn a mirror map on small periodic images, print and plot what it does to the rule."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from rich.table import Table

    from namm.experiments.demo import DemoResult


@dataclass(frozen=True)
class Demo:
    """Learn a mirror map for periodic images on a CPU, in minutes, and show that the rule is kept."""

    out: Path = Path("runs/demo")
    """Folder of the training; a run that was interrupted goes on from it, a finished one is read back."""
    plot: Path = Path("demo.png")
    """Where the figure goes."""
    steps: int = 1500
    """Training steps."""
    seed: int = 0


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = tyro.cli(Demo, args=arguments, prog="namm demo")
    from rich.console import Console

    from namm.experiments.demo import SIGMA_MAX, demo
    from namm.report.demo import demo_figure

    console = Console(highlight=False, soft_wrap=True)
    console.print("Images that repeat a random cell 2 × 2 times obey a rule: ℓ(x) = 0 where all four copies agree.")
    console.print("Learning a map g to a space without the rule and its inverse f, which brings the rule back ...")
    result = demo(options.out, steps=options.steps, seed=options.seed)
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    shown = {"x": "data", "x + σz": "noisy", "f(g(x) + σz)": "restored"}
    figure = demo_figure(
        result.images,
        {label: result.distances[name] for label, name in shown.items()},
        f"Noise of σ = {SIGMA_MAX} breaks the rule in data space, not in mirror space",
    )
    figure.savefig(options.plot, dpi=120)
    console.print(_table(result))
    console.print(
        f"The same noise, added in mirror space, breaks the rule {result.noisy / result.restored:.1f} times less, "
        f"and f(g(x)) returns x to within {100 * result.error:.1f} % of its mean value."
    )
    console.print(
        f"Training took {result.compute_seconds:.0f} s. Figure: {options.plot}. Trained maps: {options.out}/mirror."
    )
    console.print("Next: examples/own_constraint.py shows your own rule on your own data.")
    return 0


def _table(result: "DemoResult") -> "Table":
    from rich.table import Table

    from namm.experiments.demo import HELD_OUT

    table = Table(title=f"mean ℓ over {HELD_OUT} held-out images")
    table.add_column("images")
    table.add_column("mean ℓ", justify="right")
    for name, value in (
        ("data x", result.data),
        ("noise added directly, x + σz", result.noisy),
        ("noise added in mirror space, f(g(x) + σz)", result.restored),
        ("no noise, f(g(x))", result.inverted),
    ):
        table.add_row(name, f"{value:.2e}")
    return table
