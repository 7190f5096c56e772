"""Samplers against distributions whose score is known in closed form."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from hypothesis import given
from hypothesis import strategies as st
from oracles import Gaussian, Mixture, exact_diffusion
from scipy.integrate import solve_ivp

from namm.errors import UsageError
from namm.generative.diffusion import Diffusion
from namm.generative.samplers import (
    DDIM,
    Ancestral,
    DPMSolver,
    EulerMaruyama,
    OfficialSteps,
    UniPC,
    even_in_noise,
    even_in_time,
)
from namm.generative.schedules import VPSDE, Flow, Schedule, Straight

MEAN = torch.tensor([0.5, -1.0])
COVARIANCE = torch.tensor([[1.0, 0.6], [0.6, 0.5]])
TWO_MODES = torch.tensor([[-1.0, 0.5], [1.0, -0.5]]), torch.tensor([0.3, 0.7])

# Largest error of the mean and of the covariance that steps of this size leave. The reverse ODE carries the difference
# between N(0, I) and the true start, m(1) μ = 0.0066 μ, to its end; the reverse SDE forgets it.
SAMPLERS = [
    (EulerMaruyama(1000), 0.001, 0.002),
    (Ancestral(1000), 1e-4, 0.012),
    (DDIM(200), 0.004, 0.03),
    (DDIM(1000, eta=1.0), 1e-4, 0.012),
    (DPMSolver(25), 0.004, 0.025),
    (DPMSolver(25, stochastic=True), 1e-4, 0.02),
    (UniPC(25), 0.004, 0.0005),
]


@dataclass
class Impulses:
    """Sample 2k + p is given the single noise 1 at step k in pixel p, the last sample none.

    A sampler with a linear score is linear in its noise, so these responses give its mean and covariance exactly.
    """

    steps: int

    def __call__(self, step: int) -> torch.Tensor:
        z = torch.zeros(2 * self.steps + 1, 1, 1, 2, dtype=torch.double)
        z[2 * step, ..., 0] = z[2 * step + 1, ..., 1] = 1
        return z


@dataclass
class IndependentNoise:
    """Noise of n samples, a function of the step."""

    n: int
    pixels: int

    def __call__(self, step: int) -> torch.Tensor:
        return torch.randn(self.n, 1, 1, self.pixels, generator=torch.Generator().manual_seed(step))


def moments(sampler, network) -> tuple[torch.Tensor, torch.Tensor]:
    responses = sampler(exact_diffusion(network, 2).double(), Impulses(sampler.steps)).flatten(1)
    mean = responses[-1]
    each = responses[:-1] - mean
    return mean, each.T @ each


@pytest.mark.parametrize(
    "options", [{}, {"velocity": True}, {"straight": True}], ids=["epsilon", "velocity", "straight paths"]
)
@pytest.mark.parametrize(("sampler", "of_mean", "of_covariance"), SAMPLERS, ids=str)
def test_gaussian_moments(sampler, of_mean, of_covariance, options):
    mean, covariance = moments(sampler, Gaussian(MEAN, COVARIANCE, **options))
    assert (mean - MEAN).abs().max() <= of_mean
    assert (covariance - COVARIANCE).abs().max() <= of_covariance


@pytest.mark.parametrize(
    ("sampler", "finer", "order"),
    [
        (EulerMaruyama(100), EulerMaruyama(400), 1),
        (Ancestral(100), Ancestral(400), 1),
        (DDIM(25), DDIM(100), 1),
        (DPMSolver(25), DPMSolver(100), 2),
        (DPMSolver(25, stochastic=True), DPMSolver(100, stochastic=True), 2),
    ],
    ids=str,
)
def test_errors_fall_with_the_order_of_the_method(sampler, finer, order):
    """Four times the steps, 4^order times less error, with half of that to spare."""
    network = Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.3], [0.3, 1.0]]))
    coarse, fine = (
        (moments(each, network)[1] - torch.tensor([[1.0, 0.3], [0.3, 1.0]])).abs().max() for each in (sampler, finer)
    )
    assert fine <= coarse * 2 / 4**order


@pytest.mark.parametrize(
    ("sampler", "straight"),
    [
        (EulerMaruyama(1000), False),
        (Ancestral(1000), False),
        (DDIM(200), False),
        (DDIM(500, eta=1.0), False),
        (DPMSolver(50), False),
        (DPMSolver(50, stochastic=True), False),
        (UniPC(50), False),
        (EulerMaruyama(300), True),
        (Ancestral(300), True),
        (DDIM(100), True),
        (DDIM(300, eta=1.0), True),
        (DPMSolver(50), True),
        (DPMSolver(50, stochastic=True), True),
        (UniPC(50), True),
    ],
    ids=str,
)
def test_a_mixture_keeps_its_weights_and_widths(sampler, straight):
    options = {"straight": True} if straight else {"velocity": True}
    network, n = Mixture(*TWO_MODES, 0.01, **options), 6000
    y = sampler(exact_diffusion(network, 2), IndependentNoise(n, 2)).flatten(1)
    left = y[:, 0] < 0
    assert left.float().mean() == pytest.approx(0.3, abs=0.02)
    assert y[left].mean(0).tolist() == pytest.approx([-1.0, 0.5], abs=0.02)
    assert y[left].std(0).tolist() == pytest.approx([0.1, 0.1], rel=0.06)


# Straight paths


@pytest.mark.parametrize(
    "sampler", [DDIM(30), DDIM(30, eta=0.7), DPMSolver(20), DPMSolver(20, stochastic=True), UniPC(20)], ids=str
)
def test_schedules_differ_in_scale_and_clock_alone(sampler):
    """From the same s/m to the same s/m, the states of straight paths over √(m² + s²) are those of the VPSDE."""
    vp = exact_diffusion(Mixture(*TWO_MODES, 0.01), 2)
    first, last = vp.sde.noise_ratio(torch.tensor([1, vp.t_min], dtype=torch.double))
    sde = Straight(float(first / (1 + first)))
    t_min = float(last / (1 + last))
    straight = Diffusion(Mixture(*TWO_MODES, 0.01, straight=True), (1, 1, 2), prediction=Flow(), sde=sde, t_min=t_min)
    paths = []
    for model in (vp, straight):
        states = []
        model.network.register_forward_pre_hook(lambda _, inputs, states=states: states.append(inputs))
        noise = IndependentNoise(50, 2)
        end = sampler(model.double(), lambda step, noise=noise: noise(step).double())
        scaled = [y / np.hypot(*(float(each[0]) for each in model.sde.marginal(t[:1]))) for y, t in states]
        paths.append(torch.stack([*scaled, end]))
    assert len(paths[0]) == sampler.steps + 1
    assert (paths[0] - paths[1]).abs().max() <= 1e-4  # float32 noise levels in diffusers


def test_the_ode_of_straight_paths_is_the_flow_itself():
    """dy/dt = E[ε − y(0) | y(t)], integrated by SciPy from t_max to t_min."""
    network = Mixture(*TWO_MODES, 0.05, straight=True)
    model, start = exact_diffusion(network, 2).double(), IndependentNoise(8, 2)(0).double()

    def flow(t, y):
        return network(torch.tensor(y).reshape(8, 1, 1, 2), torch.full((8,), t, dtype=torch.double)).flatten().numpy()

    first = start * np.hypot(0.995, 0.005)
    solved = solve_ivp(flow, (0.995, model.t_min), first.flatten().numpy(), rtol=1e-9, atol=1e-10).y[:, -1]
    at_the_end = torch.tensor(solved).reshape(8, 1, 1, 2)
    expected = model.denoise(at_the_end, torch.full((8,), model.t_min, dtype=torch.double))  # the last step
    for sampler, error in ((DDIM(400), 5e-3), (DPMSolver(200), 1.5e-3), (UniPC(100), 2e-4)):
        assert (sampler(model, lambda step: start) - expected).abs().max() <= error


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_solver_is_that_of_diffusers_for_flow_matching(order):
    """There σ is t itself, the network's output is the flow, and the state is not rescaled."""
    model = exact_diffusion(Mixture(*TWO_MODES, 0.05, straight=True), 2)
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=order, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(12)
    times = even_in_noise(model, 12)
    scheduler.sigmas = times.float()
    noise = IndependentNoise(20, 2)
    y = noise(0) * np.hypot(0.995, 0.005)
    for t, index in zip(times, scheduler.timesteps, strict=False):
        y = scheduler.step(model.network(y, t.expand(20)), index, y).prev_sample
    assert (DPMSolver(12, order)(model, noise) - y).abs().max() <= 1e-4


