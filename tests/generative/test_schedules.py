"""The schedule against quadrature and extended precision; the conversions against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from namm.errors import UsageError
from namm.generative.schedules import VPSDE, Epsilon, Velocity

times = st.floats(1e-5, 1.0)
schedules = st.builds(VPSDE, st.floats(0.01, 1.0), st.floats(1.0, 30.0))


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)


@given(schedules, times)
def test_log_mean_is_minus_half_the_integral_of_beta(sde, t):
    integral, _ = quad(lambda u: float(sde.beta(double(u))), 0, t)
    assert float(sde.log_mean(double(t))) == pytest.approx(-integral / 2, rel=1e-9)


@given(times)
def test_float32_marginals_keep_their_digits(t):
    """In float32 the plain difference 1 − exp 2c has a relative error of 0.06 at t = 1e-5."""
    t = np.float32(t)
    c = -(np.longdouble(0.05) * t + np.longdouble(4.975) * np.longdouble(t) ** 2)
    single, sde = torch.tensor(t), VPSDE()
    assert float(sde.mean(single)) == pytest.approx(float(np.exp(c)), rel=2e-6)
    assert float(sde.std(single)) == pytest.approx(float(np.sqrt(-np.expm1(2 * c))), rel=1e-6)


@given(schedules, times)
def test_noise_ratio_and_its_inverse(sde, t):
    t = double(t)
    ratio = sde.noise_ratio(t)
    assert float(ratio) == pytest.approx(float(sde.std(t) / sde.mean(t)), rel=1e-9)
    assert float(sde.time_of(ratio)) == pytest.approx(float(t), rel=1e-9)


@pytest.mark.parametrize("steps", [10, 1000])
def test_discrete_betas_have_the_continuous_marginals(steps):
    sde, betas = VPSDE(), VPSDE().discrete_betas(steps)
    t = torch.arange(1, steps + 1, dtype=torch.double) / steps
    remaining = -torch.expm1(torch.log1p(-betas).cumsum(0))  # 1 − ᾱ
    assert betas.shape == (steps,)
    assert torch.allclose(remaining, sde.std(t).square(), rtol=1e-12, atol=0)


@given(times, st.sampled_from([Epsilon(), Velocity()]), st.integers(0, 2**31))
def test_conversions_round_trip(t, prediction, seed):
    """A perfect output gives back the image and the noise it was made of, by every way around."""
    rng = torch.Generator().manual_seed(seed)
    y, epsilon = torch.randn(2, 3, 2, 4, 4, generator=rng, dtype=torch.double)
    marginal = VPSDE().marginal(double(t).expand(3))
    y_t = marginal.mean * y + marginal.std * epsilon
    output = prediction.target(y, epsilon, marginal)
    denoised = prediction.denoised(output, y_t, marginal)
    score = -prediction.epsilon(output, y_t, marginal) / marginal.std
    near = {"rtol": 0, "atol": 1e-10}
    assert torch.allclose(denoised, y, **near)
    assert torch.allclose(prediction.epsilon(output, y_t, marginal), epsilon, **near)
    assert torch.allclose(-marginal.std * score, epsilon, **near)
    assert torch.allclose((y_t + marginal.std.square() * score) / marginal.mean, y, **near)  # Tweedie


def test_velocity_is_the_derivative_along_the_circle():
    """With m = cos φ, s = sin φ, v = d y(t) / dφ (Salimans and Ho 2022)."""
    y, epsilon = torch.randn(2, 1, 1, 2, 2, dtype=torch.double)
    marginal = VPSDE().marginal(double(0.3))
    angle = torch.atan2(marginal.std, marginal.mean).requires_grad_()
    y_t = angle.cos() * y + angle.sin() * epsilon
    by_hand = torch.stack([torch.autograd.grad(p, angle, retain_graph=True)[0].squeeze() for p in y_t.flatten()])
    assert torch.allclose(Velocity().target(y, epsilon, marginal).flatten(), by_hand, atol=1e-12)


def test_a_schedule_that_adds_no_noise_is_refused():
    with pytest.raises(UsageError, match="need 0 < beta_min <= beta_max"):
        VPSDE(2.0, 1.0)
