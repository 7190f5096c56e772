"""g in four ways: as the gradient that autograd finds, in the package's closed form, recomputed, and by kernels.

    autograd      the gradient of `ICNN.potential`: the baseline
    closed form   `ICNN` itself: all products with x in one matrix product, kept until they are used again
    recomputed    the same sums, with every product of x computed where it is used, padding by index and the projection
                  back to x as sums over channels: made for a compiler that fuses, hopeless without one
    kernels       a kernel of our own for each layer, without gradients: `namm.gpu.Recorded(g)`; needs a GPU and triton

    python benchmarks/forward_map.py [--batch 1024] [--train-batch 256] [--compile] [--json FILE]

Prints images per second without gradients, and with those of the weights and of x, the ratio to autograd, and the
largest difference from the closed form in float64, of the kernels in float32.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gpu_tools import median_seconds
from namm.maps import ICNN
from namm.numerics import backends

BASELINE = "autograd"


def by_autograd(g: ICNN, x: Tensor) -> Tensor:
    """∇P by reverse differentiation, itself differentiable where x is."""
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(g.potential(leaf).sum(), leaf, create_graph=x.requires_grad)
    return torch.lerp(gradient, x, g.strong_convexity)


def closed_form(g: ICNN, x: Tensor) -> Tensor:
    """The package's."""
    y: Tensor = g(x)
    return y


class Wrap(torch.autograd.Function):
    """A torus around an image: (B, C, H, W) -> (B, C, H + 2r, W + 2r)."""

    @staticmethod
    def forward(z: Tensor, reach: int) -> Tensor:
        """Gather, by an index that a compiler can fuse with what makes z."""
        rows, columns = ((torch.arange(n + 2 * reach, device=z.device) + n - reach) % n for n in z.shape[-2:])
        return z[:, :, rows[:, None], columns]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Remember r."""
        ctx.reach = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Fold the borders back, as sums instead of a scatter."""
        for dim in (-1, -2):
            n = grad.shape[dim] - 2 * ctx.reach
            before, inner, after = grad.split([ctx.reach, n, ctx.reach], dim)
            empty = [0, 0] if dim == -2 else []
            rest = n - ctx.reach
            grad = inner + F.pad(after, [*empty, 0, rest]) + F.pad(before, [*empty, rest, 0])
        return grad, None


def recomputed(g: ICNN, x: Tensor) -> Tensor:
    """The closed form of `ICNN` without the big product."""
    k, layers, scale = g.kernel_size, len(g.hidden) + 1, x.shape[-1] * x.shape[1]
    reach = k // 2
    shifts = [(reach - i, reach - j) for i in range(k) for j in range(k)]
    near = [channel.roll(shift, dims=(-2, -1)) for channel in x.split(1, dim=1) for shift in shifts]
    weights = [kernel.flatten(1)[..., None, None].chunk(layers) for kernel in (g.quadratic, g.linear)]

    def product(kernel: Tensor) -> Tensor:
        return sum((image * kernel[:, n] for n, image in enumerate(near[1:], 1)), near[0] * kernel[:, 0])

    quadratic, linear = ([product(kernel) for kernel in kernels] for kernels in weights)
    biases = g.bias[:, None, None].chunk(layers)
    terms = [q.square() + r + b for q, r, b in zip(quadratic, linear, biases, strict=True)]
    states = [terms[0]]
    for kernel, term in zip(g.hidden, terms[1:], strict=True):
        states.append(_conv(F.leaky_relu(states[-1], g.negative_slope), kernel, reach) + term)
    above, below = x.new_ones(()), x.new_full((), g.negative_slope)
    slopes = [torch.where(a > 0, above, below) for a in states]
    deltas = [slopes[-1] * (g.output.sum((0, 2, 3)) / scale)[:, None, None]]
    for kernel, slope in zip(reversed(list(g.hidden)), reversed(slopes[:-1]), strict=True):
        deltas.append(slope * _conv(deltas[-1], kernel.transpose(0, 1).flip(-2, -1), reach))
    layered = list(zip(reversed(deltas), quadratic, *weights, strict=True))

    def back(n: int) -> Tensor:
        parts = [(d * (2 * q * a[:, n] + b[:, n])).sum(1, keepdim=True) for d, q, a, b in layered]
        i, j = shifts[n % len(shifts)]
        return sum(parts[1:], parts[0]).roll((-i, -j), dims=(-2, -1))

    taps = len(shifts)
    gradient = torch.cat(
        [sum((back(c * taps + n) for n in range(1, taps)), back(c * taps)) for c in range(x.shape[1])], dim=1
    )
    return torch.lerp(gradient, x, g.strong_convexity)


