"""Incompressible flow on a periodic square, on a staggered (MAC) grid.

    ∂V/∂t + ∇·(V V) = −∇p + ν ∇²V + F sin(k y) e_x − μ V,    ∇·V = 0,    V = (u, v)

**Grid.** A velocity is a tensor (…, 2, n, n); its last two axes are x and y, in this order. With spacing h, u[i, j]
is the x-velocity on the face ((i+1)h, (j+½)h) of cell (i, j), v[i, j] the y-velocity on its face ((i+½)h, (j+1)h).
One-cell differences then land where they are wanted (±: index ±1 along the named axis, periodic):

    divergence   ((u − u₋ₓ) + (v − v₋ᵧ)) / h      at cell centres
    vorticity    ((v₊ₓ − v) − (u₊ᵧ − u)) / h      at cell corners

**Step.** Forward Euler of everything but the pressure, then one projection. Momentum moves in finite volumes:
component c changes by −Σ_a (Φ_a − Φ_a₋ₐ) over the axes a, where in units of h/Δt

    Φ_a = q c_up + |q|(1 − |q|)/2 · S_up − (νΔt/h²) D,    D = c₊ₐ − c,
    S = 2 D D₋ₐ/(D + D₋ₐ) where D D₋ₐ > 0, else 0.

q is the Courant number of the face, Δt/h times the mean of V_a and its neighbour along c's own axis; "up" is the
face's upwind side; S is van Leer's limited difference: Lax–Wendroff where c is smooth, upwind at its extrema. The last
term of Φ is the five-point Laplacian.

**Projection.** V − ∇φ with ∇²φ = ∇·V. The differences of ∇ are forward, those of ∇· backward, and ∇² is their product,
the five-point Laplacian: its eigenvalues −4(sin²(πl/n) + sin²(πm/n))/h² are known, so an FFT inverts it exactly. As
∇ = −(∇·)ᵀ, this is the orthogonal projection: no velocity without divergence is nearer. The mean flow stays; h cancels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from namm.errors import DataError, UsageError
from namm.numerics import at_least_float32

X, Y = -2, -1
"""The axes of space; also, counted from the end, the component along each."""
Weights = tuple[float, float]
"""One for x and one for y."""

LOG_VARIANCE = 0.25
"""Width of the initial fields' spectrum, in ln k."""


@dataclass(frozen=True)
class FluidGrid:
    """Everything a step needs to know besides the velocity; by default the paper's Kolmogorov flow.

    Args:
        size: Cells n along a side.
        extent: Length of a side.
        dt: Time step Δt.
        viscosity: ν, one over the Reynolds number.
        forcing: Magnitude F of the force along x.
        wavenumber: Periods of that force along y.
        damping: Linear drag μ.
    """

    size: int = 64
    extent: float = 2 * math.pi
    dt: float = 0.01
    viscosity: float = 1e-3
    forcing: float = 1.0
    wavenumber: int = 4
    damping: float = 0.1

    def __post_init__(self) -> None:
        if self.size < 3 or not (0 < self.extent < math.inf and 0 < self.dt < math.inf):
            raise UsageError(f"{self}: size must be 3 or more, extent and dt must be positive and finite.")
        if not (0 <= self.viscosity < math.inf and 0 <= self.damping < math.inf and math.isfinite(self.forcing)):
            raise UsageError(f"{self}: viscosity and damping must not be negative, forcing must be finite.")
        if self.diffusion > 0.25:
            raise UsageError(
                f"{self}: explicit diffusion is stable for viscosity·dt/spacing² up to 1/4, and here it is "
                f"{self.diffusion:.3g}. Use a dt of at most {self.dt / (4 * self.diffusion):.3g}."
            )

    @property
    def spacing(self) -> float:
        """Width h of a cell."""
        return self.extent / self.size

    @property
    def diffusion(self) -> float:
        """Weight νΔt/h² of the Laplacian's stencil."""
        return self.viscosity * self.dt / self.spacing**2