def test_at_the_end_of_a_straight_path_the_mean_is_all_that_is_known():
    model = exact_diffusion(Gaussian(MEAN, COVARIANCE, straight=True), 2)
    denoised = model.denoise(torch.randn(5, 1, 1, 2), torch.ones(5))
    assert torch.allclose(denoised.flatten(1), MEAN.expand(5, 2), atol=1e-6)


# Tables and times


@dataclass
class Bare:
    """A process without a network: enough for a table."""

    sde: Schedule
    t_min: float = 1e-3


@given(
    st.builds(Ancestral, st.integers(2, 60)) | st.builds(DDIM, st.integers(2, 60), st.floats(0, 1)),
    st.builds(VPSDE, st.floats(0.05, 1.0), st.floats(2.0, 30.0)) | st.builds(Straight, st.floats(0.9, 0.999)),
)
def test_a_step_leads_from_one_marginal_to_the_next(sampler, sde):
    """With y(t) = m(t) y(0) + s(t) ε and D = y(0): a + b m(t) = m(s) and b² s(t)² + c² = s(s)², down to s = 0."""
    table = sampler.table(Bare(sde))
    assert len(table) == sampler.steps
    assert [step.t for step in table] == sorted({step.t for step in table}, reverse=True)
    for step, after in zip(table, [*table[1:], None], strict=True):
        t = torch.tensor(step.t, dtype=torch.double)
        assert (step.mean, step.std) == pytest.approx((float(sde.mean(t)), float(sde.std(t))), rel=1e-12)
        mean, std = (1.0, 0.0) if after is None else (after.mean, after.std)
        assert step.denoised + step.state * step.mean == pytest.approx(mean, rel=1e-9)
        assert (step.state * step.std) ** 2 + step.noise**2 == pytest.approx(std**2, rel=1e-7, abs=1e-12)
    assert table[-1].noise == 0


