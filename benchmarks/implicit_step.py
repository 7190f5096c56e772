"""The implicit step in Burgers' ℓ on a GPU in two ways, both compiled: ℓ with its gradient, and a step of the map.

    sweeps    as the package has it: the compiler writes a kernel for every sweep, the baseline
    kernel    all sweeps of a step in one kernel of our own (burgers_kernels.py), which the compiler takes as it is

    python benchmarks/implicit_step.py [--batch 128] [--json FILE]

Prints how far ℓ and its gradient by the kernel are from float64; then images per second and warm-up of both works by
both ways, each in a process of its own that finds nothing compiled, and the ratios. Without a GPU only the comparison
is made, by triton's interpreter: TRITON_INTERPRET=1. The exit code is 1 if a difference is beyond rounding.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from burgers_kernels import by_kernel
from gpu import distance, map_objective
from gpu_tools import Bench, Figures, facts, told_by, training
from namm.constraints import Burgers
from namm.experiments import build
from namm.files import write_json
from namm.simulators.burgers import Step, crank_nicolson
from namm.training.maps import project_weights

WAYS: dict[str, Step] = {"sweeps": crank_nicolson, "kernel": by_kernel}
ROUNDING = 1e-5
SHAPE = (1, 64, 64)


def difference(device: torch.device, images: int = 2) -> float:
    """Of ℓ and of its gradient from float64, the larger, relative to the largest."""
    x = torch.rand(images, *SHAPE, generator=torch.Generator().manual_seed(0))
    sides = []
    for step, dtype in ((by_kernel, torch.float), (crank_nicolson, torch.double)):
        leaf = x.to(device, dtype).requires_grad_()
        found = Burgers(step=step)(leaf)
        sides.append((found.detach(), *torch.autograd.grad(found.sum(), leaf)))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True))


def map_step(bench: Bench, step: Step) -> Figures:
    """A training of the map of the preset `gpu`."""
    s = bench.settings("burgers", "gpu")
    objective = map_objective(s)
    assert isinstance(objective.constraint, Burgers)
    objective.constraint.step = step
    shape = build.dataset(s.data).shape
    return training(bench, objective, shape, s.map.train, project_weights(objective.mirror))


WORKS: dict[str, Callable[[Bench, Step], Figures]] = {"distance": distance, "map": map_step}


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
        found = WORKS[work](Bench(device, options.batch, "bf16", quick=False), WAYS[way])
        print(json.dumps({"images_per_second": found.images_per_second, "warmup_s": found.warmup_seconds}))
        return 0
    report: dict[str, Any] = facts(device) | {"difference": difference(device)}
    print("{machine}, torch {torch}, {date}".format(**report))
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
