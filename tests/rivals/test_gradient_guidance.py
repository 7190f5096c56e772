"""Guidance: the conditional mean of a Gaussian and its law, nothing at strength 0, and no step beyond bounds."""

import numpy as np
import pytest
import torch
from rival_oracles import ALONE, CORRELATED, LEVEL, MEAN, NORMAL, SCALE, SHIFT, assert_law, given_rule, law, model_of

from generative.oracles import marginals
from namm.constraints import constraint
from namm.errors import UsageError
from namm.generative import DPMSolver, EulerMaruyama
from namm.rivals import GradientGuidance
from namm.rivals.gradient_guidance import GuidedDenoiser


def test_the_estimate_is_the_mean_given_state_and_rule():
    """(y(0), y(t), a·x) are jointly Gaussian: E[y(0) | y(t), a·x = b] by regression on the last two."""
    model = model_of(CORRELATED).double()
    y, t = torch.randn(5, 1, 1, 4).double(), torch.tensor([0.02, 0.2, 0.5, 0.8, 1.0]).double()
    found = GuidedDenoiser(model, ALONE, 1.0).denoise(y, t).flatten(1).numpy()
    for k, (m, s) in enumerate(np.concatenate([each.numpy() for each in marginals(t)], 1)):
        seen = np.vstack([m * np.eye(4), SCALE * NORMAL])
        noise = np.diag([s**2] * 4 + [0.0])
        value = np.append(y[k].flatten().numpy(), LEVEL - SHIFT * NORMAL.sum())
        gain = CORRELATED @ seen.T @ np.linalg.inv(seen @ CORRELATED @ seen.T + noise)
        assert found[k] == pytest.approx(MEAN + gain @ (value - seen @ MEAN), abs=1e-8)


def test_samples_have_the_law_given_the_rule():
    x = GradientGuidance().sample(
        model_of(CORRELATED), ALONE, 8000, sampler=DPMSolver(25), generator=0, batch_size=4000
    )
    assert_law(x, *given_rule(*law(CORRELATED)))
    assert ALONE(x).max() < 1e-3


@pytest.mark.parametrize("sampler", [DPMSolver(10), DPMSolver(10, stochastic=True), EulerMaruyama(20)])
def test_strength_0_is_the_plain_model_bit_for_bit(sampler):
    model = model_of(CORRELATED)
    plain = model.sample(9, sampler=sampler, generator=2, progress=False)
    guided = GradientGuidance(0.0).sample(model, ALONE, 9, sampler=sampler, generator=2)
    if isinstance(sampler, EulerMaruyama):  # it asks for the score, which comes from D with other rounding
        torch.testing.assert_close(guided, plain, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(guided, plain)


def test_steps_are_no_longer_than_the_datas_spread():
    far = constraint(lambda x: (x.sum((1, 2, 3)) - 1e4).abs())
    model, t = model_of(CORRELATED), torch.full((3,), 0.5)
    y = torch.randn(3, 1, 1, 4)
    move = GuidedDenoiser(model, far, 1.0).denoise(y, t) - model.denoise(y, t)
    assert move.square().mean((1, 2, 3)).sqrt().numpy() == pytest.approx(1.0, rel=1e-4)


def test_on_the_rule_nothing_moves():
    held = constraint(lambda x: x.sum((1, 2, 3)) * 0)
    model, t, y = model_of(CORRELATED), torch.full((3,), 0.5), torch.randn(3, 1, 1, 4)
    assert torch.equal(GuidedDenoiser(model, held, 1.0).denoise(y, t), model.denoise(y, t))


def test_a_rule_without_a_gradient_is_refused():
    detached = constraint(lambda x: x.detach().sum((1, 2, 3)).abs(), name="detached")
    with pytest.raises(UsageError, match="detached cannot guide"):
        GradientGuidance().sample(model_of(CORRELATED), detached, 2, sampler=DPMSolver(2))
