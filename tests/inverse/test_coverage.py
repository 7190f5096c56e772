"""Coverage of intervals, on draws whose distribution is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from posterior_oracles import COVARIANCE, MATRIX, MEAN, NOISE, problem

from namm.errors import DataError, UsageError
from namm.inverse import DDIMSteps, DPSGuidance, GaussianNoise, Linear, coverage, sample_posterior


def draws(mean, covariance, n: int, seed: int) -> torch.Tensor:
    z = torch.randn(n, len(mean), dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(mean) + z @ torch.linalg.cholesky(torch.tensor(covariance)).T


@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (25, 0.9), (99, 0.9), (11, 0.5), (30, 0.5)])
def test_draws_of_the_same_distribution_are_calibrated(n, level):
    """Also at the fewest samples, where plain quantiles would give 0.81 instead of 0.9."""
    x = torch.randn(4000, n + 1, 5, generator=torch.Generator().manual_seed(n))
    assert float(coverage(x[:, 1:], x[:, 0], level).mean()) == pytest.approx(level, abs=0.01)


@pytest.mark.parametrize(("width", "expected"), [(0.5, 0.5891), (2.0, 0.9990)])
def test_intervals_too_narrow_or_too_wide_show(width, expected):
    """P(|z| < 1.6449 width), the samples having a standard deviation of `width`."""
    rng = torch.Generator().manual_seed(0)
    truth = torch.randn(3000, 2, generator=rng)
    covered = coverage(width * torch.randn(3000, 400, 2, generator=rng), truth)
    assert covered.shape == (2,)
    assert covered.tolist() == pytest.approx([expected] * 2, abs=0.03)


@given(n=st.integers(19, 60), shift=st.floats(-3, 3))
def test_a_monotone_change_of_units_changes_nothing_at_whole_ranks(n, shift):
    x = torch.randn(50, 39, generator=torch.Generator().manual_seed(n)).double()
    truth = torch.randn(50, generator=torch.Generator().manual_seed(n + 1)).double() + shift
    assert torch.equal(coverage(x, truth), coverage(x.exp(), truth.exp()))


def test_the_exact_posterior_is_calibrated_and_dps_is_overconfident():
    """90 true images, measured; 39 samples for each: a standard error of about 0.025, or 0.02 for both entries."""
    prior, exact = problem(mirrored=True)
    truth = draws(MEAN, COVARIANCE, 90, seed=0)
    A, noise = Linear(torch.tensor(MATRIX)), GaussianNoise(covariance=torch.tensor(NOISE))
    seen = A(truth[:, None, None])
    seen = seen + noise.sample(seen, torch.Generator().manual_seed(1))
    shares = []
    for guidance in (exact, DPSGuidance(0.01)):
        made = sample_posterior(
            prior, seen, A, noise, n=39, guidance=guidance, steps=DDIMSteps(200), batch_size=4000, generator=0
        )
        measured = A(made.samples.flatten(0, 1)).unflatten(0, (90, 39))
        shares.append(float(coverage(measured, A(truth[:, None, None])).mean()))
    assert shares[0] == pytest.approx(0.9, abs=0.06)
    assert shares[1] < 0.6


def test_the_truth_is_compared_in_the_samples_type():
    """A truth in float64 that the samples hit exactly, in float32, lies inside their interval."""
    truth = torch.rand(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    covered = coverage(truth.float()[:, None].expand(8, 19, 3), truth)
    assert covered.tolist() == [1.0, 1.0, 1.0]
    assert covered.dtype == torch.float


@pytest.mark.parametrize(
    ("samples", "truth", "level", "error", "message"),
    [
        (torch.zeros(4, 20, 3), torch.zeros(4, 3), 1.0, UsageError, "between 0 and 1"),
        (torch.zeros(4, 18, 3), torch.zeros(4, 3), 0.9, UsageError, "at least 19 samples, not 18"),
        (torch.zeros(4, 20, 3), torch.zeros(4, 2), 0.9, DataError, r"\(4, 20, 3\) and \(4, 2\)"),
        (torch.full((4, 20, 3), torch.nan), torch.zeros(4, 3), 0.9, DataError, "failed"),
    ],
)
def test_mistakes_are_named(samples, truth, level, error, message):
    with pytest.raises(error, match=message):
        coverage(samples, truth, level)
