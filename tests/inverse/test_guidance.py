"""DPS and CG-DPS: their gradient and the paper's ζ. Guidance by a likelihood: exact where its assumption holds."""

import math

import numpy as np
import pytest
import torch
from posterior_oracles import GAUSSIAN, MATRIX, NOISE, OPERATOR, PIXELS, bent, draw, level, marginal, problem, process
from torch import nn

from namm.errors import UsageError
from namm.generative import Diffusion, Mirrored
from namm.inverse import (
    AncestralSteps,
    Columns,
    DDIMSteps,
    DPSGuidance,
    Evidence,
    GaussianNoise,
    Guess,
    LikelihoodGuidance,
    Step,
    guided_step,
    sample_posterior,
)
from namm.maps import IdentityMap

SCALE, STD = 0.7, 0.3


# DPS


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
        unguided = step.denoised * model.denoise(y, torch.full((4,), step.t)) + step.state * y
    shift = guided_step(y, step, model, prior.mirror.to_data, guidance, evidence) - unguided
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
    stepped, unguided = (
        guided_step(u, step, model, prior.mirror.to_data, guidance, evidence) for guidance in (ours, DPSGuidance(0.0))
    )
    assert torch.allclose(2.5 * (stepped - unguided), expected, rtol=1e-9, atol=1e-12)
    guided = DPSGuidance.of_paper(0.1, model, constraint=level, weight=3.0)
    assert (guided.zeta, guided.constraint, guided.weight) == (ours.zeta, level, 3.0)
    with pytest.raises(UsageError, match=r"prior\.model, not a Mirrored"):
        DPSGuidance.of_paper(0.1, prior)


def test_the_constraint_is_measured_and_guides():
    prior, _ = problem(mirrored=False)
    options = {"n": 64, "steps": DDIMSteps(100), "constraint": level}
    unguided, guided = (
        draw(prior, guidance=each, **options) for each in (DPSGuidance(0.01), DPSGuidance(0.01, level, 5.0))
    )
    assert torch.allclose(unguided.distance[0], level(unguided.samples[0]))
    assert guided.distance.mean() < unguided.distance.mean() / 2
    assert draw(prior, n=2).distance is None
    assert "ℓ" in str(unguided)


@pytest.mark.parametrize(
    "make",
    [lambda: DPSGuidance(-0.1), lambda: DPSGuidance(torch.inf), lambda: DPSGuidance(0.1, level, -1.0)],
)
def test_steps_that_go_uphill_are_refused(make):
    with pytest.raises(UsageError, match="finite and not negative"):
        make()


# The likelihood


class WhiteNoise(nn.Module):
    """E[ε | y(t)] of white noise."""

    def __init__(self, straight: bool):
        super().__init__()
        self.straight = straight

    def forward(self, y_t, t):
        m, s = marginal(float(t[0]), self.straight)
        return s / (m**2 + s**2) * y_t


def white(straight: bool = False):
    model = Diffusion(WhiteNoise(straight), (1, 1, 8), **process(straight)).double()
    model.scale.fill_(SCALE)
    return Mirrored(model, IdentityMap())


@pytest.mark.parametrize("straight", [False, True], ids=["vp", "straight"])
@pytest.mark.parametrize("steps", [AncestralSteps(400), DDIMSteps(400)], ids=["ancestral", "ddim"])
def test_likelihood_of_independent_pixels_is_exact(steps, straight):
    """x ~ N(0, SCALE²) in every pixel: mean v m/(v + σ²) and variance v σ²/(v + σ²), whatever the number of steps."""
    prior, seen, noise = white(straight), Columns(range(4)), GaussianNoise(STD)
    measurement = torch.linspace(-1, 1, 4, dtype=torch.double).reshape(1, 1, 1, 4)
    guidance = LikelihoodGuidance.of(prior.model)
    options = {"n": 3000, "guidance": guidance, "steps": steps, "batch_size": 3000, "generator": 0, "progress": False}
    x = sample_posterior(prior, measurement, seen, noise, **options).samples[0]
    v, s2 = SCALE**2, STD**2
    spread = math.sqrt(v * s2 / (v + s2))
    standard_error = spread / math.sqrt(3000)
    expected = (measurement * v / (v + s2))[0]
    assert float((x[..., :4].mean(0) - expected).abs().max()) < 4 * standard_error + 0.01 * spread
    assert float(x[..., :4].std(0).mean()) == pytest.approx(spread, rel=0.03)
    assert float(x[..., 4:].std(0).mean()) == pytest.approx(SCALE, rel=0.03)  # not seen: as the prior has it


def test_the_shift_is_the_gradient_of_the_log_likelihood():
    """By finite differences, through the network, the map, the operator and the rule."""
    prior, guidance = bent(), LikelihoodGuidance(0.8, 0.6, level, 3.0)
    step = Step(0.4, *marginal(0.4), 0.5, 0.3, 0.1)
    evidence = Evidence(torch.tensor([[0.3, -0.2]], dtype=torch.double), OPERATOR, GAUSSIAN)
    gamma = float(torch.linalg.inv(torch.tensor(NOISE)).diagonal().mean())
    assert GAUSSIAN.mean_precision == pytest.approx(gamma)
    assert GaussianNoise(torch.tensor([0.5, 1.0])).mean_precision == pytest.approx(2.5)

    def guess(u):
        y_t = u.reshape(1, 1, 1, -1)
        denoised = prior.model.denoise(y_t, y_t.new_full((1,), step.t))
        return Guess(y_t, denoised, prior.mirror.to_data(prior.model.unstandardise(denoised)), step)

    def log_p(u):
        x = guess(u).x
        residual = evidence.measurement - OPERATOR(x)
        chi2 = (residual @ torch.linalg.inv(torch.tensor(NOISE)) * residual).sum()
        m, s = marginal(0.4)
        return -0.5 * 0.6 * chi2 / (1 + 0.8 * s**2 / (m**2 + s**2) * gamma) - 3.0 * level(x)[0]

    u = torch.tensor([0.2, -0.4, 0.9], dtype=torch.double)
    found = guidance.shift(guess(u.clone().requires_grad_()), evidence).flatten()
    eye = 1e-6 * torch.eye(3, dtype=torch.double)
    numeric = torch.stack([(log_p(u + e) - log_p(u - e)) / 2e-6 for e in eye])
    torch.testing.assert_close(found, step.score_factor * numeric, rtol=1e-6, atol=1e-8)
    half = guidance.smaller().shift(guess(u.clone().requires_grad_()), evidence).flatten()
    torch.testing.assert_close(half, found / 2)


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="strength must be finite"):
        LikelihoodGuidance(1.0, -1.0)
    with pytest.raises(UsageError, match=r"such as prior\.model, not a Mirrored"):
        LikelihoodGuidance.of(white())
