"""The implicit step in Burgers' ℓ on a GPU in two ways, both compiled: ℓ with its gradient, and a step of the map.

    sweeps    the compiler writes a kernel for every sweep: the baseline
    kernel    all sweeps of a step in one kernel of our own, which the compiler takes as it is: what the package does

    python benchmarks/implicit_step.py [--batch 128] [--json FILE]

Prints how far ℓ and its gradient by the kernel are from float64; then images per second and warm-up of both works by
both ways, each in a process of its own that finds nothing compiled, and the ratios. Without a GPU only the comparison
is made, by triton's interpreter: TRITON_INTERPRET=1. The exit code is 1 if a difference is beyond rounding.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gpu import distance, map_step
from gpu_tools import Bench, Figures, facts, stamp, told_by
from namm.constraints import Burgers
from namm.files import write_json

WAYS = ("sweeps", "kernel")
WORKS: dict[str, Callable[[Bench], Figures]] = {
    "distance": distance,
    "map": partial(map_step, experiment="burgers", name="gpu"),
}
ROUNDING = 1e-5
SHAPE = (1, 64, 64)


def by(way: str) -> AbstractContextManager[object]:
    """What is compiled inside is compiled that way."""
    chosen = way == "kernel"
    return patch("namm.simulators.burgers._has_kernel", lambda *_: chosen)


def difference(device: torch.device, images: int = 2) -> float:
    """Of ℓ and of its gradient by the kernel from those in float64, the larger, relative to the largest."""
    x = torch.rand(images, *SHAPE, generator=torch.Generator().manual_seed(0))
    sides = []
    with by("kernel"):
        taken = torch.compile(Burgers(), fullgraph=True, backend="aot_eager")
        for rule, dtype in ((taken, torch.float), (Burgers(), torch.double)):
            leaf = x.to(device, dtype).requires_grad_()
            found = rule(leaf)
            sides.append((found.detach(), *torch.autograd.grad(found.sum(), leaf)))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=2, metavar=("WORK", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.run:
        work, way = options.run
        with by(way):
            found = WORKS[work](Bench(device, options.batch, "bf16", quick=False))
        print(json.dumps({"images_per_second": found.images_per_second, "warmup_s": found.warmup_seconds}))
        return 0
    report: dict[str, Any] = facts(device) | {"difference": difference(device)}
    print(stamp(report))
    print(f"largest difference from float64: {report['difference']:.1e}", flush=True)
    for work in WORKS if device.type == "cuda" else ():
        rows = report[work] = {}
        for way in WAYS:
            with tempfile.TemporaryDirectory() as caches:
                rows[way] = told_by(__file__, ["--run", work, way, "--batch", str(options.batch)], caches)
            print(f"{work}, batch {options.batch}, {way}: {rows[way]}", flush=True)
        for figure in ("images_per_second", "warmup_s"):
            ratio = rows["kernel"][figure] / rows["sweeps"][figure]
            print(f"{work}, {figure}: kernel / sweeps {ratio:.2f}", flush=True)
    if options.json:
        write_json(options.json, report)
    return 0 if report["difference"] <= ROUNDING else 1


if __name__ == "__main__":
    raise SystemExit(main())
