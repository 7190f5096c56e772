"""Posterior sampling against posteriors in closed form; redraws of samples that diverge; mistakes named in time."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from posterior_oracles import (
    COVARIANCE,
    GAUSSIAN,
    MATRIX,
    MEAN,
    MEASUREMENT,
    NOISE,
    OPERATOR,
    PIXELS,
    SEEN,
    bent,
    draw,
    level,
    posterior,
    problem,
)
from torch import nn

from namm.constraints import Constraint, DivergenceFree, constraint
from namm.errors import DataError, UsageError
from namm.generative import DDIM, VAE, Ancestral, Diffusion, Mirrored
from namm.inverse import (
    AncestralSteps,
    Columns,
    DDIMSteps,
    DiffusionPrior,
    DPSGuidance,
    Evidence,
    GaussianNoise,
    Guess,
    OfficialSteps,
    Operator,
    operator,
    reverse,
    sample_posterior,
)
from namm.inverse.posterior import is_prior
from namm.maps import IdentityMap

# The exact likelihood score gives the exact posterior


@dataclass
class Impulses:
    """Sample PIXELS·k + p is given the single noise 1 at step k in pixel p, the last sample none.

    A linear sampler is linear in its noise, so these responses give its mean and covariance exactly.
    """

    steps: int

    def __call__(self, step: int) -> torch.Tensor:
        z = torch.zeros(PIXELS * (self.steps + 1) + 1, 1, 1, PIXELS, dtype=torch.double)
        z[PIXELS * step : PIXELS * (step + 1), 0, 0] = torch.eye(PIXELS, dtype=torch.double)
        return z


def moments(mirrored: bool, steps, straight: bool) -> tuple[np.ndarray, np.ndarray]:
    prior, exact = problem(mirrored, straight)
    evidence = Evidence(SEEN.expand(PIXELS * (steps.steps + 1) + 1, -1), OPERATOR, GAUSSIAN)
    u = reverse(prior.model, prior.mirror.to_data, steps, exact, evidence, Impulses(steps.steps))
    responses = prior.mirror.to_data(prior.model.unstandardise(u)).flatten(1).numpy()
    each = responses[:-1] - responses[-1]
    return responses[-1], each.T @ each


@pytest.mark.parametrize("mirrored", [False, True], ids=["data space", "mirror space"])
@pytest.mark.parametrize(
    ("steps", "straight"),
    [
        (AncestralSteps(100), False),
        (DDIMSteps(50), False),
        (OfficialSteps(100), False),
        (AncestralSteps(100), True),
        (DDIMSteps(50), True),
    ],
    ids=str,
)
def test_exact_guidance_reaches_the_posterior(mirrored, steps, straight):
    """The mean at once, up to the start at t = 1; the covariance as the steps get smaller."""
    mean, covariance = posterior()
    finer = replace(steps, steps=2 * steps.steps)
    coarse, fine = (moments(mirrored, each, straight) for each in (steps, finer))
    of_mean = 5e-3 if isinstance(steps, OfficialSteps) else 1e-5
    assert np.abs(fine[0] - mean).max() <= of_mean
    errors = [np.abs(found - covariance).max() for _, found in (coarse, fine)]
    assert errors[1] <= 0.04
    assert errors[1] <= 0.6 * errors[0]


@pytest.mark.parametrize(
    ("mirrored", "straight"),
    [(False, False), (True, False), (True, True)],
    ids=["data space", "mirror space", "straight"],
)
def test_exact_guidance_within_monte_carlo_error(mirrored, straight):
    prior, exact = problem(mirrored, straight)
    found = draw(prior, n=1500, guidance=exact, steps=DDIMSteps(200), batch_size=1500)
    mean, covariance = posterior()
    x, scale = found.samples.reshape(-1, PIXELS).numpy(), np.sqrt(np.diag(covariance))
    assert np.abs((x.mean(0) - mean) / scale).max() <= 4 / np.sqrt(1500)
    assert np.abs((np.cov(x.T) - covariance) / np.outer(scale, scale)).max() <= 0.1 + 0.06  # Monte Carlo and steps
    residual = MEASUREMENT - x @ MATRIX.T
    expected = np.einsum("bi,bi->b", residual, np.linalg.solve(NOISE, residual.T).T)
    assert found.chi2.numpy()[0] == pytest.approx(expected)
    assert found.mirror_samples.shape == found.samples.shape == (1, 1500, 1, 1, PIXELS)
    assert torch.allclose(prior.mirror.to_data(found.mirror_samples[0]), found.samples[0])


def noise_free() -> tuple[np.ndarray, np.ndarray]:
    gain = COVARIANCE @ MATRIX.T @ np.linalg.inv(MATRIX @ COVARIANCE @ MATRIX.T)
    return MEAN + gain @ (MEASUREMENT - MATRIX @ MEAN), COVARIANCE - gain @ MATRIX @ COVARIANCE


@pytest.mark.parametrize("straight", [False, True], ids=["vp", "straight"])
def test_the_bias_of_dps(straight):
    """A small ζ gives the posterior of a measurement without noise; a large one overshoots, its steps never shorten."""
    prior, _ = problem(False, straight)
    small = draw(prior, n=400, guidance=DPSGuidance(0.003), steps=AncestralSteps(1000), batch_size=400)
    large = draw(prior, n=50, guidance=DPSGuidance(0.3), steps=AncestralSteps(300))
    mean, covariance = noise_free()
    x, scale = small.samples.reshape(-1, PIXELS).numpy(), np.sqrt(np.diag(posterior()[1]))
    assert np.abs((x.mean(0) - mean) / scale).max() <= 0.15
    assert x.std(0) / np.sqrt(np.diag(covariance)) == pytest.approx([1.0] * PIXELS, abs=0.12)
    assert (x.std(0) / scale)[1] < 0.8
    assert float(small.chi2.mean()) / small.measured < 0.05
    assert float(large.chi2.mean()) / large.measured > 5


# The steps


@pytest.mark.parametrize(
    ("steps", "sampler"),
    [
        (AncestralSteps(30), Ancestral(30)),
        (DDIMSteps(20, eta=0.5), DDIM(20, eta=0.5)),
        (DDIMSteps(20, eta=0.0), DDIM(20)),
        (OfficialSteps(30), OfficialSteps(30)),
    ],
    ids=str,
)
def test_without_guidance_the_prior_is_sampled(steps, sampler):
    """To the last bit, since both follow the same table."""
    prior, _ = problem(mirrored=True)
    found = draw(prior, guidance=DPSGuidance(0.0), steps=steps)
    x, y = prior.sample_pairs(8, sampler=sampler, generator=0)
    assert torch.equal(found.mirror_samples[0], y)
    assert torch.equal(found.samples[0], x)


def test_steps_keep_the_names_that_files_of_samples_hold():
    assert str(AncestralSteps()) == "AncestralSteps(steps=1000)"
    assert str(DDIMSteps()) == "DDIMSteps(steps=100, eta=1.0)"


# Many measurements, batches, seeds


def test_many_measurements_are_many_single_ones():
    prior = bent()
    many = torch.randn(3, 2, dtype=torch.double)
    together = draw(prior, many, n=4, batch_size=5)
    for j in range(3):
        one_by_one = draw(prior, many[j : j + 1], n=4, first=4 * j)
        assert torch.allclose(together.samples[j], one_by_one.samples[0], rtol=0, atol=1e-12)
        assert torch.allclose(together.chi2[j], one_by_one.chi2[0])
    assert not torch.allclose(together.samples, draw(prior, many, n=4, generator=1).samples)
    assert draw(prior.float(), many, n=2).samples.dtype == torch.float


def test_a_generator_for_each_sample_decides_on_it_alone():
    prior, many = bent(), torch.randn(2, 2, dtype=torch.double)
    x = draw(prior, many, n=2, generator=[5, 6, 7, 8]).samples
    alone = draw(prior, many[1:], n=1, generator=[7]).samples
    assert torch.allclose(x[1, 0], alone[0, 0], rtol=0, atol=1e-12)
    assert not torch.allclose(x[1, 0], x[1, 1])


class Shaky(Operator):
    """The image, without half of its pixels in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x)


