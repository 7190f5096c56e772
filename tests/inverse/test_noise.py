"""Gaussian noise against linear algebra."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.errors import DataError
from namm.inverse import GaussianNoise


def double(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "rows", "full"])
def test_noise_is_that_of_its_covariance(kind):
    """χ² against a NumPy solve, whitened values of unit covariance, draws with the covariance itself."""
    root = double(6, 6).numpy()
    covariance = {
        "scalar": 0.09 * np.eye(6),
        "diagonal": np.diag(np.arange(1.0, 7) ** 2),
        "rows": np.diag([4.0, 4, 4, 9, 9, 9]),
        "full": root @ root.T + np.eye(6),
    }[kind]
    noise = {
        "scalar": GaussianNoise(0.3),
        "diagonal": GaussianNoise(torch.arange(1.0, 7).reshape(2, 3)),
        "rows": GaussianNoise(torch.tensor([[2.0], [3.0]])),
        "full": GaussianNoise(covariance=torch.tensor(covariance)),
    }[kind]
    residual = double(5, 2, 3)
    flat = residual.numpy().reshape(5, 6)
    expected = np.einsum("bi,bi->b", flat, np.linalg.solve(covariance, flat.T).T)
    assert np.abs(noise.chi2(residual).numpy() - expected).max() <= 1e-9 * expected.max()
    assert np.abs(noise.norm(residual).numpy() ** 2 - expected).max() <= 1e-9 * expected.max()
    assert torch.allclose(noise.whiten(residual[2:3])[0], noise.whiten(residual)[2])
    draws = noise.sample(torch.zeros(20000, 2, 3, dtype=torch.double), torch.Generator().manual_seed(0))
    scales = np.sqrt(np.diag(covariance))
    measured = np.cov(draws.flatten(1).numpy().T)
    assert np.abs((measured - covariance) / np.outer(scales, scales)).max() <= 0.05


@given(seed=st.integers(0, 10_000), scale=st.floats(1e-6, 1e6))
def test_a_covariance_may_be_symmetric_but_for_rounding(seed, scale):
    """Next to zeros a rounding error is a large share of a value. The root is that of the symmetric part."""
    root, rounding = double(4, 4, seed=seed), 4e-7 * double(4, 4, seed=seed + 1).tanh()
    covariance = scale * (root @ root.mT + torch.eye(4) + rounding)
    noise, residual = GaussianNoise(covariance=covariance), double(3, 4)
    middle, r = ((covariance + covariance.mT) / 2).numpy(), residual.numpy()
    expected = np.einsum("bi,bi->b", r, np.linalg.solve(middle, r.T).T)
    assert noise.chi2(residual).numpy() == pytest.approx(expected, rel=1e-10)
    GaussianNoise(covariance=torch.tensor([[scale, 1e-7 * scale], [0.0, scale]], dtype=torch.double))


@pytest.mark.parametrize("noise", [GaussianNoise(0.5), GaussianNoise(covariance=torch.eye(3) / 4)], ids=["std", "full"])
def test_noise_is_copied_once_for_each_device_and_type(noise):
    """Also where the copy is made in inference mode, and gradients are asked for afterwards."""
    with torch.inference_mode():
        assert torch.equal(noise.chi2(torch.ones(2, 3)), torch.full((2,), 12.0))
    residual = torch.ones(2, 3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(noise.chi2(residual).sum(), residual)[0], torch.full((2, 3), 8.0))
    assert noise._root_for(residual) is noise._root_for(torch.zeros(5, 3))
    assert noise._root_for(residual.double()).dtype == torch.double


def test_noise_is_drawn_in_full_precision():
    noise, like = GaussianNoise(covariance=torch.eye(3) + 0.5), torch.zeros(4, 3)
    expected = noise.sample(like, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = noise.sample(like, torch.Generator().manual_seed(0))
    assert found.dtype == torch.float
    assert torch.equal(found, expected)


def test_a_perfect_fit_has_no_pull():
    residual = torch.zeros(2, 3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(GaussianNoise(0.1).norm(residual).sum(), residual)[0], torch.zeros(2, 3))


@pytest.mark.parametrize("noise", [GaussianNoise(torch.ones(4)), GaussianNoise(covariance=torch.eye(4))])
def test_noise_of_another_shape_is_refused(noise):
    for use in (noise.whiten, noise.chi2, noise.sample):
        with pytest.raises(DataError, match=r"does not fit measurements of .*3"):
            use(torch.ones(2, 3))