def test_tables_that_make_no_sense_are_refused():
    for eta in (-0.1, 1.5):
        with pytest.raises(UsageError, match=r"DDIM: eta must lie between 0 and 1"):
            DDIM(20, eta=eta)
    with pytest.raises(UsageError, match="at least 2 steps"):
        Ancestral(1).table(Bare(VPSDE()))
    with pytest.raises(UsageError, match="more than beta_max = 20 steps"):
        OfficialSteps(20).table(Bare(VPSDE()))
    with pytest.raises(UsageError, match=r"those of VPSDE\(\), not of Straight.*take AncestralSteps"):
        OfficialSteps(30).table(Bare(Straight()))


def test_the_ancestral_step_is_ddim_with_all_its_noise(monkeypatch):
    monkeypatch.setattr("namm.generative.samplers.even_in_noise", even_in_time)
    model = exact_diffusion(Gaussian(MEAN, COVARIANCE), 2).double()
    a, b = (sampler(model, Impulses(50)) for sampler in (Ancestral(50), DDIM(50, eta=1.0)))
    assert (a - b).abs().max() <= 1e-12


def test_times_are_those_of_the_paper():
    times = even_in_time(exact_diffusion(Gaussian(MEAN, COVARIANCE), 2), 1000)
    assert torch.allclose(times, torch.arange(1000, -1, -1, dtype=torch.double) / 1000, atol=1e-15, rtol=0)


def test_times_even_in_noise():
    model = exact_diffusion(Gaussian(MEAN, COVARIANCE), 2)
    times = even_in_noise(model, 20)
    assert times[0] == pytest.approx(1, abs=1e-12)
    assert times[-2] == pytest.approx(1e-3, rel=1e-9)
    assert times[-1] == 0
    steps = model.sde.noise_ratio(times[:-1]).log().diff()
    assert (steps / steps[0] - 1).abs().max() <= 1e-9


def test_a_power_below_one_takes_large_steps_first():
    model = exact_diffusion(Gaussian(MEAN, COVARIANCE), 2)
    levels = model.sde.noise_ratio(even_in_noise(model, 20, 0.5)[:-1]).log()
    u = (levels - levels[0]) / (levels[-1] - levels[0])
    assert (u.square() - torch.linspace(0, 1, 20, dtype=torch.double)).abs().max() <= 1e-9


@pytest.mark.parametrize("variance", [0.01, 0.1, 1.0, 10.0, 100.0])
def test_25_stochastic_steps_keep_every_scale_of_gaussian_data(variance):
    _, covariance = moments(DPMSolver(25, stochastic=True), Gaussian(MEAN, variance * torch.eye(2)))
    assert covariance[0, 0] == pytest.approx(variance, rel=0.019)


@pytest.mark.parametrize("sampler", [s for s, *_ in SAMPLERS], ids=str)
def test_every_step_is_one_evaluation_and_one_tick(sampler):
    network, evaluated, ticks = Gaussian(MEAN, COVARIANCE), [], []
    network.register_forward_hook(lambda *_: evaluated.append(1))
    few = type(sampler)(7)
    y = few(exact_diffusion(network, 2), IndependentNoise(2, 2), lambda: ticks.append(1))
    assert len(evaluated) == len(ticks) == 7
    assert y.dtype == torch.float32


@pytest.mark.parametrize("sampler", [EulerMaruyama(1), UniPC(0)], ids=str)
def test_too_few_steps(sampler):
    with pytest.raises(UsageError, match="at least 2 steps"):
        sampler(exact_diffusion(Gaussian(MEAN, COVARIANCE), 2), IndependentNoise(2, 2))


@pytest.mark.parametrize("sampler", [DPMSolver(8), UniPC(8), EulerMaruyama(8)], ids=str)
def test_autocast_does_not_round_the_state(sampler):
    """The oracle computes in float64 whatever autocast says, so only the sampler could change."""
    model = exact_diffusion(Mixture(*TWO_MODES, 0.1), 2)
    expected = sampler(model, IndependentNoise(64, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = sampler(model, IndependentNoise(64, 2))
    assert torch.equal(found, expected)