def _conv(z: Tensor, kernel: Tensor, reach: int) -> Tensor:
    wrapped: Tensor = Wrap.apply(z, reach)
    layout = torch.channels_last
    return F.conv2d(wrapped.contiguous(memory_format=layout), kernel.contiguous(memory_format=layout))


WAYS: dict[str, Callable[[ICNN, Tensor], Tensor]] = {
    BASELINE: by_autograd,
    "closed form": closed_form,
    "recomputed": recomputed,
}


KERNELS = "kernels"
LIMITS = {KERNELS: 1e-5}
"""What a way may differ by, if not by 1e-10."""


@dataclass(frozen=True)
class Found:
    """One way: images/s forward, and forward and backward where it can, their ratios to autograd, and its error."""

    way: str
    forward: float
    training: float | None
    forward_ratio: float
    training_ratio: float | None
    difference: float

    @property
    def agrees(self) -> bool:
        """Whether it computes the same."""
        return self.difference <= LIMITS.get(self.way, 1e-10)


def differences(g: ICNN) -> dict[str, float]:
    """The largest difference from the closed form in float64, of values and gradients, relative to the largest."""
    g = ICNN.from_config(dict(g.config)).double()
    x = torch.rand(2, g.output.shape[0], 8, 12, dtype=torch.double, requires_grad=True)
    weights = [p for p in g.parameters() if p.requires_grad]
    found: dict[str, list[Tensor]] = {}
    for name, way in WAYS.items():
        y = way(g, x)
        pull = torch.cos(torch.arange(y.numel(), dtype=torch.double)).view_as(y)
        found[name] = [y.detach(), *torch.autograd.grad(y, [x, *weights], pull)]
    true = found["closed form"]
    return {
        name: max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, true, strict=True))
        for name, own in found.items()
    }


def kernels_difference(g: ICNN) -> float:
    """The largest difference of the kernels in float32 from the closed form in float64, relative to the largest."""
    from namm.maps.kernels import icnn

    x = torch.rand(2, g.output.shape[0], 16, 24, device=g.output.device)
    true = ICNN.from_config(dict(g.config)).double().to(x.device)
    true.load_state_dict(g.state_dict())
    y = true(x.double()).detach()
    return float((icnn(g, x, tf32=False) - y).abs().max() / y.abs().max())


def rate(call: Callable[[], object], images: int, device: torch.device) -> float:
    """Images per second."""
    for _ in range(2):  # compiles
        call()
    return images / median_seconds(call, device)


def study(g: ICNN, shape: tuple[int, int, int], batch: int, train_batch: int, *, compile: bool) -> list[Found]:
    """Every way on the same images."""
    device = g.output.device
    x = torch.rand(batch, *shape, device=device)
    leaf = torch.rand(train_batch, *shape, device=device).requires_grad_()
    pull, weights = torch.randn_like(leaf), [p for p in g.parameters() if p.requires_grad]
    rates: dict[str, tuple[float, float | None]] = {}
    error, ways = differences(g), dict(WAYS)
    if device.type == "cuda":
        from namm.maps.kernels import icnn

        ways[KERNELS], error[KERNELS] = icnn, kernels_difference(g)
    for name, way in ways.items():
        fixed = name in (BASELINE, KERNELS)  # the first cannot be compiled twice over, the last is code already
        call = torch.compile(way) if compile and not fixed else way

        @torch.no_grad()
        def forward(call: Callable[[ICNN, Tensor], Tensor] = call) -> Tensor:
            return call(g, x)

        def training(call: Callable[[ICNN, Tensor], Tensor] = call) -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(g, leaf), [leaf, *weights], pull)

        with backends("tf32", device):
            rates[name] = (
                rate(forward, batch, device),
                None if name == KERNELS else rate(training, train_batch, device),
            )
    slow = rates[BASELINE]

    def over(own: float | None, other: float | None) -> float | None:
        return own / other if own and other else None

    return [Found(name, *own, own[0] / slow[0], over(own[1], slow[1]), error[name]) for name, own in rates.items()]


def main(arguments: Sequence[str] | None = None, shape: tuple[int, int, int] = (1, 64, 64)) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--train-batch", type=int, default=256)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g = ICNN(shape[0], 3, 32).to(device)
    found = study(g, shape, options.batch, options.train_batch, compile=options.compile)
    table = Table("g by", "images/s", "× autograd", "with gradients", "× autograd", "difference")
    for row in found:
        table.add_row(
            *(row.way, f"{row.forward:,.0f}", f"{row.forward_ratio:.2f}"),
            *(
                "–" if own is None else f"{own:,.{digits}f}"
                for own, digits in ((row.training, 0), (row.training_ratio, 2))
            ),
            f"{row.difference:.1e}",
        )
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=2))
    return 0 if all(row.agrees for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
