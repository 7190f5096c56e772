"""The viscous Burgers' equation on a periodic line, by forward Euler or by Crank–Nicolson.

    u_t + u u_x = ν u_xx,    f(u)_i = −u_i (u₊ − u₋)/2Δx + ν (u₊ − 2u_i + u₋)/Δx²,    u± = u_{i±1}, indices periodic.

With a = Δt/4Δx and b = νΔt/2Δx², G(u) = Δt/2·f(u) = −a u(u₊ − u₋) + b(u₊ − 2u + u₋), the two steps are

    Euler             v = u + 2 G(u)
    Crank–Nicolson    v − G(v) = r,   r = u + G(u).

**Solving for v.** Row i of the implicit equation is linear in v_i once its neighbours are known,

    v_i = T(v)_i = (r_i + b(v₊ + v₋)) / (1 + 2b + a(v₊ − v₋)),

so a sweep is one elementwise pass. Linearised about a state of speed at most c, T's error propagator has its spectrum
in the ellipse with semi-axes p = 2b/(1+2b) (diffusion, real) and s = 2ac/(1+2b) (advection, imaginary). Second-order
(Chebyshev) relaxation v_{k+1} = v_{k−1} + ω(T(v_k) − v_{k−1}) is optimal for that ellipse and contracts at

    q = (p + s)/(1 + √(1 + s² − p²)) < 1  for every Δt, Δx and ν,    ω = 2/(1 + √(1 + s² − p²)),

which fixes the number of sweeps beforehand: no test of convergence, nothing that a compiler has to break at. With
c twice the largest |u| of the data the count also covers what the linearisation leaves out: fronts that shrink the
denominator, and rough states that grow between two columns.

**Differentiating.** With J = I − G'(v) the gradient is λ = J⁻ᵀ ∂ℓ/∂v, found by the same relaxation on the transposed
(linear) rows, and a tangent of r becomes one of v by J⁻¹, on the rows themselves. Memory is one state per step,
whatever the number of sweeps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from namm.errors import UsageError
from namm.gpu import HAS_TRITON
from namm.numerics import at_least_float32

DT = 0.025
"""The paper's inner time step Δt."""
MAX_SWEEPS = 1000
LONGEST = 2048
"""Points of a line that a kernel holds."""


@dataclass(frozen=True)
class BurgersGrid:
    """Everything a step needs to know besides the state.

    Args:
        dx: Distance Δx between neighbours. Negative where the array runs against x (an image with its rows flipped):
            reversing space and changing Δx's sign are the same thing.
        dt: Time step Δt of one inner step.
        nu: Viscosity ν.
        max_speed: The data's largest |u|, for which Crank–Nicolson must converge fully. A larger one costs sweeps.
    """

    dx: float
    dt: float
    nu: float = 0.05
    max_speed: float = 1.5

    def __post_init__(self) -> None:
        sizes_make_sense = 0 < abs(self.dx) < math.inf and 0 < self.dt < math.inf
        if not (sizes_make_sense and 0 <= self.nu < math.inf and 0 < self.max_speed < math.inf):
            raise UsageError(
                f"{self}: dx must not be 0, dt and max_speed must be positive, nu not negative, all finite."
            )

    @property
    def advection(self) -> float:
        """Weight a = Δt/4Δx of the advection stencil in half a step."""
        return self.dt / (4 * self.dx)

    @property
    def diffusion(self) -> float:
        """Weight b = νΔt/2Δx² of the diffusion stencil in half a step."""
        return self.nu * self.dt / (2 * self.dx * self.dx)

    @property
    def covered_speed(self) -> float:
        """Speed c that the sweeps are tuned for."""
        return 2 * self.max_speed

    @property
    def relaxation(self) -> float:
        """Chebyshev's ω."""
        p, s = self._axes
        return 2 / (1 + math.sqrt(1 + s**2 - p**2))

    @property
    def contraction(self) -> float:
        """Factor q = ω(p + s)/2 by which one sweep shrinks the error."""
        return sum(self._axes) * self.relaxation / 2

    def sweeps(self, dtype: torch.dtype) -> int:
        """Sweeps that leave nothing but `dtype`'s rounding: qᵏ ≤ ε, and one more for the plain first sweep."""
        if self.contraction ** (MAX_SWEEPS - 1) > torch.finfo(dtype).eps:
            raise UsageError(
                f"{self}: a Crank–Nicolson step would take more than {MAX_SWEEPS} sweeps, because u crosses "
                f"{self.max_speed * self.dt / abs(self.dx):.3g} grid cells in one dt. Use a smaller dt."
            )
        return math.ceil(math.log(torch.finfo(dtype).eps) / math.log(self.contraction)) + 1

    @property
    def _axes(self) -> tuple[float, float]:
        """The ellipse's semi-axes p (diffusion) and s (advection at speed c)."""
        centre = 1 + 2 * self.diffusion
        return 2 * self.diffusion / centre, 2 * abs(self.advection) * self.covered_speed / centre


