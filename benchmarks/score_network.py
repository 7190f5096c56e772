"""The score network on a GPU in two ways: its training and its sampling.

    compiled    by torch's compiler, with CUDA graphs: what the package does, the baseline
    recorded    as it is written, with kernels of our own around its convolutions (block_kernels.py), its launches
                recorded once as one CUDA graph: nothing is compiled but four kernels

    python benchmarks/score_network.py [--train 64 256] [--sample 256] [--steps 100] [--preset paper]
                                       [--ways recorded compiled] [--json FILE]

Prints how far values and gradients of the kernels are from float64, and the loss of a short training from the same
without kernels and recording. Then, for every batch, images (of sampling images × steps) per second, warm-up and the
time in each kind of kernel by both ways, and the ratio. Without a GPU only the comparisons are made, by triton's
interpreter: TRITON_INTERPRET=1. The exit code is 1 if a difference is beyond rounding.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from block_kernels import joined, normalised
from gpu import sampling, score_step
from gpu_tools import Bench, Figures, by_kind
from namm.experiments.presets import PRESETS
from namm.files import write_json
from namm.generative import Diffusion, NCSNpp, diffusion, layers
from namm.training.models import ModelObjective
from namm.training.settings import TrainSettings
from namm.training.trainer import Trainer, train

CASES = ((2, 8, 4, 4, 2), (3, 12, 4, 6, 3), (2, 6, 3, 3, 1), (2, 32, 8, 8, 8), (1, 192, 2, 2, 32))
"""Images, channels, rows, columns and groups of what is compared with float64."""
ROUNDING, APART = 1e-5, 1e-3
"""Largest differences of kernels, and of the losses of a training."""
WARM_UP = 3
"""Calls before a recording, in which libraries choose their algorithms."""
WAYS = ("recorded", "compiled")
EMBED, FIR = NCSNpp._embed, layers.fir
ADDED: dict[nn.Module, Tensor] = {}
"""What every block will add to its first convolution."""


# Whether the kernels are right


def differences(device: torch.device) -> float:
    """The largest difference of values and gradients from float64, relative to the largest."""
    worst, draws = 0.0, torch.Generator().manual_seed(0)

    def compare(ours: Callable[..., Tensor], true: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
        nonlocal worst
        sides, pull = [], torch.randn(given[0].shape, generator=draws).to(device)
        for call, dtype in ((ours, torch.float), (true, torch.double)):
            leaves = [t.to(device, dtype).requires_grad_() for t in given]
            y = call(*leaves)
            sides.append((y.detach(), *torch.autograd.grad(y, leaves, pull.to(dtype))))
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True)))

    for images, channels, rows, columns, groups in CASES:
        x, h = (1 + 2 * torch.randn(images, channels, rows, columns, generator=draws) for _ in range(2))
        added, weight, bias = (torch.randn(s, generator=draws) for s in ((images, channels), (channels,), (channels,)))
        for silu in (False, True):
            true = partial(_norm_of_sum, groups=groups, silu=silu)
            ours = partial(normalised, groups=groups, eps=1e-6, silu=silu)
            compare(ours, true, [x, added, weight, bias])
        compare(joined, lambda x, h, bias: (x + h + bias[:, None, None]) * layers.SQRT_HALF, [x, h, bias])
    return worst


def _norm_of_sum(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, *, groups: int, silu: bool) -> Tensor:
    z = F.group_norm(x + added[:, :, None, None], groups, weight, bias, 1e-6)
    return F.silu(z) if silu else z


# The network with the kernels


def by_kernels(norm: nn.GroupNorm, x: Tensor, added: Tensor | None = None, **how: Any) -> Tensor:
    """What `norm` computes, of x + `added`, and what follows it."""
    return normalised(x, added, norm.weight, norm.bias, norm.num_groups, norm.eps, **how)


def embedded(network: NCSNpp, x: Tensor, t: Tensor) -> Tensor:
    """`NCSNpp._embed`, which also hands to every block what it adds to its first convolution: one product for all."""
    tau = EMBED(network, x, t)
    blocks = [module for module in network.modules() if isinstance(module, layers.ResidualBlock)]
    weight = torch.cat([block.bias.weight for block in blocks])
    biases: list[Any] = [bias for block in blocks for bias in (block.bias.bias, block.conv0.bias)]
    added = F.linear(F.silu(tau), weight).float() + torch.cat(biases[::2]) + torch.cat(biases[1::2])
    for block, part in zip(blocks, added.split([block.conv0.out_channels for block in blocks], dim=1), strict=True):
        ADDED[block] = part
    return tau


def block(block: layers.ResidualBlock, x: Tensor, _: Tensor) -> Tensor:
    """`ResidualBlock.forward`: biases go where the kernels take them."""
    h = by_kernels(block.norm0, x, silu=True)
    h = F.conv2d(block.resample(h), block.conv0.weight, padding=1)
    h = by_kernels(block.norm1, h, ADDED.pop(block), silu=True, dropout=block.dropout.p if block.training else 0.0)
    h = F.conv2d(h, block.conv1.weight, padding=1)
    bias: Any = block.conv1.bias
    x = block.resample(x)
    if isinstance(block.shortcut, nn.Conv2d):
        x, bias = F.conv2d(x, block.shortcut.weight), bias + block.shortcut.bias
    return joined(x, h, bias)


def norm(norm: layers.GroupNorm, x: Tensor) -> Tensor:
    """`GroupNorm.forward`."""
    return by_kernels(norm, x, silu=False)


@cache
def _filter(rows: int, columns: int, stride: int, before: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return FIR(rows, columns, stride, before, like=torch.empty((), device=device, dtype=dtype))


def fir(rows: int, columns: int, stride: int, before: int, *, like: Tensor) -> Tensor:
    """`layers.fir`, made once: a compiler would see that it is always the same."""
    return _filter(rows, columns, stride, before, like.device, like.dtype)


@contextmanager
def with_kernels(device: torch.device) -> Iterator[None]:
    """The score network computes by the kernels in this context, on `device` alone: operations are counted on a CPU."""

    def there(ours: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda module, x, *rest: (ours if x.device.type == device.type else theirs)(module, x, *rest)

    with ExitStack() as stack:
        for layer, ours in ((layers.ResidualBlock, block), (layers.GroupNorm, norm)):
            stack.enter_context(patch.object(layer, "forward", there(ours, layer.forward)))
        stack.enter_context(patch.object(NCSNpp, "_embed", there(embedded, EMBED)))
        stack.enter_context(patch.object(layers, "fir", fir))
        yield


# Launches, recorded


class Recorded:
    """`call(*tensors)`, its launches recorded as a CUDA graph by the first call; without a GPU the call itself.

    What it returns is written to the same memory by the next call. Sizes must stay what they are.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: Any = None

    def __call__(self, *tensors: Tensor) -> Any:
        """What `call` returns."""
        if not tensors[0].is_cuda:
            return self.call(*tensors)
        graph = self.graph or self._record(tensors)
        for kept, tensor in zip(self.inputs, tensors, strict=True):
            kept.copy_(tensor)
        graph.replay()
        return self.outputs

    def _record(self, tensors: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        self.inputs = tuple(tensor.clone() for tensor in tensors)
        # Where autocast is on outside, it keeps weights that it has rounded: they would not be in the recording.
        afresh = torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
        with afresh if torch.is_autocast_enabled("cuda") else nullcontext():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self.call(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outputs = self.call(*self.inputs)
        return graph


class RecordedBatch:
    """In place of `namm.generative.compiled.FixedBatch`, for whole batches."""

    def __init__(self, network: nn.Module, size: int, *_: object) -> None:
        self.size, self.call = size, Recorded(network)

    def __call__(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(B, C, H, W) and (B,) -> (B, C, H, W)."""
        output: Tensor = self.call(y_t, t)
        return output.clone()


@contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """What the package would compile is recorded in this context."""
    gradients, own = Trainer._gradients, {}

    def by_replay(trainer: Trainer, *tensors: Tensor) -> Any:
        if trainer not in own:
            own[trainer] = Recorded(partial(gradients, trainer))
        losses = own[trainer](*tensors)
        return {name: loss.detach().clone() for name, loss in losses.items()}

    with (
        with_kernels(device),
        patch.object(ModelObjective, "compile", lambda *_, **__: None),
        patch.object(Trainer, "_gradients", by_replay),
        patch.object(diffusion, "FixedBatch", RecordedBatch),
    ):
        yield


def learned(device: torch.device, steps: int = 5) -> float:
    """How far the loss of a small network ends from where it ends without kernels and recording, relative to that."""

    def loss() -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = NCSNpp(height=8, filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0)
        images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        how: dict[str, Any] = {"learning_rate": 1e-2, "precision": "tf32", "validations": 0, "log_every": 1}
        settings = TrainSettings(budget=f"{steps} steps", batch_size=4, **how)
        return train(ModelObjective(Diffusion(network, (1, 8, 8))), (images,), settings, progress=False).losses["loss"]

    plain = loss()
    with recorded(device):
        return abs(loss() - plain) / plain


# What is measured


def measure(bench: Bench, work: Callable[..., Figures], way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    bench.fresh()
    start = time.perf_counter()
    with recorded(bench.device) if way == "recorded" else ExitStack():
        found = work(bench, options.preset, options.steps)
    torch.compiler.reset()
    kinds = {kind: 1e3 * seconds * bench.batch for kind, seconds in by_kind(found.kernels).items()}
    return {
        "images_per_second": found.images_per_second,
        "warmup_s": found.warmup_seconds,
        "whole_s": time.perf_counter() - start,
        "kernels_ms": kinds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, nargs="*", default=[64, 256], metavar="BATCH")
    parser.add_argument("--sample", type=int, nargs="*", default=[256], metavar="BATCH")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--preset", choices=PRESETS, default="paper", help="whose score network it is")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {"difference": differences(device), "learned": learned(device)}
    print(f"largest difference from float64: {report['difference']:.1e}", flush=True)
    print(f"difference of a training's loss: {report['learned']:.1e}", flush=True)
    if device.type == "cuda":
        works = [("training", score_step, size) for size in options.train]
        works += [("sampling", sampling, size) for size in options.sample]
        for name, work, size in works:
            rows = {}
            for way in options.ways:
                rows[way] = measure(Bench(device, size, "bf16", quick=False), work, way, options)
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
