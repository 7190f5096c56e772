"""The implicit half of a Crank–Nicolson step of Burgers' equation for a GPU: all sweeps in one kernel.

In the notation of `namm.simulators.burgers`: `solve` finds v with v − G(v) = r, `solve_adjoint` λ with Jᵀ λ = ∂ℓ/∂v, by
the relaxation of that module, their oracle. A program holds a few whole lines of points, reads them once and writes
them once. Both are operators of torch: a compiler takes them as they are, instead of writing a kernel for every sweep.

`by_kernel` is a step like `crank_nicolson`, for float32 and space on the last axis but one. Importing this needs
triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from namm.numerics import at_least_float32
from namm.simulators.burgers import BurgersGrid, _half_step

NUMBERS = 2**11
"""Of a program, about."""


@triton.jit
def _own(n, lines, N: tl.constexpr, LINES: tl.constexpr):
    """Places of the points of a program, which of them there are, and whose neighbours they are."""
    i = tl.arange(0, N)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    there = (i < n)[:, None] & (line < lines)[None, :]
    place = (tl.program_id(0).to(tl.int64) * n + i)[:, None] * lines + line[None, :]
    right = tl.where(i + 1 < n, i + 1, 0)
    left = tl.where((i > 0) & (i < n), i - 1, n - 1)
    return place, there, tl.broadcast_to(right[:, None], (N, LINES)), tl.broadcast_to(left[:, None], (N, LINES))


@triton.jit
def _diagonal(right, left, a, b):
    """1 + 2b + a(v₊ − v₋), at least half of what it is at rest."""
    return tl.maximum(1 + 2 * b + a * (right - left), 0.5 + b)


@triton.jit
def _forward(r, out, n, lines, a, b, omega, sweeps, N: tl.constexpr, LINES: tl.constexpr):
    """v."""
    place, there, after, before = _own(n, lines, N, LINES)
    source = tl.load(r + place, mask=there, other=0.0)
    last, now = source, source
    for k in range(sweeps):
        right, left = tl.gather(now, after, 0), tl.gather(now, before, 0)
        swept = (source + b * (right + left)) / _diagonal(right, left, a, b)
        following = tl.where(k > 0, last + omega * (swept - last), swept)
        last = now
        now = following
    tl.store(out + place, now, mask=there)


@triton.jit
def _backward(v, grad, out, n, lines, a, b, speed, omega, sweeps, N: tl.constexpr, LINES: tl.constexpr):
    """λ."""
    place, there, after, before = _own(n, lines, N, LINES)
    state = tl.load(v + place, mask=there, other=0.0)
    state = tl.minimum(tl.maximum(state, -speed), speed)
    right, left = tl.gather(state, after, 0), tl.gather(state, before, 0)
    scale = 1 / _diagonal(right, left, a, b)
    from_right, from_left = scale * (b + a * right), scale * (b - a * left)
    source = scale * tl.load(grad + place, mask=there, other=0.0)
    last, now = source, source
    for k in range(sweeps):
        swept = source + from_right * tl.gather(now, after, 0) + from_left * tl.gather(now, before, 0)
        following = tl.where(k > 0, last + omega * (swept - last), swept)
        last = now
        now = following
    tl.store(out + place, now, mask=there)


@torch.library.custom_op("namm::burgers_solve", mutates_args=())
def solve(r: Tensor, a: float, b: float, speed: float, omega: float, sweeps: int) -> Tensor:
    """v of r (..., n, lines)."""
    r = r.contiguous()
    out = torch.empty_like(r)
    grid, sizes = _cut(r)
    _forward[grid](r, out, *r.shape[-2:], a, b, omega, sweeps, **sizes)
    return out


@torch.library.custom_op("namm::burgers_solve_adjoint", mutates_args=())
def solve_adjoint(v: Tensor, grad: Tensor, a: float, b: float, speed: float, omega: float, sweeps: int) -> Tensor:
    """λ of v and ∂ℓ/∂v, both (..., n, lines)."""
    v, grad = v.contiguous(), grad.contiguous()
    out = torch.empty_like(v)
    grid, sizes = _cut(v)
    _backward[grid](v, grad, out, *v.shape[-2:], a, b, speed, omega, sweeps, **sizes)
    return out


@solve.register_fake
def _(r: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(r, memory_format=torch.contiguous_format)


@solve_adjoint.register_fake
def _(v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.how = inputs[1:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return solve_adjoint(ctx.saved_tensors[0], grad, *ctx.how), *(None,) * len(ctx.how)


solve.register_autograd(_differentiate, setup_context=_remember)


def _cut(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """How (..., n, lines) is shared by programs."""
    n, lines = x.shape[-2:]
    whole = triton.next_power_of_2(n)
    together = max(1, min(triton.next_power_of_2(lines), NUMBERS // whole))
    return (x.numel() // (n * lines), -(-lines // together)), {"N": whole, "LINES": together}


def by_kernel(u: Tensor, grid: BurgersGrid, dim: int = -2) -> Tensor:
    """Crank–Nicolson."""
    u = at_least_float32(u)
    assert (dim, u.dtype) == (-2, torch.float32)
    coefficients = (grid.advection, grid.diffusion, grid.covered_speed, grid.relaxation)
    v: Tensor = solve(u + _half_step(u, grid, dim), *coefficients, grid.sweeps(u.dtype))
    return v