class Step(Protocol):
    """One inner step: the state u(t) along axis `dim` to u(t + Δt), all other axes being batch."""

    def __call__(self, u: Tensor, grid: BurgersGrid, dim: int = -1) -> Tensor:
        """Advance `u` by Δt."""


def rhs(u: Tensor, grid: BurgersGrid, dim: int = -1) -> Tensor:
    """f(u), the semi-discrete right-hand side. u: (..., n, ...) with space on `dim`."""
    return _half_step(u, grid, dim) * (2 / grid.dt)


def euler(u: Tensor, grid: BurgersGrid, dim: int = -1) -> Tensor:
    """Forward Euler, u + Δt f(u): first order, stable for |u|Δt/|Δx| and 2νΔt/Δx² well below 1."""
    u = at_least_float32(u)
    return u + 2 * _half_step(u, grid, dim)


def crank_nicolson(u: Tensor, grid: BurgersGrid, dim: int = -1) -> Tensor:
    """Crank–Nicolson, v = u + Δt/2 (f(u) + f(v)): second order, solved to rounding for |u| ≤ `grid.max_speed`."""
    u = at_least_float32(u)
    r = u + _half_step(u, grid, dim)
    # A compiler is at work, and no transformation of torch.func, for which the kernel has no rules.
    compiled_alone = torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    if compiled_alone and _has_kernel(r, dim):
        return _by_kernel(r, grid)
    half_step = _ImplicitHalfStep if torch.compiler.is_compiling() else _ImplicitHalfStepForward
    v: Tensor = half_step.apply(r, grid, dim)
    return v


def advance(u: Tensor, grid: BurgersGrid, steps: int, step: Step = crank_nicolson, dim: int = -1) -> Tensor:
    """The state after `steps` inner steps, same shape as `u`."""
    for _ in range(steps):
        u = step(u, grid, dim)
    return u


def rollout(u: Tensor, grid: BurgersGrid, columns: int, inner_steps: int = 5, step: Step = crank_nicolson) -> Tensor:
    """Trajectory (..., n, columns) of the initial states u: (..., n).

    Column j is the state after inner_steps·(j + 1) inner steps, so the initial state itself is not in it.
    """
    states = []
    for _ in range(columns):
        u = advance(u, grid, inner_steps, step)
        states.append(u)
    return torch.stack(states, dim=-1)


