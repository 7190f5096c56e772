"""Stationary Gaussian random fields, drawn exactly on a grid.

A field u ~ N(m, K) on N points is m + A w with white noise w ~ N(0, I) and any A that has A Aᵀ = K.
Two kernels, for points a distance d apart:

    Matérn-3/2   k(d) = (1 + s) exp(−s),   s = √3 d/ℓ
    periodic     k(d) = σ² Π_a exp(−2 sin²(π d_a) / ℓ²)          over the axes a of a unit torus

On a line A is the Cholesky factor. On a torus K is circulant, so Fourier modes are its eigenvectors and its
eigenvalues are the FFT of its first row: A = F* √Λ F, exact, in O(N log N). Everything is float64 inside.
"""

import math

import torch
from torch import Tensor

from namm.errors import UsageError

JITTER = 1e-10
"""Added to the Cholesky diagonal. Lets grids far finer than ℓ factorise, and changes the variance by a part in 10¹⁰,
below what float32 images can hold."""


def matern_kernel(d: Tensor, length: float) -> Tensor:
    """Matérn-3/2 correlation at distances `d` (any shape)."""
    s = math.sqrt(3) * d.abs() / _positive(length)
    return (1 + s) * torch.exp(-s)


def matern_field(
    n: int, grid: Tensor, *, length: float, mean: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """`n` Matérn-3/2 processes of variance 1 at the points `grid` (N,): float64, (n, N)."""
    grid = grid.double()
    covariance = matern_kernel(grid[:, None] - grid[None, :], length)
    factor = torch.linalg.cholesky(covariance + JITTER * torch.eye(len(grid), dtype=grid.dtype))
    return mean + torch.randn(n, len(grid), generator=generator, dtype=grid.dtype) @ factor.T


def periodic_eigenvalues(shape: tuple[int, ...], *, length: float, scale: float = 1.0) -> Tensor:
    """Eigenvalues λ ≥ 0 of the periodic kernel on a unit torus of `shape` points: float64, `shape`.

    The kernel is a product over axes, so λ is the outer product of each axis' own FFT.
    """
    eigenvalues = torch.tensor(scale**2, dtype=torch.float64)
    for points in shape:
        half_turns = math.pi * (torch.arange(points, dtype=torch.float64) / points)
        row = torch.exp(-2 * half_turns.sin().square() / _positive(length) ** 2)
        eigenvalues = eigenvalues[..., None] * torch.fft.fft(row).real.clamp(min=0)
    return eigenvalues


def colour_periodic(white: Tensor, eigenvalues: Tensor) -> Tensor:
    """A w for circulant K: `white` (n, *shape) filtered by √λ, `eigenvalues` (*shape)."""
    axes = tuple(range(-eigenvalues.ndim, 0))
    return torch.fft.ifftn(torch.fft.fftn(white, dim=axes) * eigenvalues.sqrt(), dim=axes).real


def _positive(length: float) -> float:
    if not length > 0:
        raise UsageError(f"A random field's length must be positive, and {length} was given.")
    return length
