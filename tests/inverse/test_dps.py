"""Posterior sampling against posteriors in closed form; DPS itself, its gradient and its bias."""

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

from namm.errors import UsageError
from namm.generative import DDIM, Ancestral, Diffusion
from namm.inverse import (
    AncestralSteps,
    DDIMSteps,
    DPSGuidance,
    Evidence,
    GaussianNoise,
    OfficialSteps,
    Operator,
    guided_step,
    reverse,
    sample_posterior,
)
from namm.inverse.reverse import DiffusionPrior, is_prior

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
@pytest.mark.parametrize("steps", [AncestralSteps(100), DDIMSteps(50), OfficialSteps(100)], ids=str)
def test_exact_guidance_reaches_the_posterior(mirrored, steps):
    """The mean at once, up to the start at t = 1; the covariance as the steps get smaller."""
    mean, covariance = posterior()
    finer = replace(steps, steps=2 * steps.steps)
    coarse, fine = (moments(mirrored, each) for each in (steps, finer))
    of_mean = 5e-3 if isinstance(steps, OfficialSteps) else 1e-5
    assert np.abs(fine[0] - mean).max() <= of_mean
    errors = [np.abs(found - covariance).max() for _, found in (coarse, fine)]
    assert errors[1] <= 0.04
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


def test_the_papers_zeta_is_one_of_data_that_are_not_standardised():
    """y ← y − ζ ∇_y ‖m − A(x̂)‖_Γ with the paper's ζ, the gradient with respect to y = 2.5 u + 0.4 itself."""
    prior = bent()
    model, step = prior.model, DDIMSteps(20).table(prior.model)[12]
    u = torch.randn(4, 1, 1, PIXELS, dtype=torch.double)
    evidence = Evidence(torch.randn(4, 2, dtype=torch.double), OPERATOR, GAUSSIAN)
    y = (2.5 * u + 0.4).requires_grad_()
    denoised = model.denoise((y - 0.4) / 2.5, torch.full((4,), step.t, dtype=torch.double))
    norm = evidence.norm(prior.mirror.to_data(2.5 * denoised + 0.4))
    expected = -0.1 * torch.autograd.grad(norm.sum(), y)[0]

    ours = DPSGuidance.of_paper(0.1, model)
    stepped, plain = (
        guided_step(u, step, model, prior.mirror.to_data, guidance, evidence) for guidance in (ours, DPSGuidance(0.0))
    )
    assert torch.allclose(2.5 * (stepped - plain), expected, rtol=1e-9, atol=1e-12)
    guided = DPSGuidance.of_paper(0.1, model, constraint=level, weight=3.0)
    assert (guided.zeta, guided.constraint, guided.weight) == (ours.zeta, level, 3.0)
    with pytest.raises(UsageError, match=r"prior\.model, not a Mirrored"):
        DPSGuidance.of_paper(0.1, prior)


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


def test_a_prior_is_told_by_what_it_has():
    """Not by isinstance, which from Python 3.12 on does not see the buffers of a module."""
    model = Diffusion(nn.Conv2d(1, 1, 1), (1, 4, 4))
    assert is_prior(model)
    with pytest.raises(TypeError):
        isinstance(model, DiffusionPrior)
    assert not is_prior(nn.Identity())
    del model.sample_shape
    assert not is_prior(model)