def test_an_operator_measures_in_evaluation_mode():
    calm, shaky = Shaky().eval(), Shaky().train()
    seen, options = torch.zeros(1, 1, 1, PIXELS), {"n": 2, "steps": DDIMSteps(5), "generator": 0}
    expected, found = (sample_posterior(bent(), seen, A, GaussianNoise(1.0), **options) for A in (calm, shaky))
    assert torch.equal(found.samples, expected.samples)
    assert torch.equal(found.chi2, expected.chi2)
    assert shaky.dropout.training


def test_the_models_mode_and_gradients_are_left_alone():
    expected, prior = draw(bent(), n=2).samples, bent().train()
    parameter = prior.model.network.weight = nn.Parameter(torch.ones(()))
    with torch.no_grad():
        found = draw(prior, n=2)
    assert torch.equal(found.samples, expected)
    assert prior.model.network.dropout.training
    assert parameter.grad is None
    assert not found.samples.requires_grad
    assert not torch.allclose(found.samples, draw(prior, n=2, guidance=DPSGuidance(0.0)).samples)


def test_a_prior_is_recognised_by_what_it_has():
    """Not by isinstance, which from Python 3.12 on does not see the buffers of a module."""
    model = Diffusion(nn.Conv2d(1, 1, 1), (1, 4, 4))
    assert is_prior(model)
    with pytest.raises(TypeError):
        isinstance(model, DiffusionPrior)
    assert not is_prior(nn.Identity())
    del model.sample_shape
    assert not is_prior(model)


