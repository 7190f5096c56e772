"""`namm demo`: learn a mirror map on small periodic images, print and plot what it does to the rule."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from namm.cli.options import parse

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Demo:
    """Learn a mirror map for periodic images on a CPU, in minutes, and show that the rule is kept."""

    out: Path = Path("runs/demo")
    """Folder of the run; one that was interrupted goes on, a finished one is read back."""
    plot: Path = Path("demo.png")
    """Where the figure goes."""
    steps: int = 1000
    """Training steps."""
    seed: int = 0


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = parse(Demo, arguments, prog="namm demo")
    if isinstance(options, int):
        return options
    from rich.console import Console

    from namm.experiments.demo import demo
    from namm.report.demo import demo_figure

    console = Console(highlight=False, soft_wrap=True)
    console.print("Images that repeat a random cell 2 × 2 times obey a rule: ℓ(x) = 0 where all four copies agree.")
    console.print("Learning a map g to a space without the rule, and its inverse f, which brings the rule back ...")
    result = demo(options.out, steps=options.steps, seed=options.seed, tell=lambda line: console.print(f"  {line}"))
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    title = f"Noise of σ = {result.sigma} breaks the rule in data space, not in mirror space"
    demo_figure(result.images, result.distances, title).savefig(options.plot, dpi=120)
    console.print(_table(result.figures))
    console.print(
        f"The same noise, added in mirror space, breaks the rule "
        f"{result.figures['distance_noise'] / result.figures['distance_map']:.1f} times less, and f(g(x)) returns x to "
        f"within {100 * result.figures['cycle_error']:.1f} % of its mean value."
    )
    console.print(f"Training took {result.compute_seconds:.0f} s. Figure: {options.plot}. The run: {options.out}.")
    console.print("Next: examples/own_constraint.py, your own rule on your own data; `namm run --help`, experiments.")
    return 0


def _table(figures: dict[str, float]) -> "Table":
    from rich.table import Table

    table = Table(title=f"mean ℓ over {figures['measured_on']:.0f} held-out images")
    table.add_column("images")
    table.add_column("mean ℓ", justify="right")
    for name, key in (
        ("data x", "distance_data"),
        ("noise added directly, x + σz", "distance_noise"),
        ("noise added in mirror space, f(g(x) + σz)", "distance_map"),
        ("no noise, f(g(x))", "distance_cycle"),
    ):
        table.add_row(name, f"{figures[key]:.2e}")
    return table
