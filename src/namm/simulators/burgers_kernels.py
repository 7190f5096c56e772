"""The implicit half of a Crank–Nicolson step of Burgers' equation for a GPU: all sweeps in one kernel.

In the notation of `namm.simulators.burgers`, the oracle of both: `solve` finds v with v − G(v) = r, and its gradient is
λ with Jᵀ λ = ∂ℓ/∂v, found by the same relaxation. A program has a few whole lines of points to itself. Their states are
handed from point to point through memory, which a barrier after every sweep puts in order.

Both are operators of torch: a compiler takes them as they are, instead of writing a kernel for every sweep. Importing
this needs triton, which comes with torch where that knows GPUs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2**10
"""Numbers that one program of the kernel handles, about."""


@triton.jit
def _diagonal(right, left, a, b):
    """1 + 2b + a(v₊ − v₋), at least half of what it is at rest."""
    return tl.maximum(1 + 2 * b + a * (right - left), 0.5 + b, tl.PropagateNan.ALL)


@triton.jit
def _held(v, speed):
    """v between −c and c."""
    return tl.minimum(tl.maximum(v, -speed, tl.PropagateNan.ALL), speed, tl.PropagateNan.ALL)


@triton.jit
def _neighbours(line, right, left, there):
    """What memory holds at the right and left neighbours."""
    return tl.load(line + right, mask=there, other=0.0), tl.load(line + left, mask=there, other=0.0)


@triton.jit
def _sweep(after, before, source, from_right, from_left, a, b, ADJOINT: tl.constexpr):
    """One sweep: of the transposed rows, which are linear, or of T."""
    linear = source + from_right * after + from_left * before
    return linear if ADJOINT else (source + b * (after + before)) / _diagonal(after, before, a, b)


@triton.jit
def _relax(
    v,
    grad,
    out,
    other,
    n,
    lines,
    a,
    b,
    speed,
    omega,
    sweeps,
    ADJOINT: tl.constexpr,
    N: tl.constexpr,
    LINES: tl.constexpr,
):
    """Into `out` the solution for the right-hand side r in `v`; or λ for the solution `v` and its `grad`.

    `other` is as large as `out`, to write in. Relaxation keeps two states. They may not begin as the same one: triton
    3.6 and 3.8 take two variables of a loop that begin alike, the second of which becomes the first, for a single one.
    So the first sweep stands before the loop.
    """
    i = tl.arange(0, N)
    line = (tl.program_id(1) * LINES + tl.arange(0, LINES))[None, :]
    there = (i < n)[:, None] & (line < lines)
    first = tl.program_id(0).to(tl.int64) * n
    place = (first + i)[:, None] * lines + line
    right = (first + tl.where(i + 1 < n, i + 1, 0))[:, None] * lines + line
    left = (first + tl.where(i > 0, i - 1, n - 1))[:, None] * lines + line
    after, before = _neighbours(v, right, left, there)
    if ADJOINT:
        after, before = _held(after, speed), _held(before, speed)
        scale = 1 / _diagonal(after, before, a, b)
        from_right, from_left = scale * (b + a * after), scale * (b - a * before)
        source = scale * tl.load(grad + place, mask=there, other=0.0)
        tl.store(other + place, source, mask=there)
        tl.debug_barrier()
        after, before = _neighbours(other, right, left, there)
    else:
        source = tl.load(v + place, mask=there, other=0.0)
        from_right, from_left = source, source
    last, now = source, _sweep(after, before, source, from_right, from_left, a, b, ADJOINT)
    one, two = out, other
    for _ in range(sweeps - 1):
        tl.store(one + place, now, mask=there)
        tl.debug_barrier()
        after, before = _neighbours(one, right, left, there)
        following = last + omega * (_sweep(after, before, source, from_right, from_left, a, b, ADJOINT) - last)
        last, now = now, following
        one, two = two, one
    tl.debug_barrier()
    tl.store(out + place, now, mask=there)


def _launch(v: Tensor, grad: Tensor, *how: float, adjoint: bool) -> Tensor:
    """Share (..., n, lines) among programs, each with whole lines of about `NUMBERS` points."""
    v, grad = v.contiguous(), grad.contiguous()
    out, other = torch.empty_like(v), torch.empty_like(v)
    n, lines = v.shape[-2:]
    whole = triton.next_power_of_2(n)
    together = max(1, min(triton.next_power_of_2(lines), NUMBERS // whole))
    with torch.cuda.device_of(v):
        programs = v.numel() // (n * lines), -(-lines // together)
        _relax[programs](v, grad, out, other, n, lines, *how, ADJOINT=adjoint, N=whole, LINES=together)
    return out


@torch.library.custom_op("namm::burgers_solve", mutates_args=())
def solve(r: Tensor, a: float, b: float, speed: float, omega: float, sweeps: int) -> Tensor:
    """v of r (..., n, lines), float32."""
    return _launch(r, r, a, b, speed, omega, sweeps, adjoint=False)


@torch.library.custom_op("namm::burgers_solve_adjoint", mutates_args=())
def solve_adjoint(v: Tensor, grad: Tensor, a: float, b: float, speed: float, omega: float, sweeps: int) -> Tensor:
    """λ of v and ∂ℓ/∂v, both (..., n, lines), float32."""
    return _launch(v, grad, a, b, speed, omega, sweeps, adjoint=True)


@solve.register_fake
@solve_adjoint.register_fake
def _(r: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(r, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.how = inputs[1:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return solve_adjoint(ctx.saved_tensors[0], grad, *ctx.how), *(None,) * len(ctx.how)


solve.register_autograd(_differentiate, setup_context=_remember)