# Samples that diverge are redrawn, counted and reported


@dataclass(frozen=True)
class Explosive:
    """Overflows wherever the first pixel of the initial state is above 1 and `zeta` is above `limit`."""

    zeta: float
    limit: float

    def shift(self, guess: Guess, evidence: Evidence) -> torch.Tensor:
        burst = (guess.y_t[:, :1, :1, :1] > 1) & (self.zeta > self.limit) & (guess.step.t > 0.999)
        return DPSGuidance(self.zeta).shift(guess, evidence) + torch.where(burst, torch.inf, 0.0)

    def smaller(self) -> "Explosive":
        return replace(self, zeta=self.zeta / 2)


def test_diverged_samples_are_redrawn_with_half_the_step():
    """They become what half the step, halved again, gives for their own measurement; the others do not change."""
    prior, many = bent(), torch.tensor([[0.0, 1.0], [-2.0, 0.5]], dtype=torch.double)
    expected = [draw(prior, many, n=24, guidance=DPSGuidance(zeta)) for zeta in (0.04, 0.01)]
    found = draw(prior, many, n=24, guidance=Explosive(0.04, 0.015))
    for times, reference in zip((0, 2), expected, strict=True):
        rows = found.redrawn == times
        assert rows.any(1).all()
        assert torch.allclose(found.samples[rows], reference.samples[rows], atol=1e-12)
        assert torch.allclose(found.chi2[rows], reference.chi2[rows])
    assert set(found.redrawn.flatten().tolist()) == {0, 2}
    assert not found.failed.any()
    assert f"{int((found.redrawn > 0).sum())} redrawn, 0 failed" in str(found)
    assert DPSGuidance(0.2, level, 3.0).smaller().zeta == 0.1
    assert DPSGuidance(0.2, level, 3.0).smaller().weight == 3.0


def test_samples_that_never_settle_are_reported():
    prior = bent()
    with pytest.warns(UserWarning, match=r"of 16 samples diverged 2 times"):
        found = draw(prior, n=16, guidance=Explosive(0.04, 1e-9), constraint=level, retries=1)
    failed = found.failed[0]
    assert 0 < failed.sum() < 16
    assert torch.equal(found.redrawn[0], failed.long())
    for part in (found.samples, found.mirror_samples, found.chi2, found.distance):
        assert torch.equal(part[0].isnan().flatten(1).all(1) if part.ndim > 2 else part[0].isnan(), failed)
    calm = draw(prior, n=16, guidance=DPSGuidance(0.04))
    assert torch.allclose(found.samples[0, ~failed], calm.samples[0, ~failed], atol=1e-12)


@dataclass(frozen=True)
class Push:
    """Adds one number at every step."""

    amount: float

    def shift(self, guess: Guess, evidence: Evidence) -> torch.Tensor:
        return torch.full_like(guess.y_t, self.amount)

    def smaller(self) -> "Push":
        return self


@pytest.mark.parametrize(("amount", "steepness"), [(2e4, 1e-9), (0.0, 3000.0)], ids=["state", "measurement"])
def test_what_is_finite_may_have_diverged_too(amount, steepness):
    """A state far outside the data, and an image whose χ² overflows."""
    A = operator(lambda x: torch.exp(steepness * x.square().flatten(1)))
    prior, _ = problem(mirrored=False)
    options = {"n": 4, "guidance": Push(amount), "steps": DDIMSteps(5), "generator": 1}
    with pytest.warns(UserWarning, match="4 of 4 samples"):
        found = sample_posterior(prior, SEEN.new_zeros(1, 3), A, GaussianNoise(1.0), **options)
    assert found.failed.all()


def test_no_operator_sees_a_diverged_sample():
    """Solvers may refuse, or never finish, where there is NaN."""

    @operator
    def strict(x: torch.Tensor) -> torch.Tensor:
        assert x.isfinite().all()
        return x.flatten(1)

    options = {"n": 16, "guidance": Explosive(0.01, 0), "steps": DDIMSteps(9), "generator": 0}
    with pytest.warns(UserWarning, match="diverged"):
        found = sample_posterior(bent(), SEEN.new_zeros(1, 3), strict, GaussianNoise(1.0), **options)
    assert found.failed.any()


