"""Stationary Gaussian random fields, drawn exactly on a grid.

A field u ~ N(m, K) on N points is m + A w with white noise w ~ N(0, I) and any A that has A Aᵀ = K.
Two kernels, with s = √(2ν) d/ℓ for points a distance d apart:

    Matérn     k(d) = σ² p_ν(s) exp(−s),   p_{1/2} = 1,  p_{3/2} = 1 + s,  p_{5/2} = 1 + s + s²/3
    periodic   k(d) = σ² Π_a exp(−2 sin²(π d_a/p) / ℓ²)          over the axes a of a torus of period p

On a line A is the Cholesky factor. On a torus K is circulant, so Fourier modes are its eigenvectors and its
eigenvalues are the FFT of its first row: A = F* √Λ F, exact, in O(N log N). Everything is float64 inside.
"""

import math

import torch
from torch import Tensor

from namm.errors import UsageError

JITTER = 1e-10
"""Added to the Cholesky diagonal, relative to σ². Lets grids far finer than ℓ factorise, and changes the
variance by a part in 10¹⁰, below what float32 images can hold."""


def matern_kernel(d: Tensor, *, length: float, smoothness: float = 1.5, scale: float = 1.0) -> Tensor:
    """Matérn covariance at distances `d` (any shape), for ν = `smoothness` in {1/2, 3/2, 5/2}."""
    s = math.sqrt(2 * smoothness) * d.abs() / _positive("length", length)
    match smoothness:
        case 0.5:
            polynomial = torch.ones_like(s)
        case 1.5:
            polynomial = 1 + s
        case 2.5:
            polynomial = 1 + s + s.square() / 3
        case _:
            raise UsageError(f"Matérn smoothness must be 0.5, 1.5 or 2.5, and {smoothness} was given.")
    return scale**2 * polynomial * torch.exp(-s)


def matern_field(
    n: int,
    grid: Tensor,
    *,
    length: float,
    smoothness: float = 1.5,
    scale: float = 1.0,
    mean: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`n` Matérn processes at the points `grid` (N,): float64, (n, N)."""
    grid = grid.double()
    covariance = matern_kernel(grid[:, None] - grid[None, :], length=length, smoothness=smoothness, scale=scale)
    factor = torch.linalg.cholesky(covariance + JITTER * scale**2 * torch.eye(len(grid), dtype=grid.dtype))
    white = torch.randn(n, len(grid), generator=generator, dtype=grid.dtype)
    field: Tensor = mean + white @ factor.T
    return field


def periodic_kernel(d: Tensor, *, length: float, scale: float = 1.0, period: float = 1.0) -> Tensor:
    """One axis of the periodic covariance at separations `d` (any shape)."""
    half_turns = math.pi * d / _positive("period", period)
    return scale**2 * torch.exp(-2 * half_turns.sin().square() / _positive("length", length) ** 2)


def periodic_eigenvalues(shape: tuple[int, ...], *, length: float, scale: float = 1.0) -> Tensor:
    """Eigenvalues λ ≥ 0 of the product kernel on a unit torus of `shape` points: float64, `shape`.

    The kernel is a product over axes, so λ is the outer product of each axis' own FFT.
    """
    eigenvalues = torch.tensor(scale**2, dtype=torch.float64)
    for points in shape:
        row = periodic_kernel(torch.arange(points, dtype=torch.float64) / points, length=length)
        eigenvalues = eigenvalues[..., None] * torch.fft.fft(row).real.clamp(min=0)
    return eigenvalues


def colour_periodic(white: Tensor, eigenvalues: Tensor) -> Tensor:
    """A w for circulant K: `white` (n, *shape) filtered by √λ, `eigenvalues` (*shape)."""
    axes = tuple(range(-eigenvalues.ndim, 0))
    field: Tensor = torch.fft.ifftn(torch.fft.fftn(white, dim=axes) * eigenvalues.sqrt(), dim=axes).real
    return field


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise UsageError(f"A random field's {name} must be positive, and {value} was given.")
    return value