def divergence(velocity: Tensor, spacing: float) -> Tensor:
    """∇·V at the cell centres: (…, 2, n, n) → (…, n, n)."""
    u, v = _components(velocity)
    return (u - u.roll(1, X) + v - v.roll(1, Y)) / spacing


def vorticity(velocity: Tensor, spacing: float) -> Tensor:
    """∂v/∂x − ∂u/∂y at the cell corners: (…, 2, n, n) → (…, n, n)."""
    u, v = _components(velocity)
    return (v.roll(-1, X) - v - u.roll(-1, Y) + u) / spacing


def project(velocity: Tensor) -> Tensor:
    """The nearest velocity without divergence, in least squares: (…, 2, n, n) → (…, 2, n, n)."""
    velocity = at_least_float32(velocity)
    potential = solve_poisson(divergence(velocity, 1.0))
    return velocity - _ahead(potential) + potential.unsqueeze(-3)


def project_weighted(velocity: Tensor, weights: Weights) -> Tensor:
    """The velocity without divergence with the smallest Σ (change)² / weight, a weight for u and one for v."""
    potential = solve_poisson(divergence(velocity, 1.0), weights)
    gradient = _ahead(potential) - potential.unsqueeze(-3)
    return velocity - velocity.new_tensor(weights)[:, None, None] * gradient