def test_a_step_far_too_large_is_brought_down():
    """Under A(x) = x³ a large ζ makes the state run away."""

    @operator
    def cubed(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) ** 3

    prior, _ = problem(mirrored=False)
    options = {"n": 8, "guidance": DPSGuidance(0.5), "steps": DDIMSteps(40), "generator": 0}
    seen, noise = torch.full((1, 3), 0.1, dtype=torch.double), GaussianNoise(0.01)
    with pytest.warns(UserWarning, match="smaller zeta"):
        wild = sample_posterior(prior, seen, cubed, noise, retries=0, **options)
    tamed = sample_posterior(prior, seen, cubed, noise, retries=12, **options)
    assert wild.failed.any()
    assert not tamed.failed.any()
    assert torch.equal(tamed.redrawn > 0, wild.failed)


# Mistakes


def sum_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy().sum(3))


@constraint
def level_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.abs(x.detach().numpy().mean((1, 2, 3))))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"measurement": torch.zeros(2)}, DataError, r"shape \(2,\) .* Linear makes \(M, 2\) .* measurement\[None\]"),
        ({"measurement": torch.zeros(1, 3)}, DataError, r"shape \(1, 3\) .* Linear makes \(M, 2\)"),
        ({"measurement": torch.tensor([[0.0, torch.nan]])}, DataError, "1 values that are NaN"),
        ({"operator": operator(sum_by_numpy), "measurement": torch.zeros(1, 1, 1)}, UsageError, "sum_by_numpy breaks"),
        ({"operator": sum_by_numpy}, UsageError, "not an Operator"),
        ({"operator": Columns((5,))}, DataError, "columns 0 to 2"),
        ({"noise": GaussianNoise(torch.ones(3))}, DataError, "does not fit"),
        ({"noise": 0.1}, UsageError, r"GaussianNoise\(std=0\.1\), not 0\.1"),
        ({"measurement": [[0.0, 1.0]]}, UsageError, r"a tensor \(M, …\), not list"),
        ({"constraint": DivergenceFree()}, DataError, r"\(1, 1, 1, 3\)"),
        ({"guidance": DPSGuidance(0.1, DivergenceFree())}, DataError, r"\(1, 1, 1, 3\)"),
        ({"constraint": sum_by_numpy}, UsageError, r"not a Constraint.*constraint\(fn\)"),
        ({"guidance": DPSGuidance(0.1, sum_by_numpy)}, UsageError, "not a Constraint"),
        ({"guidance": DPSGuidance(0.1, level_by_numpy)}, UsageError, "level_by_numpy cannot guide"),
        ({"n": 0}, UsageError, "n must be at least 1"),
        ({"retries": -1}, UsageError, "retries"),
        ({"batch_size": 0}, UsageError, "batch_size"),
        ({"prior": Mirrored(VAE((1, 8, 8), 2, 2), IdentityMap())}, UsageError, "holds a VAE"),
    ],
)
def test_mistakes_are_named_before_sampling(options, error, message):
    def forbidden(*_):
        raise AssertionError("sampling has begun")

    prior = bent()
    prior.model.denoise = forbidden
    settings = {"prior": prior, "measurement": SEEN, "operator": OPERATOR, "noise": GAUSSIAN} | options
    with pytest.raises(error, match=message):
        sample_posterior(**settings)


def test_rules_are_moved_to_the_models_device():
    class Elsewhere(Constraint):
        moved = None

        def to(self, device):
            self.moved = device
            return self

        def distance(self, x):
            assert self.moved == x.device
            return x.square().mean((1, 2, 3))

    measured, guiding = Elsewhere(), Elsewhere()
    found = draw(bent(), n=2, constraint=measured, guidance=DPSGuidance(0.01, guiding, 1.0))
    assert torch.equal(found.distance[0], found.samples[0].square().mean((1, 2, 3)))
    assert measured.moved == guiding.moved == torch.device("cpu")


def test_a_rule_without_gradient_can_be_measured():
    found = draw(bent(), n=2, constraint=level_by_numpy)
    assert torch.equal(found.distance[0], found.samples[0].mean((1, 2, 3)).abs())


def test_a_map_without_gradient_is_named():
    prior = bent()
    prior.mirror.to_data = torch.no_grad()(prior.mirror.to_data)
    with pytest.raises(UsageError, match="leaves autograd"):
        draw(prior)
