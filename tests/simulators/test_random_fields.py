"""Kernels against SciPy and the parity file; factors against the kernel matrix; draws against both."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gamma, kv

from namm.errors import UsageError
from namm.simulators.random_fields import (
    colour_periodic,
    matern_field,
    matern_kernel,
    periodic_eigenvalues,
)


def matern_by_bessel(d: np.ndarray, length: float, nu: float = 1.5) -> np.ndarray:
    s = np.sqrt(2 * nu) * d / length
    return 2 ** (1 - nu) / gamma(nu) * s**nu * kv(nu, s)


@given(length=st.floats(0.05, 5))
def test_matern_kernel_is_the_bessel_formula(length):
    d = np.linspace(0.01, 2, 50)
    np.testing.assert_allclose(matern_kernel(torch.from_numpy(d), length), matern_by_bessel(d, length), rtol=1e-10)
    assert matern_kernel(torch.zeros(()), length).item() == 1


def test_matern_kernel_agrees_with_the_reference_covariance(parity):
    reference = parity("burgers.npz")["matern_cov"]
    x = torch.linspace(-1, 1, len(reference), dtype=torch.float64)
    ours = matern_kernel(x[:, None] - x, length=0.2)
    np.testing.assert_allclose(ours, reference, atol=1e-12)


@pytest.mark.parametrize("length", [0.0, -1.0, float("nan")])
def test_a_length_that_is_not_positive_is_refused(length):
    with pytest.raises(UsageError, match="length must be positive"):
        periodic_eigenvalues((4,), length=length)


def product_kernel_matrix(shape: tuple[int, ...], length: float, scale: float) -> np.ndarray:
    """The kernel between all pairs of grid points, written out from its definition."""
    points = np.stack(np.meshgrid(*(np.arange(n) / n for n in shape), indexing="ij"), -1).reshape(-1, len(shape))
    d = points[:, None] - points[None]
    return scale**2 * np.exp(-2 * np.sin(np.pi * d) ** 2 / length**2).prod(-1)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    length=st.floats(0.1, 2),
    scale=st.floats(0.1, 2),
)
def test_spectral_factor_squares_to_the_kernel_matrix(shape, length, scale):
    n = int(np.prod(shape))
    impulses = torch.eye(n, dtype=torch.float64).reshape(n, *shape)
    factor = colour_periodic(impulses, periodic_eigenvalues(shape, length=length, scale=scale)).reshape(n, n)
    np.testing.assert_allclose(factor.T @ factor, product_kernel_matrix(shape, length, scale), atol=1e-10)


def test_spectral_factor_is_exact_on_the_grid_of_the_unit_cells():
    shape, length, scale = (31, 31), 0.7, 0.7
    impulses = torch.eye(31 * 31, dtype=torch.float64).reshape(-1, *shape)
    factor = colour_periodic(impulses, periodic_eigenvalues(shape, length=length, scale=scale)).flatten(1)
    np.testing.assert_allclose(factor.T @ factor, product_kernel_matrix(shape, length, scale), atol=1e-10)


def assert_gaussian_with(samples: np.ndarray, mean: float, covariance: np.ndarray) -> None:
    """Every sample mean and covariance within 5.5 of its own standard errors."""
    n = len(samples)
    centred = samples - mean
    variances = np.diag(covariance)
    assert np.all(np.abs(centred.mean(0)) < 5.5 * np.sqrt(variances / n))
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / n)
    assert np.all(np.abs(centred.T @ centred / n - covariance) < 5.5 * error)


def test_matern_draws_have_the_kernel_as_covariance():
    grid = torch.linspace(-1, 1, 24, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    field = matern_field(40_000, grid, length=0.4, mean=1.5, generator=rng)
    d = np.abs(grid.numpy()[:, None] - grid.numpy()) + 1e-12
    assert_gaussian_with(field.numpy(), 1.5, matern_by_bessel(d, 0.4))


def test_periodic_draws_have_the_kernel_as_covariance():
    white = torch.randn(40_000, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    field = colour_periodic(white, periodic_eigenvalues((5, 6), length=0.7, scale=0.7))
    assert_gaussian_with(field.flatten(1).numpy(), 0.0, product_kernel_matrix((5, 6), 0.7, 0.7))


def test_grids_far_finer_than_the_length_still_factorise():
    field = matern_field(2, torch.linspace(0, 1, 512), length=5.0)
    assert field.shape == (2, 512)
    assert field.isfinite().all()


def test_draws_follow_the_generator_alone():
    def draw(seed: int) -> torch.Tensor:
        torch.rand(3)
        return matern_field(2, torch.linspace(0, 1, 4), length=0.5, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))
