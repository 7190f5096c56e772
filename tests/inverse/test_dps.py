"""Posterior sampling against posteriors in closed form; DPS itself, its bias, its divergences, its errors."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from posterior_oracles import COVARIANCE, MATRIX, MEAN, MEASUREMENT, NOISE, PIXELS, posterior, problem
from torch import nn

from namm.constraints import constraint
from namm.errors import DataError, UsageError
from namm.generative import DDIM, VAE, Ancestral, Diffusion, Mirrored, Velocity
from namm.inverse import (
    AncestralSteps,
    Columns,
    DDIMSteps,
    DPSGuidance,
    Evidence,
    GaussianNoise,
    Guess,
    Linear,
    OfficialSteps,
    guided_step,
    operator,
    reverse,
    sample_posterior,
)
from namm.maps import IdentityMap

OPERATOR, GAUSSIAN = Linear(torch.tensor(MATRIX)), GaussianNoise(covariance=torch.tensor(NOISE))
SEEN = torch.tensor(MEASUREMENT)[None]


@constraint
def level(x: torch.Tensor) -> torch.Tensor:
    """How far the mean square is from 1."""
    return (x.square().mean((1, 2, 3)) - 1).abs()


def draw(prior, measurement=SEEN, **options):
    settings = {"n": 8, "steps": DDIMSteps(20), "generator": 0} | options
    return sample_posterior(prior, measurement, OPERATOR, GAUSSIAN, **settings)


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


def moments(mirrored: bool, steps) -> tuple[np.ndarray, np.ndarray]:
    prior, exact = problem(mirrored)
    evidence = Evidence(SEEN.expand(PIXELS * (steps.steps + 1) + 1, -1), OPERATOR, GAUSSIAN)
    u = reverse(prior.model, prior.mirror.to_data, steps, exact, evidence, Impulses(steps.steps))
    responses = prior.mirror.to_data(prior.model.unstandardise(u)).flatten(1).numpy()
    each = responses[:-1] - responses[-1]
    return responses[-1], each.T @ each


@pytest.mark.parametrize("mirrored", [False, True], ids=["data space", "mirror space"])
@pytest.mark.parametrize("steps", [AncestralSteps(200), DDIMSteps(100), OfficialSteps(200)], ids=str)
def test_exact_guidance_reaches_the_posterior(mirrored, steps):
    """The mean at once, up to the start at t = 1; the covariance as the steps get smaller."""
    mean, covariance = posterior()
    finer = replace(steps, steps=2 * steps.steps)
    coarse, fine = (moments(mirrored, each) for each in (steps, finer))
    of_mean = 5e-3 if isinstance(steps, OfficialSteps) else 1e-5
    assert np.abs(fine[0] - mean).max() <= of_mean
    errors = [np.abs(found - covariance).max() for _, found in (coarse, fine)]
    assert errors[1] <= 0.02
    assert errors[1] <= 0.6 * errors[0]


@pytest.mark.parametrize("mirrored", [False, True], ids=["data space", "mirror space"])
def test_exact_guidance_within_monte_carlo_error(mirrored):
    prior, exact = problem(mirrored)
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


def test_the_bias_of_dps():
    """A small ζ gives the posterior of a measurement without noise; a large one overshoots, its steps never shorten."""
    prior, _ = problem(mirrored=False)
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
    ],
    ids=str,
)
def test_without_guidance_the_prior_is_sampled(steps, sampler):
    prior, _ = problem(mirrored=True)
    found = draw(prior, guidance=DPSGuidance(0.0), steps=steps)
    x, y = prior.sample_pairs(8, sampler=sampler, generator=0)
    assert torch.allclose(found.mirror_samples[0], y, rtol=0, atol=1e-10)
    assert torch.allclose(found.samples[0], x, rtol=0, atol=1e-10)


class Bent(nn.Module):
    """A denoiser and a map that are not linear."""

    def forward(self, y_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.sin(2 * y_t + t.reshape(-1, 1, 1, 1))

    def to_data(self, y: torch.Tensor) -> torch.Tensor:
        return y + 0.5 * torch.tanh(y.flip(-1))

    def to_mirror(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def bent() -> Mirrored:
    model = Diffusion(Bent(), (1, 1, PIXELS), prediction=Velocity()).double()
    model.mean.fill_(0.4)
    model.scale.fill_(2.5)
    return Mirrored(model, Bent())


@pytest.mark.parametrize("guidance", [DPSGuidance(0.2), DPSGuidance(0.2, level, 3.0)], ids=["DPS", "CG-DPS"])
def test_the_gradient_runs_through_everything(guidance):
    """Against central differences of ζ(‖m − A(f(D))‖_Γ + w ℓ(f(D))) written out; per sample."""
    prior = bent()
    model, step = prior.model, DDIMSteps(20).table(prior.model)[12]
    y = torch.randn(4, 1, 1, PIXELS, dtype=torch.double)
    evidence = Evidence(torch.randn(4, 2, dtype=torch.double), OPERATOR, GAUSSIAN)

    def loss(y_t: torch.Tensor) -> np.ndarray:
        x = prior.mirror.to_data(2.5 * model.denoise(y_t, torch.full((4,), step.t)) + 0.4).flatten(1).numpy()
        r = evidence.measurement.numpy() - x @ MATRIX.T
        norm = np.sqrt(np.einsum("bi,bi->b", r, np.linalg.solve(NOISE, r.T).T))
        return norm + (0 if guidance.constraint is None else 3 * np.abs((x**2).mean(1) - 1))

    with torch.no_grad():
        plain = step.denoised * model.denoise(y, torch.full((4,), step.t)) + step.state * y
    shift = guided_step(y, step, model, prior.mirror.to_data, guidance, evidence) - plain
    for pixel in range(PIXELS):
        e = torch.zeros(1, 1, 1, PIXELS, dtype=torch.double)
        e[..., pixel] = 1e-6
        slope = (loss(y + e) - loss(y - e)) / 2e-6
        assert shift[:, 0, 0, pixel].numpy() == pytest.approx(-0.2 * slope, rel=1e-6, abs=1e-8)


def test_the_constraint_is_measured_and_guides():
    prior, _ = problem(mirrored=False)
    options = {"n": 64, "steps": DDIMSteps(100), "constraint": level}
    plain, guided = (
        draw(prior, guidance=each, **options) for each in (DPSGuidance(0.01), DPSGuidance(0.01, level, 5.0))
    )
    assert torch.allclose(plain.distance[0], level(plain.samples[0]))
    assert guided.distance.mean() < plain.distance.mean() / 2
    assert draw(prior, n=2).distance is None
    assert "ℓ" in str(plain)


# Many measurements, batches, seeds


def test_many_measurements_are_many_single_ones():
    prior = bent()
    many = torch.randn(3, 2, dtype=torch.double)
    together = draw(prior, many, n=4, batch_size=5)
    for j in range(3):
        alone = draw(prior, many[j : j + 1], n=4, first=4 * j)
        assert torch.allclose(together.samples[j], alone.samples[0], rtol=0, atol=1e-12)
        assert torch.allclose(together.chi2[j], alone.chi2[0])
    assert not torch.allclose(together.samples, draw(prior, many, n=4, generator=1).samples)
    assert draw(prior.float(), many, n=2).samples.dtype == torch.float


def test_the_models_mode_and_gradients_are_left_alone():
    prior = bent().train()
    parameter = prior.model.network.weight = nn.Parameter(torch.ones(()))
    with torch.no_grad():
        found = draw(prior, n=2)
    assert prior.training
    assert parameter.grad is None
    assert not found.samples.requires_grad
    assert not torch.allclose(found.samples, draw(prior, n=2, guidance=DPSGuidance(0.0)).samples)


# Divergence


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
    prior = bent()
    expected = [draw(prior, n=16, guidance=DPSGuidance(zeta)) for zeta in (0.04, 0.01)]
    found = draw(prior, n=16, guidance=Explosive(0.04, 0.015))
    redrawn = found.redrawn[0]
    assert set(redrawn.tolist()) == {0, 2}
    assert not found.failed.any()
    for times, reference in zip((0, 2), expected, strict=True):
        assert torch.allclose(found.samples[0, redrawn == times], reference.samples[0, redrawn == times], atol=1e-12)
        assert torch.allclose(found.chi2[0, redrawn == times], reference.chi2[0, redrawn == times])
    assert f"{int((redrawn > 0).sum())} redrawn, 0 failed" in str(found)


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"measurement": torch.zeros(2)}, DataError, r"shape \(2,\) .* Linear makes \(M, 2\) .* measurement\[None\]"),
        ({"measurement": torch.zeros(1, 3)}, DataError, r"shape \(1, 3\) .* Linear makes \(M, 2\)"),
        ({"measurement": torch.tensor([[0.0, torch.nan]])}, DataError, "1 values that are NaN"),
        ({"operator": operator(sum_by_numpy), "measurement": torch.zeros(1, 1, 1)}, UsageError, "sum_by_numpy breaks"),
        ({"operator": Columns((5,))}, DataError, "columns 0 to 2"),
        ({"noise": GaussianNoise(torch.ones(3))}, DataError, "does not fit"),
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


def test_a_map_without_gradient_is_named():
    prior = bent()
    prior.mirror.to_data = torch.no_grad()(prior.mirror.to_data)
    with pytest.raises(UsageError, match="leaves autograd"):
        draw(prior)


@pytest.mark.parametrize(
    "make",
    [lambda: DPSGuidance(-0.1), lambda: DPSGuidance(torch.inf), lambda: DPSGuidance(0.1, level, -1.0)],
)
def test_steps_that_go_uphill_are_refused(make):
    with pytest.raises(UsageError, match="finite and not negative"):
        make()


def test_tables_that_make_no_sense_are_refused():
    model = bent().model
    with pytest.raises(UsageError, match="eta"):
        DDIMSteps(20, eta=1.5)
    with pytest.raises(UsageError, match="at least 2 steps"):
        AncestralSteps(1).table(model)
    with pytest.raises(UsageError, match="more than beta_max = 20 steps"):
        OfficialSteps(20).table(model)
