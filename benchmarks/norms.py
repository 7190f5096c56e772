"""Group norm and SiLU in three ways: alone, and in the training of the score network.

    torch       `torch.nn.GroupNorm`, which turns channels-last memory around: the baseline
    package     `namm.generative.layers.GroupNorm`, in torch, all of it for the compiler to fuse: what the package does
    kernels     sums over pixels by kernels of our own, the rest for the compiler (norm_kernels.py)

    python benchmarks/norms.py [--batch 256] [--steps 60] [--preset paper] [--network kernels package] [--json FILE]

Prints how far values and gradients of the kernels are from float64, milliseconds of a forward and backward pass in
bfloat16 for every size of the network, and images per second, warm-up and kernels of a training step of it by the
last two ways. Without a GPU only the first is done, and that only by triton's interpreter: TRITON_INTERPRET=1. The
exit code is 1 if a difference is beyond rounding.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gpu_tools import Bench, by_kind, training
from namm.experiments import build
from namm.experiments.presets import PRESETS
from namm.files import write_json
from namm.generative import layers
from namm.training.models import ModelObjective
from norm_kernels import group_norm

SIZES = ((64, 64), (64, 128), (32, 128), (32, 256), (16, 128), (16, 256), (8, 128), (8, 256))
"""Pixels a side and channels, as in the score network of the paper on 64×64 images."""
CASES = ((2, 8, 4, 4, 2), (3, 12, 4, 6, 3), (2, 6, 3, 3, 1), (2, 16, 8, 8, 4))
"""Images, channels, rows, columns and groups of what is compared with float64."""
ROUNDING = 1e-5
WAYS = ("kernels", "package")
PACKAGE: dict[type[nn.Module], Callable[..., Tensor]] = {
    layers.ResidualBlock: layers.ResidualBlock.forward,
    layers.GroupNorm: layers.GroupNorm.forward,
}


def differences(device: torch.device) -> float:
    """The largest difference of values and gradients from float64, relative to the largest."""
    worst, draws = 0.0, torch.Generator().manual_seed(0)
    for images, channels, rows, columns, groups in CASES:
        for silu in (False, True):
            x = 1 + 2 * torch.randn(images, channels, rows, columns, generator=draws)
            small = [torch.randn(shape, generator=draws) for shape in ((images, channels), (channels,), (channels,))]
            given = [x.contiguous(memory_format=torch.channels_last), *small]
            ours, true = (
                [t.to(device, dtype).requires_grad_() for t in given] for dtype in (torch.float, torch.double)
            )
            z = F.group_norm(true[0] + true[1][:, :, None, None], groups, true[2], true[3], 1e-6)
            found = group_norm(ours[0], ours[1], ours[2], ours[3], groups, 1e-6, silu=silu), F.silu(z) if silu else z
            pull = torch.randn(x.shape, generator=draws).to(device)
            sides = [
                (y.detach(), *torch.autograd.grad(y, leaves, pull.to(y.dtype)))
                for y, leaves in zip(found, (ours, true), strict=True)
            ]
            errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True)]
            worst = max(worst, *errors)
    return worst


def by_kernels(norm: nn.GroupNorm, x: Tensor, added: Tensor | None, *, silu: bool) -> Tensor:
    """What `norm` computes, of x + `added`, and SiLU of it."""
    x = x.contiguous(memory_format=torch.channels_last)
    return group_norm(x, added, norm.weight, norm.bias, norm.num_groups, norm.eps, silu=silu)


def _block(block: layers.ResidualBlock, x: Tensor, time: Tensor) -> Tensor:
    if not x.is_cuda:  # where operations are counted
        return PACKAGE[layers.ResidualBlock](block, x, time)
    h = F.conv2d(block.resample(by_kernels(block.norm0, x, None, silu=True)), block.conv0.weight, None, padding=1)
    added = block.bias(time) + block.conv0.bias
    h = block.conv1(block.dropout(by_kernels(block.norm1, h, added.float(), silu=True)))
    return (block.shortcut(block.resample(x)) + h) * layers.SQRT_HALF


def _with_silu(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return by_kernels(norm, x, None, silu=True)


def _by_torch(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    return F.silu(norm(x))


def _norm(norm: layers.GroupNorm, x: Tensor) -> Tensor:
    return by_kernels(norm, x, None, silu=False) if x.is_cuda else PACKAGE[layers.GroupNorm](norm, x)


@contextmanager
def kernels_in_the_network() -> Iterator[None]:
    """The score network computes its norms by the kernels in this context."""
    layers.ResidualBlock.forward = _block  # type: ignore[assignment, method-assign]
    layers.GroupNorm.forward = _norm  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        for layer, forward in PACKAGE.items():
            layer.forward = forward


def alone(device: torch.device, batch: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a forward and backward pass by every way, for every size."""
    bench = Bench(device, batch, "bf16", quick=False)
    found: dict[str, dict[str, float]] = {}
    for side, channels in SIZES:
        package = layers.group_norm(channels).to(device)
        theirs = nn.GroupNorm(package.num_groups, channels, package.eps).to(device)
        x = torch.randn(batch, channels, side, side, device=device, dtype=torch.bfloat16)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        pull = torch.randn_like(x)
        ways: dict[str, tuple[nn.GroupNorm, Callable[[nn.GroupNorm, Tensor], Tensor]]] = {
            "torch": (theirs, _by_torch),
            "package": (package, _by_torch),
            "kernels": (package, _with_silu),
        }
        figures = {}
        for name, (norm, way) in ways.items():
            call = torch.compile(partial(way, norm))

            def both(call: Any = call, leaves: Any = (x, norm.weight, norm.bias), pull: Tensor = pull) -> object:
                return torch.autograd.grad(call(leaves[0]), leaves, pull)

            with bench.arithmetic():
                both()
                figures[name] = 1e3 * bench.seconds(both)
        found[f"{side}×{side}×{channels}"] = figures
        torch.compiler.reset()
    return found


