"""The score network on a GPU in two ways: its training and its sampling.

    compiled    by torch's compiler, with CUDA graphs: what any other network gets, the baseline
    recorded    as it is written, with kernels of our own around its convolutions, its launches recorded once as one
                CUDA graph: what the package does, where nothing is compiled but those kernels

    python benchmarks/score_network.py [--train 64 256] [--sample 256] [--steps 100] [--preset paper]
                                       [--ways recorded compiled] [--json FILE]

Prints how far values and gradients of the kernels are from float64, and the loss of a short training from the same
without kernels and recording. Then, for every batch, images (of sampling images × steps) per second, warm-up and the
time in each kind of kernel by both ways, and the ratio. Without a GPU only the comparisons are made, by triton's
interpreter: TRITON_INTERPRET=1. The exit code is 1 if a difference is beyond rounding.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu import sampling, score_step
from gpu_tools import Bench, Figures, by_kind, compiled_by_torch, facts, stamp
from namm.experiments.presets import PRESETS
from namm.files import write_json
from namm.generative import Diffusion, NCSNpp
from namm.generative.networks.ncsnpp.layers import SQRT_HALF
from namm.generative.networks.ncsnpp.norm_kernels import activated, normalised
from namm.generative.networks.ncsnpp.row_kernels import beside, joined
from namm.gpu import with_kernels
from namm.training.models import ModelObjective
from namm.training.settings import TrainSettings
from namm.training.trainer import train

CASES = ((2, 8, 4, 4, 2), (3, 12, 4, 6, 3), (2, 6, 3, 3, 1), (2, 32, 8, 8, 8), (1, 192, 2, 2, 32), (2, 64, 16, 12, 16))
"""Images, channels, rows, columns and groups of what is compared with float64; a program holds less than the last."""
ROUNDING, APART = 1e-5, 1e-3
"""Largest differences of kernels, and of the losses of a training."""
HEAVIEST = 20
"""Kernels that are named."""
WAYS = ("recorded", "compiled")


# Whether the kernels are right


def differences(device: torch.device) -> float:
    """The largest difference of values and gradients from float64, relative to the largest."""
    worst, draws = 0.0, torch.Generator().manual_seed(0)

    def compare(ours: Callable[..., Tensor], true: Callable[..., Tensor], *given: Tensor) -> None:
        nonlocal worst
        sides = []
        for call, dtype in ((ours, torch.float), (true, torch.double)):
            leaves = [t.to(device, dtype).requires_grad_() for t in given]
            y = call(*leaves)
            pull = torch.cos(torch.arange(y.numel(), dtype=dtype, device=device)).view(y.shape)
            sides.append((y.detach(), *torch.autograd.grad(y, leaves, pull)))
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True)))

    for images, channels, rows, columns, groups in CASES:
        x, h = (1 + 2 * torch.randn(images, channels, rows, columns, generator=draws) for _ in range(2))
        added, weight, bias = (torch.randn(s, generator=draws) for s in ((images, channels), (channels,), (channels,)))
        how: dict[str, Any] = {"groups": groups, "eps": 1e-6}
        for silu in (False, True):
            compare(partial(normalised, **how, silu=silu), partial(_norm, **how, silu=silu), x, added, weight, bias)
        compare(partial(_twice, **how), partial(_plainly_twice, **how), x, weight, bias)
        # The gradient of what is joined is a part of another's.
        compare(
            lambda x, h, bias: beside(joined(x, h, bias), h),
            lambda x, h, bias: torch.cat([(x + h + bias[:, None, None]) * SQRT_HALF, h], dim=1),
            *(x, h, bias),
        )
    return worst


def _norm(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, *, silu: bool, groups: int, eps: float) -> Tensor:
    z = F.group_norm(x + added[:, :, None, None], groups, weight, bias, eps)
    return F.silu(z) if silu else z


def _twice(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float) -> Tensor:
    y, same = activated(x, weight, bias, groups, eps)
    return y + 2 * same


def _plainly_twice(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float) -> Tensor:
    return F.silu(F.group_norm(x, groups, weight, bias, eps)) + 2 * x


def learned(device: torch.device, steps: int = 10) -> float:
    """How far the loss of a small network ends from where it ends without kernels and recording, relative to that."""

    def loss(*, compile: bool) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = NCSNpp(height=8, filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0)
        images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        how: dict[str, Any] = {"learning_rate": 1e-2, "precision": "tf32", "validations": 0, "log_every": 1}
        settings = TrainSettings(budget=f"{steps} steps", batch_size=4, compile=compile, **how)
        return train(ModelObjective(Diffusion(network, (1, 8, 8))), (images,), settings, progress=False).losses["loss"]

    plain = loss(compile=False)
    on_gpu = device.type == "cuda"
    with nullcontext() if on_gpu else with_kernels():
        return abs(loss(compile=on_gpu) - plain) / plain


# What is measured


def measure(bench: Bench, work: Callable[[Bench], Figures], way: str) -> dict[str, Any]:
    """One row."""
    bench.fresh()
    start = time.perf_counter()
    with compiled_by_torch() if way == "compiled" else nullcontext():
        found = work(bench)
    torch.compiler.reset()
    kinds = {kind: 1e3 * seconds * bench.batch for kind, seconds in by_kind(found.kernels).items()}
    heaviest = sorted(found.kernels.items(), key=lambda item: -item[1])[:HEAVIEST]
    return {
        "images_per_second": found.images_per_second,
        "warmup_s": found.warmup_seconds,
        "whole_s": time.perf_counter() - start,
        "kernels_ms": kinds,
        "heaviest_ms": {name: 1e3 * seconds * bench.batch for name, seconds in heaviest},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, nargs="*", default=[64, 256], metavar="BATCH")
    parser.add_argument("--sample", type=int, nargs="*", default=[256], metavar="BATCH")
    parser.add_argument("--steps", type=int, default=100, help="of sampling")
    parser.add_argument("--preset", choices=PRESETS, default="paper", help="whose score network it is")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = facts(device) | {"difference": differences(device), "learned": learned(device)}
    print(stamp(report))
    print(f"largest difference from float64: {report['difference']:.1e}", flush=True)
    print(f"difference of a training's loss: {report['learned']:.1e}", flush=True)
    if device.type == "cuda":
        steps = partial(sampling, name=options.preset, steps=options.steps)
        works = [("training", partial(score_step, name=options.preset), size) for size in options.train]
        works += [("sampling", steps, size) for size in options.sample]
        for name, work, size in works:
            rows = {}
            for way in options.ways:
                rows[way] = measure(Bench(device, size, "bf16", quick=False), work, way)
                print(f"{name}, batch {size}, {way}: {rows[way]}", flush=True)
            report[f"{name}, batch {size}"] = rows
            if len(rows) == len(WAYS):
                rate = {way: row["images_per_second"] for way, row in rows.items()}
                print(
                    f"{name}, batch {size}: recorded / compiled {rate['recorded'] / rate['compiled']:.2f}", flush=True
                )
    if options.json:
        write_json(options.json, report)
    return 0 if report["difference"] <= ROUNDING and report["learned"] <= APART else 1


if __name__ == "__main__":
    raise SystemExit(main())
