"""The schedules against quadrature, differences and extended precision; the conversions against each other."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from namm.errors import UsageError
from namm.generative.schedules import VPSDE, Epsilon, Flow, Schedule, Straight, Velocity

times = st.floats(1e-5, 1.0)
preserving = st.builds(VPSDE, st.floats(0.01, 1.0), st.floats(1.0, 30.0))


@dataclass(frozen=True)
class Quarter(Schedule):
    """A schedule of a user's own: once around a quarter of the circle, and a hundredth more noise."""

    def mean(self, t):
        return torch.cos(1.5 * t)

    def std(self, t):
        return 1.01 * torch.sin(1.5 * t)

    def time_of(self, noise_ratio):
        return torch.atan(noise_ratio / 1.01) / 1.5


schedules = preserving | st.sampled_from([Straight(), Quarter()])
fitting = st.sampled_from([(VPSDE(), Epsilon()), (VPSDE(), Velocity()), (Straight(), Epsilon()), (Straight(), Flow())])


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.double)


@given(preserving, times)
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


@given(schedules, st.floats(1e-5, 0.995))
def test_noise_ratio_and_its_inverse(sde, t):
    t = double(t)
    ratio = sde.noise_ratio(t)
    assert float(ratio) == pytest.approx(float(sde.std(t) / sde.mean(t)), rel=1e-9)
    assert float(sde.time_of(ratio)) == pytest.approx(float(t), rel=1e-9)


@given(schedules, st.floats(0.01, 0.98))
def test_drift_and_diffusion_are_slopes_of_the_marginals(sde, t):
    """f = d log m/dt and g² = ds²/dt − 2 f s², by central differences."""

    def slope(function):
        return float(function(double(t + 1e-5)) - function(double(t - 1e-5))) / 2e-5

    f = slope(lambda t: sde.mean(t).log())
    variance = float(sde.std(double(t)).square())
    with torch.no_grad():  # as samplers ask for them
        assert float(sde.drift(double(t))) == pytest.approx(f, rel=1e-5)
        expected = slope(lambda t: sde.std(t).square()) - 2 * f * variance
        assert float(sde.diffusion(double(t))) == pytest.approx(expected, rel=1e-5)


@given(schedules, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_transition_solves_the_sde(sde, a, b):
    """From s to t: the mean by exp ∫ f, and the noise of every u carried on to t, ∫ g(u)² (m(t)/m(u))² du."""
    s, t = sorted((a, b))
    kept, added = (float(each) for each in sde.transition(double(s), double(t)))
    mean = float(sde.mean(double(t)))
    log_kept, _ = quad(lambda u: float(sde.drift(double(u))), s, t)
    noise, _ = quad(lambda u: float(sde.diffusion(double(u))) * (mean / float(sde.mean(double(u)))) ** 2, s, t)
    assert kept == pytest.approx(math.exp(log_kept), rel=1e-6)
    assert added == pytest.approx(noise, rel=1e-6, abs=1e-12)


@given(schedules, st.floats(1e-3, 0.995))
def test_scale_is_the_spread_of_standardised_images(sde, t):
    marginal = sde.marginal(double(t))
    assert float(sde.scale(double(t))) == pytest.approx(math.hypot(marginal.mean, marginal.std), rel=1e-12)


@pytest.mark.parametrize("steps", [10, 1000])
def test_discrete_betas_have_the_continuous_marginals(steps):
    sde, betas = VPSDE(), VPSDE().discrete_betas(steps)
    t = torch.arange(1, steps + 1, dtype=torch.double) / steps
    remaining = -torch.expm1(torch.log1p(-betas).cumsum(0))  # 1 − ᾱ
    assert betas.shape == (steps,)
    assert torch.allclose(remaining, sde.std(t).square(), rtol=1e-12, atol=0)


@given(st.floats(1e-5, 0.99), fitting, st.integers(0, 2**31))
def test_conversions_round_trip(t, pair, seed):
    """A perfect output gives back the image and the noise it was made of, by every way around."""
    sde, prediction = pair
    rng = torch.Generator().manual_seed(seed)
    y, epsilon = torch.randn(2, 3, 2, 4, 4, generator=rng, dtype=torch.double)
    marginal = sde.marginal(double(t).expand(3))
    assert prediction.fits(marginal)
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


def test_flow_is_the_derivative_in_time():
    y, epsilon = torch.randn(2, 1, 1, 2, 2, dtype=torch.double)

    def path(t):
        marginal = Straight().marginal(double(t))
        return marginal.mean * y + marginal.std * epsilon

    slope = (path(0.4 + 1e-3) - path(0.4 - 1e-3)) / 2e-3
    assert torch.allclose(Flow().target(y, epsilon, Straight().marginal(double(0.4))), slope, atol=1e-12)


def test_predictions_fit_their_schedules_alone():
    t = torch.linspace(0.01, 0.99, 9)
    assert not Velocity().fits(Straight().marginal(t))
    assert not Flow().fits(VPSDE().marginal(t))
    assert not Velocity().fits(Quarter().marginal(t))
    assert not Flow().fits(Quarter().marginal(t))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: VPSDE(2.0, 1.0), "need 0 < beta_min <= beta_max"),
        (lambda: Straight(1.0), "t_max must lie between 0 and 1, where s/m would be infinite, not 1.0"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(make, match):
    with pytest.raises(UsageError, match=match):
        make()
