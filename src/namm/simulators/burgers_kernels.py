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
def _own(n, lines, N: tl.constexpr, LINES: tl.constexpr):
    """The points of a program: their places, those of their right and left neighbours, and which of them there are."""
    i = tl.arange(0, N)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    there = (i < n)[:, None] & (line < lines)[None, :]
    first = tl.program_id(0).to(tl.int64) * n
    right, left = tl.where(i + 1 < n, i + 1, 0), tl.where(i > 0, i - 1, n - 1)
    place = (first + i)[:, None] * lines + line[None, :]
    return (
        place,
        (first + right)[:, None] * lines + line[None, :],
        (first + left)[:, None] * lines + line[None, :],
        there,
    )


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


# Relaxation keeps two states. They may not begin as the same one: triton 3.6 and 3.8 take two variables of a loop that
# begin alike, the second of which becomes the first, for a single one. So the first sweep stands before the loop.


@triton.jit
def _solve(r, out, other, n, lines, a, b, omega, sweeps, N: tl.constexpr, LINES: tl.constexpr):
    """v into `out`; `other` is as large, to write in."""
    place, right, left, there = _own(n, lines, N, LINES)
    source = tl.load(r + place, mask=there, other=0.0)
    after, before = _neighbours(r, right, left, there)
    last, now = source, (source + b * (after + before)) / _diagonal(after, before, a, b)
    one, two = out, other
    for _ in range(sweeps - 1):
        tl.store(one + place, now, mask=there)
        tl.debug_barrier()
        after, before = _neighbours(one, right, left, there)
        swept = (source + b * (after + before)) / _diagonal(after, before, a, b)
        following = last + omega * (swept - last)
        last, now = now, following
        one, two = two, one
    tl.debug_barrier()
    tl.store(out + place, now, mask=there)


@triton.jit
def _solve_back(v, grad, out, other, n, lines, a, b, speed, omega, sweeps, N: tl.constexpr, LINES: tl.constexpr):
    """λ into `out`; `other` is as large, to write in."""
    place, right, left, there = _own(n, lines, N, LINES)
    after, before = _neighbours(v, right, left, there)
    after, before = _held(after, speed), _held(before, speed)
    scale = 1 / _diagonal(after, before, a, b)
    from_right, from_left = scale * (b + a * after), scale * (b - a * before)
    source = scale * tl.load(grad + place, mask=there, other=0.0)
    tl.store(other + place, source, mask=there)
    tl.debug_barrier()
    after, before = _neighbours(other, right, left, there)
    last, now = source, source + from_right * after + from_left * before
    one, two = out, other
    for _ in range(sweeps - 1):
        tl.store(one + place, now, mask=there)
        tl.debug_barrier()
        after, before = _neighbours(one, right, left, there)
        swept = source + from_right * after + from_left * before
        following = last + omega * (swept - last)
        last, now = now, following
        one, two = two, one
    tl.debug_barrier()
    tl.store(out + place, now, mask=there)


@torch.library.custom_op("namm::burgers_solve", mutates_args=())
def solve(r: Tensor, a: float, b: float, speed: float, omega: float, sweeps: int) -> Tensor:
    """v of r (..., n, lines), float32."""
    r = r.contiguous()
    out, other = torch.empty_like(r), torch.empty_like(r)
    grid, sizes = _cut(r)
    with torch.cuda.device_of(r):
        _solve[grid](r, out, other, *r.shape[-2:], a, b, omega, sweeps, **sizes)
    return out


@torch.library.custom_op("namm::burgers_solve_adjoint", mutates_args=())
def solve_adjoint(v: Tensor, grad: Tensor, a: float, b: float, speed: float, omega: float, sweeps: int) -> Tensor:
    """λ of v and ∂ℓ/∂v, both (..., n, lines), float32."""
    v, grad = v.contiguous(), grad.contiguous()
    out, other = torch.empty_like(v), torch.empty_like(v)
    grid, sizes = _cut(v)
    with torch.cuda.device_of(v):
        _solve_back[grid](v, grad, out, other, *v.shape[-2:], a, b, speed, omega, sweeps, **sizes)
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