def _neighbours(u: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """u₊ and u₋ on the periodic line."""
    return u.roll(-1, dim), u.roll(1, dim)


def _half_step(u: Tensor, grid: BurgersGrid, dim: int) -> Tensor:
    """G(u) = Δt/2·f(u)."""
    right, left = _neighbours(u, dim)
    return grid.diffusion * (right + left - 2 * u) - grid.advection * u * (right - left)


def _relax(sweep: Callable[[Tensor], Tensor], start: Tensor, grid: BurgersGrid) -> Tensor:
    """Fixed point of `sweep` by second-order relaxation."""
    before, now = start, sweep(start)
    for _ in range(grid.sweeps(start.dtype) - 1):
        before, now = now, torch.lerp(before, sweep(now), grid.relaxation)
    return now


def _diagonal(right: Tensor, left: Tensor, grid: BurgersGrid) -> Tensor:
    """J's diagonal 1 + 2b + a(v₊ − v₋), kept at or above half its resting value.

    What is held is a front so steep that it breaks within the step (Δt·u_x < −1 − 2b), close to where the equation
    loses its solution: the sweeps then stay about as tame as Euler's instead of dividing by zero.
    """
    centre = 1 + 2 * grid.diffusion
    return (centre + grid.advection * (right - left)).clamp(min=centre / 2)


def _has_kernel(r: Tensor, dim: int) -> bool:
    """Whether there is a kernel for all sweeps together; a compiler would write one for each, which takes it long.

    It is for float32 on a GPU and for lines along the last axis but one, as images of trajectories have them.
    """
    fits = dim % r.ndim == r.ndim - 2 and r.shape[dim] <= LONGEST
    return HAS_TRITON and r.is_cuda and r.dtype == torch.float32 and fits


def _by_kernel(r: Tensor, grid: BurgersGrid) -> Tensor:
    from namm.simulators.burgers_kernels import solve

    return solve(r, grid.advection, grid.diffusion, grid.covered_speed, grid.relaxation, grid.sweeps(r.dtype))


class _ImplicitHalfStep(torch.autograd.Function):
    """r ↦ v with v − G(v) = r, differentiated by the implicit function theorem."""

    generate_vmap_rule = True

    @staticmethod
    def forward(r: Tensor, grid: BurgersGrid, dim: int) -> Tensor:
        def sweep(v: Tensor) -> Tensor:
            right, left = _neighbours(v, dim)
            return (r + grid.diffusion * (right + left)) / _diagonal(right, left, grid)

        return _relax(sweep, r, grid)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, BurgersGrid, int], output: Tensor) -> None:
        ctx.save_for_backward(output)
        _, ctx.grid, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grid, dim = ctx.grid, ctx.dim
        a, b = grid.advection, grid.diffusion
        # Faster states lie outside the ellipse: held at its edge, their gradient is rough but cannot explode.
        v = ctx.saved_tensors[0].clamp(-grid.covered_speed, grid.covered_speed)
        right, left = _neighbours(v, dim)
        scale = 1 / _diagonal(right, left, grid)
        # Row i of Jᵀ is column i of J: the neighbours' own coefficients −b − a v₊ and −b + a v₋.
        from_right, from_left, source = scale * (b + a * right), scale * (b - a * left), scale * grad

        def sweep(adjoint: Tensor) -> Tensor:
            after, before = _neighbours(adjoint, dim)
            return torch.addcmul(torch.addcmul(source, from_right, after), from_left, before)

        return _relax(sweep, source, grid), None, None


class _ImplicitHalfStepForward(_ImplicitHalfStep):
    """The same with a forward derivative, which a compiler refuses to see."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, BurgersGrid, int], output: Tensor) -> None:
        _ImplicitHalfStep.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """J⁻¹ times the tangent of r, by relaxation on the linear rows."""
        grid, dim = ctx.grid, ctx.dim
        a, b = grid.advection, grid.diffusion
        v = ctx.saved_tensors[0].clamp(-grid.covered_speed, grid.covered_speed)
        right, left = _neighbours(v, dim)
        scale = 1 / _diagonal(right, left, grid)
        from_right, from_left, source = scale * (b - a * v), scale * (b + a * v), scale * tangent

        def sweep(moved: Tensor) -> Tensor:
            after, before = _neighbours(moved, dim)
            return torch.addcmul(torch.addcmul(source, from_right, after), from_left, before)

        return _relax(sweep, source, grid)
