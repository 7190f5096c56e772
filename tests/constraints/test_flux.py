"""Total flux: closed forms, and least squares by NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.constraints import TotalFlux
from namm.errors import UsageError

totals = st.floats(-100, 100)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 5), st.integers(1, 5))
seeds = st.integers(0, 2**31)


def images(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(totals, shapes, seeds)
def test_distance_is_the_missing_flux(total, shape, seed):
    x = images(shape, seed)
    expected = [abs(math.fsum(image.flatten().tolist()) - total) for image in x]
    assert TotalFlux(total)(x).tolist() == pytest.approx(expected, abs=1e-12)


@given(totals, shapes, seeds)
def test_projection_is_the_minimum_norm_correction(total, shape, seed):
    x = images(shape, seed)
    p = TotalFlux(total).project(x)
    pixels = x[0].numel()
    for image, projected in zip(x.numpy(), p.numpy(), strict=True):
        step, *_ = np.linalg.lstsq(np.ones((1, pixels)), [total - image.sum()], rcond=None)
        assert projected == pytest.approx(image + step.reshape(image.shape), abs=1e-11)


@given(totals, shapes, seeds)
def test_projection_lands_on_the_set_and_stays(total, shape, seed):
    rule, x = TotalFlux(total), images(shape, seed)
    p = rule.project(x)
    assert rule(p).max() < 1e-12 * (1 + abs(total))
    assert torch.allclose(rule.project(p), p, rtol=0, atol=1e-13 * (1 + abs(total)))


@given(totals, shapes, seeds)
def test_residual_is_the_signed_distance(total, shape, seed):
    rule, x = TotalFlux(total), images(shape, seed)
    r = rule.residual(x)
    assert r.shape == (len(x), 1, 1, 1)
    assert torch.equal(r.abs().flatten(), rule(x))
    assert torch.allclose(x.sum((1, 2, 3)) - r.flatten(), torch.full((len(x),), total, dtype=x.dtype), atol=1e-12)


def test_gradient_is_the_sign_on_every_pixel():
    x = torch.stack([torch.full((1, 4, 4), v) for v in (1.0, -1.0)]).requires_grad_()
    TotalFlux(2.0)(x).sum().backward()
    assert torch.equal(x.grad, torch.stack([torch.ones(1, 4, 4), -torch.ones(1, 4, 4)]))


def test_float32_floor_of_projected_images_is_small():
    """Pixels near 1 round by 6e-8 at most; 4096 of them at random by 64 × 6e-8 = 4e-6, tenfold is safe.

    A share rounded to float32 leaves 2e-4 here, and a float32 sum 7e-4.
    """
    x = TotalFlux(120.0).project(1 + torch.rand(64, 1, 64, 64).square())
    assert x.dtype == torch.float32
    exact = x.double().sum((1, 2, 3)) - 120.0
    assert exact.abs().max() < 4e-5
    assert torch.allclose(TotalFlux(120.0)(x).double(), exact.abs(), rtol=1e-6, atol=0)


def test_half_precision_images_are_projected_in_float32():
    x = torch.rand(2, 1, 8, 8).bfloat16()
    p = TotalFlux(5.0).project(x)
    assert p.dtype == torch.float32
    assert TotalFlux(5.0)(p).max() < 1e-5
    assert TotalFlux(5.0).residual(x).dtype == torch.float32


def test_default_total_is_the_papers():
    assert TotalFlux()(torch.full((1, 1, 10, 12), 1.0)).item() == 0.0


@pytest.mark.parametrize("total", [float("nan"), float("inf"), "120", None, True])
def test_refuses_a_total_that_is_no_number(total):
    with pytest.raises(UsageError, match="TotalFlux needs a finite number as total, got"):
        TotalFlux(total)