def solve_poisson(source: Tensor, weights: Weights = (1.0, 1.0)) -> Tensor:
    """φ with w_x δ²φ/δx² + w_y δ²φ/δy² = source, in steps of one, (…, n, n) → (…, n, n); a mean stays what it is."""
    n, m = source.shape[X:]
    down, across = _second_difference(n, source), _second_difference(m, source)[: m // 2 + 1]
    eigenvalues = weights[0] * down[:, None] + weights[1] * across
    eigenvalues[0, 0] = 1  # the mean of a divergence is 0, and that of φ has no gradient: anything but 0 will do
    return torch.fft.irfft2(torch.fft.rfft2(source) / eigenvalues, s=(n, m))


def _ahead(potential: Tensor) -> Tensor:
    """φ one cell further along either axis: (…, n, n) → (…, 2, n, n)."""
    return torch.stack([potential.roll(-1, X), potential.roll(-1, Y)], dim=-3)


def force(velocity: Tensor, grid: FluidGrid) -> Tensor:
    """F sin(k y) e_x − μ V: (…, 2, n, n) → (…, 2, n, n)."""
    y = torch.arange(grid.size, dtype=velocity.dtype, device=velocity.device) + 0.5  # where u is, in cells
    total = -grid.damping * velocity
    total.select(-3, X).add_(torch.sin(y * (2 * math.pi * grid.wavenumber / grid.size)), alpha=grid.forcing)
    return total


def step(velocity: Tensor, grid: FluidGrid) -> Tensor:
    """The velocity one Δt later: (…, 2, n, n) → (…, 2, n, n)."""
    velocity = at_least_float32(velocity)
    if velocity.shape[-3:] != (2, grid.size, grid.size):
        raise DataError(
            f"A grid of size {grid.size} needs velocities (…, 2, {grid.size}, {grid.size}), "
            f"and the shape {tuple(velocity.shape)} was given."
        )
    after = torch.add(velocity, force(velocity, grid), alpha=grid.dt)
    for axis in (X, Y):
        flux = _flux(velocity, axis, grid)
        after.sub_(flux).add_(flux.roll(1, axis))
    return project(after)


def advance(velocity: Tensor, grid: FluidGrid, steps: int) -> Tensor:
    """The velocity after `steps` steps, same shape."""
    for _ in range(steps):
        velocity = step(velocity, grid)
    return velocity


def rollout(velocity: Tensor, grid: FluidGrid, states: int, inner_steps: int, start: int = 0) -> Tensor:
    """A trajectory, `states` velocities on a new axis: (…, 2, n, n) → (…, states, 2, n, n).

    The first is `start` steps after `velocity` (0: `velocity` itself), the others follow `inner_steps` steps apart.
    """
    trajectory = [advance(at_least_float32(velocity), grid, start)]
    while len(trajectory) < states:
        trajectory.append(advance(trajectory[-1], grid, inner_steps))
    return torch.stack(trajectory, dim=-4)


def initial_field(white: Tensor, wavenumber: float = 4, max_speed: float = 3.0) -> Tensor:
    """A random velocity without divergence, from white noise: (…, 2, n, n) → (…, 2, n, n).

    Each component is filtered by exp(−(ln k₀ + s − ln k)²/2s)/k², s = `LOG_VARIANCE`, at wave vectors of length k: its
    energy gathers around k₀ = `wavenumber`. The largest speed, of components at equal index, is `max_speed`.
    """
    white = at_least_float32(white)
    n, m = white.shape[X:]
    along_x = torch.fft.fftfreq(n, 1 / n, dtype=white.dtype, device=white.device)
    along_y = torch.fft.rfftfreq(m, 1 / m, dtype=white.dtype, device=white.device)
    k = torch.hypot(along_x[:, None], along_y)
    k[0, 0] = 1
    gain = torch.exp(-(math.log(wavenumber) + LOG_VARIANCE - k.log()).square() / (2 * LOG_VARIANCE)) / k.square()
    gain[0, 0] = 0
    velocity = torch.fft.irfft2(torch.fft.rfft2(white) * gain, s=(n, m))
    for _ in range(3):  # what rounding leaves of one projection the next removes
        velocity = project(velocity)
        speed = torch.linalg.vector_norm(velocity, dim=-3, keepdim=True)
        velocity = velocity * (max_speed / speed.amax(dim=(X, Y), keepdim=True))
    return velocity


def lay_out(states: Tensor) -> Tensor:
    """States side by side in one image: (…, r, c, C, n, n) → (…, C, r·n, c·n)."""
    return states.movedim(-3, -5).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def cut(image: Tensor, size: int) -> Tensor:
    """The inverse of `lay_out` for states of `size` = n points a side: (…, C, r·n, c·n) → (…, r, c, C, n, n)."""
    return image.unflatten(X, (-1, size)).unflatten(Y, (-1, size)).transpose(-3, -2).movedim(-5, -3)


def _components(velocity: Tensor) -> tuple[Tensor, Tensor]:
    """The components u and v, in float32 or better."""
    if velocity.ndim < 3 or velocity.shape[-3] != 2:
        raise DataError(
            f"A velocity is a tensor (…, 2, n, n) of u and v, and the shape {tuple(velocity.shape)} was given."
        )
    u, v = at_least_float32(velocity).unbind(-3)
    return u, v


def _second_difference(n: int, like: Tensor) -> Tensor:
    """Eigenvalues of c₊ − 2c + c₋ on n periodic points."""
    return -4 * torch.sin(torch.arange(n, dtype=like.dtype, device=like.device) * (math.pi / n)).square()


def _flux(velocity: Tensor, axis: int, grid: FluidGrid) -> Tensor:
    """Φ through the forward faces along `axis`, for both components c: (…, 2, n, n) → (…, 2, n, n).

    In place wherever autograd does not need the old value: allocating costs more than adding.
    """
    carrier = velocity.select(-3, axis)
    courant = torch.stack([carrier + carrier.roll(-1, X), carrier + carrier.roll(-1, Y)], dim=-3)
    courant.mul_(grid.dt / (2 * grid.spacing))
    right = courant.relu()  # the part of q that carries c forwards, and the part that carries c₊ back
    left = courant.sub_(right)

    ahead = velocity.roll(-1, axis)
    difference = ahead - velocity
    before = difference.roll(1, axis)
    total = difference + before
    # S/2 = D D₋/(D + D₋), multiplied out so that it is 0 where the denominator is, and has a gradient there.
    slope = (difference * before).relu_() * total / (total * total).add_(torch.finfo(total.dtype).tiny)

    flux = (right * velocity).addcmul_(left, ahead)
    flux.addcmul_(torch.addcmul(right, right, right, value=-1), slope)
    flux.addcmul_(torch.addcmul(left, left, left), slope.roll(-1, axis), value=-1)
    return flux.sub_(difference, alpha=grid.diffusion)
