"""An update of all weights of a network, by one vector and one by one, as gradients are there already.

    one by one    torch's fused Adam on every weight, after its norm of all gradients: the baseline
    one vector    what the training loop does: gather the gradients (`FlatWeights`), then the same on the vector

    python benchmarks/update.py [--preset paper] [--json FILE]

For the score network and the maps of Burgers' preset, on a GPU if there is one. Prints milliseconds per update until
all of it is done, those that the CPU spends on asking for it, and ratios.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from namm.experiments import build
from namm.experiments.presets import PRESETS, preset
from namm.training.flat import FlatWeights
from namm.training.trial import clock

UPDATES, GROUPS = 20, 7


@dataclass(frozen=True)
class Found:
    """Milliseconds per update: until it is done, and of the CPU alone; of the baseline and of ours."""

    network: str
    weights: int
    one_by_one: float
    one_vector: float
    one_by_one_cpu: float
    one_vector_cpu: float


def milliseconds(update: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """The median of groups of updates: all of it, and the CPU's part."""
    found = []
    for _ in range(GROUPS + 1):
        start = clock(device)
        for _ in range(UPDATES):
            update()
        asked = time.perf_counter()
        found.append((1e3 * (clock(device) - start) / UPDATES, 1e3 * (asked - start) / UPDATES))
    whole, asked_for = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return whole, asked_for


def measure(name: str, network: nn.Module, device: torch.device) -> Found:
    """Both ways on the same network."""
    weights = [p for p in network.to(device).parameters() if p.requires_grad]
    gradients = [torch.randn_like(weight) for weight in weights]

    def give() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient

    plain = torch.optim.Adam(weights, fused=True)

    def one_by_one() -> None:
        give()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        plain.step()
        plain.zero_grad()

    whole, asked = milliseconds(one_by_one, device)
    flat = FlatWeights(weights)
    joined = torch.optim.Adam(flat.vectors, fused=True)

    def one_vector() -> None:
        give()
        flat.gather()
        torch.nn.utils.clip_grad_norm_(flat.vectors, 1.0)
        joined.step()

    ours, ours_asked = milliseconds(one_vector, device)
    return Found(name, len(weights), whole, ours, asked, ours_asked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="paper")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    s = preset("burgers", options.preset).settings
    shape = build.dataset(s.data).shape
    score = build.diffusion(s.mdm.network, s.mdm.diffusion, shape, seed=0)
    found = [measure("score", score, device), measure("maps", build.mirror(s.map, shape[0]), device)]
    ways = ("one by one", "one vector", "ratio")
    table = Table("network", "weights", *ways, *(f"CPU: {way}" for way in ways), title="milliseconds per update")
    for row in found:
        whole, asked = (row.one_by_one, row.one_vector), (row.one_by_one_cpu, row.one_vector_cpu)
        figures = [[f"{a:.2f}", f"{b:.2f}", f"{a / b:.1f}"] for a, b in (whole, asked)]
        table.add_row(row.network, str(row.weights), *figures[0], *figures[1])
    Console(width=120).print(table)
    print(torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
