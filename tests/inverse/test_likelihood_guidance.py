"""Guidance by a likelihood: exact where its assumption is, and its gradient, strength and rule."""

import math

import pytest
import torch
from posterior_oracles import GAUSSIAN, NOISE, OPERATOR, bent, level, marginal
from torch import nn

from namm.errors import UsageError
from namm.generative import Diffusion, Mirrored
from namm.inverse import (
    AncestralSteps,
    Columns,
    DDIMSteps,
    Evidence,
    GaussianNoise,
    Guess,
    LikelihoodGuidance,
    Step,
    sample_posterior,
)
from namm.maps import IdentityMap

SCALE, STD = 0.7, 0.3


class WhiteNoise(nn.Module):
    """E[ε | y(t)] of white noise."""

    def forward(self, y_t, t):
        return marginal(float(t[0]))[1] * y_t


def white():
    model = Diffusion(WhiteNoise(), (1, 1, 8)).double()
    model.scale.fill_(SCALE)
    return Mirrored(model, IdentityMap())


@pytest.mark.parametrize("steps", [AncestralSteps(400), DDIMSteps(400)], ids=["ancestral", "ddim"])
def test_of_independent_pixels_it_is_exact(steps):
    """x ~ N(0, SCALE²) in every pixel: mean v m/(v + σ²) and variance v σ²/(v + σ²), whatever the number of steps."""
    prior, seen, noise = white(), Columns(range(4)), GaussianNoise(STD)
    measurement = torch.linspace(-1, 1, 4, dtype=torch.double).reshape(1, 1, 1, 4)
    guidance = LikelihoodGuidance.of(prior.model)
    options = {"n": 3000, "guidance": guidance, "steps": steps, "batch_size": 3000, "generator": 0, "progress": False}
    x = sample_posterior(prior, measurement, seen, noise, **options).samples[0]
    v, s2 = SCALE**2, STD**2
    spread = math.sqrt(v * s2 / (v + s2))
    standard_error = spread / math.sqrt(3000)
    wanted = (measurement * v / (v + s2))[0]
    assert float((x[..., :4].mean(0) - wanted).abs().max()) < 4 * standard_error + 0.01 * spread
    assert float(x[..., :4].std(0).mean()) == pytest.approx(spread, rel=0.03)
    assert float(x[..., 4:].std(0).mean()) == pytest.approx(SCALE, rel=0.03)  # not seen: as the prior has it


def test_the_shift_is_the_gradient_of_what_it_says():
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
    torch.testing.assert_close(found, step.of_score * numeric, rtol=1e-6, atol=1e-8)
    half = guidance.smaller().shift(guess(u.clone().requires_grad_()), evidence).flatten()
    torch.testing.assert_close(half, found / 2)


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="strength must be finite"):
        LikelihoodGuidance(1.0, -1.0)
    with pytest.raises(UsageError, match=r"such as prior\.model, not a Mirrored"):
        LikelihoodGuidance.of(white())