def network(device: torch.device, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """A training of the preset's score network by `kernels` or as the `package` has it."""
    bench = Bench(device, options.batch, "bf16", quick=False)
    s = bench.settings("burgers", options.preset)
    model = build.diffusion(s.mdm.network, s.mdm.diffusion, build.dataset(s.data).shape, seed=0)
    bench.fresh()
    with kernels_in_the_network() if way == "kernels" else nullcontext():
        figures = training(bench, ModelObjective(model), model.sample_shape, s.mdm.train, options.steps)
    torch.compiler.reset()
    kinds = {kind: 1e3 * seconds * options.batch for kind, seconds in by_kind(figures.kernels).items()}
    return {"images_per_second": figures.images_per_second, "warmup_s": figures.warmup_seconds, "kernels_ms": kinds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--preset", choices=PRESETS, default="paper", help="whose score network is trained")
    parser.add_argument("--network", nargs="*", choices=WAYS, default=WAYS, help="train it so; nothing: not at all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"difference": differences(device)}
    print(f"largest difference from float64: {report['difference']:.1e}", flush=True)
    if device.type == "cuda":
        report["alone"] = alone(device, options.batch)
        table = Table(f"batch {options.batch}, ms", "torch", "package", "kernels", "torch / kernels")
        for size, ms in report["alone"].items():
            table.add_row(size, *(f"{value:.3f}" for value in ms.values()), f"{ms['torch'] / ms['kernels']:.2f}")
        Console(width=100).print(table)
        report["network"] = {way: network(device, way, options) for way in options.network}
        for way, found in report["network"].items():
            print(f"score step, {way}: {found}", flush=True)
    if options.json:
        write_json(options.json, report)
    return 0 if report["difference"] <= ROUNDING else 1


if __name__ == "__main__":
    raise SystemExit(main())
