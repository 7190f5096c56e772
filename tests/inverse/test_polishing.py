"""Posterior samples moved onto the rule: against closed forms, with pixels that were observed held by the noise."""

import pytest
import torch

import namm
from namm import TotalFlux
from namm.errors import DataError, UsageError
from namm.inverse import (
    Columns,
    Downsample,
    GaussianBlur,
    GaussianNoise,
    Linear,
    Mask,
    Posterior,
    States,
    observed_scale,
    operator,
    polish_posterior,
)

SHAPE = (2, 4, 4)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def checkers():
    return (torch.arange(32) % 3 == 0).reshape(SHAPE)


def drawn(x, failed=None):
    """Samples (M, n, …) as `sample_posterior` returns them."""
    nothing = torch.zeros(x.shape[:2], dtype=x.dtype)
    failed = torch.zeros(x.shape[:2], dtype=torch.bool) if failed is None else failed
    x = torch.where(failed[:, :, None, None, None], torch.nan, x)
    return Posterior(x, x, nothing, None, nothing.long(), failed, 1)


@pytest.mark.parametrize(
    "A",
    [
        Mask(checkers()),
        Mask(checkers()[0]),
        Columns([2, 0]),
        States((3, 1), size=2),
        Columns([0]) @ Columns([2, 1]),
        Mask(checkers()) @ Columns([3, 1, 0, 2]),
    ],
    ids=lambda A: A.name,
)
def test_operators_know_the_pixels_that_they_pick(A):
    x = randn(3, *SHAPE)
    assert torch.equal(x.flatten(1)[:, A.pixels(SHAPE).flatten()], A(x).flatten(1))
    assert A.pixels(SHAPE).shape == A(x).shape[1:]


@pytest.mark.parametrize(
    "A",
    [
        GaussianBlur(1.0),
        Downsample(2),
        Linear(torch.eye(32)),
        operator(lambda x: x[..., :2]),
        Columns([0]) @ GaussianBlur(1.0),
        GaussianBlur(1.0) @ Columns([0, 1]),
        Linear(torch.eye(16)) @ Columns([0, 1]),
    ],
    ids=lambda A: A.name,
)
def test_other_operators_have_no_pixels_and_the_scale_is_that_of_the_data(A):
    assert A.pixels(SHAPE) is None
    scale = observed_scale(A, GaussianNoise(0.1), [2.0, 3.0], SHAPE)
    assert torch.equal(scale, torch.tensor([2.0, 3.0]).double()[:, None, None].expand(SHAPE))


def test_the_scale_is_the_noise_where_it_is_less_than_the_spread():
    mask = checkers()
    std = 0.1 + 3 * torch.rand(int(mask.sum()))
    scale = observed_scale(Mask(mask), GaussianNoise(std), [0.5, 2.0], SHAPE)
    spread = torch.tensor([0.5, 2.0])[:, None, None].expand(SHAPE)
    torch.testing.assert_close(scale[mask].float(), torch.minimum(std, spread[mask]))
    assert torch.equal(scale[~mask].float(), spread[~mask])
    with pytest.raises(DataError, match="does not fit"):
        observed_scale(Mask(mask), GaussianNoise(torch.ones(5)), 1.0, SHAPE)


def test_of_a_covariance_the_standard_deviations_are_those_of_its_diagonal():
    root = randn(6, 6, seed=1)
    covariance = root @ root.T + torch.eye(6)
    found = GaussianNoise(covariance=covariance).deviations((2, 3))
    torch.testing.assert_close(found, covariance.diagonal().sqrt().reshape(2, 3))
    assert GaussianNoise(0.2).deviations((2, 3)).tolist() == [[0.2] * 3] * 2


def test_observed_pixels_move_by_the_square_of_their_noise():
    """Σ x = 5 with scales s: the nearest image is x − s² (Σ x − 5) / Σ s²."""
    x, mask, noise = randn(2, 3, *SHAPE, seed=2), checkers(), GaussianNoise(0.1)
    A, rule = Mask(mask), TotalFlux(5.0)
    m = A(x[:, 0])
    found = polish_posterior(drawn(x), rule, m, A, noise, spread=[1.0, 2.0])
    s = torch.where(mask, 0.1, torch.tensor([1.0, 2.0]).double()[:, None, None])
    excess = (x.sum((2, 3, 4)) - 5) / s.square().sum()
    expected = x - s.square() * excess[:, :, None, None, None]
    torch.testing.assert_close(found.samples, expected, rtol=0, atol=1e-12)
    assert torch.equal(found.mirror_samples, x)
    chi2 = ((m[:, None] - found.samples[..., mask]) / 0.1).square().sum(2)
    torch.testing.assert_close(found.chi2, chi2)
    assert found.distance.max() < 1e-12
    assert found.certificate.reached.all()
    assert not found.certificate.notes
    assert "6 of 6 images reach the rule" in str(found)


def test_a_measurement_of_no_pixels_is_noted():
    x, A = randn(1, 2, *SHAPE), Downsample(2)
    found = polish_posterior(drawn(x), TotalFlux(5.0), A(x[:, 0]), A, GaussianNoise(0.1), spread=2.0)
    torch.testing.assert_close(found.samples[0], namm.polish(x[0], TotalFlux(5.0)).images)
    (note,) = found.certificate.notes
    assert "no single pixels" in note
    assert note in str(found)


def test_samples_that_failed_stay_nan_and_the_others_are_certified():
    x, A = randn(2, 3, *SHAPE), Columns([0])
    failed = torch.tensor([[False, True, False], [True, True, True]])
    found = polish_posterior(drawn(x, failed), TotalFlux(5.0), A(x[:, 0]), A, GaussianNoise(0.1))
    assert torch.equal(found.samples.isnan().all((2, 3, 4)), failed)
    assert torch.equal(found.distance.isnan(), failed)
    assert len(found.certificate.after) == 2
    none_left = drawn(x, torch.ones_like(failed))
    assert polish_posterior(none_left, TotalFlux(5.0), A(x[:, 0]), A, GaussianNoise(0.1)) is none_left
    with pytest.raises(UsageError, match="3 measurements were given with the samples of 2"):
        polish_posterior(drawn(x), TotalFlux(5.0), torch.zeros(3, 2, 4, 1), A, GaussianNoise(0.1))
