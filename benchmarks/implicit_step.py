"""The implicit step in Burgers' ℓ on a GPU in two ways, both compiled: ℓ with its gradient, and a step of the map.

    sweeps    as the package has it: the compiler writes a kernel for every sweep, the baseline
    kernel    all sweeps of a step in one kernel of our own (burgers_kernels.py), which the compiler takes as it is

    python benchmarks/implicit_step.py [--batch 128] [--json FILE]

Prints how far ℓ and its gradient by the kernel are from float64; then images per second and warm-up of both works by
both ways, with nothing compiled beforehand, and the ratios. Without a GPU only the comparison is made, by triton's
interpreter: TRITON_INTERPRET=1. The exit code is 1 if a difference is beyond rounding.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burgers_kernels import by_kernel
from gpu import map_objective
from gpu_tools import Bench, calls, training
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
        distance = Burgers(step=step)(leaf)
        sides.append((distance.detach(), *torch.autograd.grad(distance.sum(), leaf)))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True))


def distance(bench: Bench, step: Step) -> dict[str, float]:
    """ℓ and its gradient."""
    x = bench.images(bench.batch, SHAPE).requires_grad_()
    rule = bench.compiled(Burgers(step=step).to(bench.device))

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(rule(x).sum(), x)

    with bench.arithmetic():
        found = calls(bench, both, bench.batch, 0.0)
    return {"images_per_second": found.images_per_second, "warmup_s": found.warmup_seconds}


def map_step(bench: Bench, step: Step) -> dict[str, float]:
    """A training of the map of the preset `gpu`."""
    s = bench.settings("burgers", "gpu")
    objective = map_objective(s)
    assert isinstance(objective.constraint, Burgers)
    objective.constraint.step = step
    shape = build.dataset(s.data).shape
    found = training(bench, objective, shape, s.map.train, project_weights(objective.mirror))
    return {"images_per_second": found.images_per_second, "warmup_s": found.warmup_seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"difference": difference(device)}
    print(f"largest difference from float64: {report['difference']:.1e}", flush=True)
    works: dict[str, Callable[[Bench, Step], dict[str, float]]] = {"ℓ and gradient": distance, "map step": map_step}
    for name, work in works.items() if device.type == "cuda" else ():
        rows = report[name] = {}
        for way, step in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
                torch.compiler.reset()
                rows[way] = work(Bench(device, options.batch, "bf16", quick=False), step)
            print(f"{name}, batch {options.batch}, {way}: {rows[way]}", flush=True)
        for figure in ("images_per_second", "warmup_s"):
            ratio = rows["kernel"][figure] / rows["sweeps"][figure]
            print(f"{name}, {figure}: kernel / sweeps {ratio:.2f}", flush=True)
    if options.json:
        write_json(options.json, report)
    return 0 if report["difference"] <= ROUNDING else 1


if __name__ == "__main__":
    raise SystemExit(main())
