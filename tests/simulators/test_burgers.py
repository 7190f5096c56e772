"""Burgers' steps against SciPy's root finder, an exact solution, conservation laws and finite differences."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from namm.errors import UsageError
from namm.simulators.burgers import BurgersGrid, advance, crank_nicolson, euler, rhs, rollout

PAPER = BurgersGrid(dx=10 / 63, dt=0.025)
DEMO = BurgersGrid(dx=10 / 31, dt=0.05)
STEPS = pytest.mark.parametrize("step", [euler, crank_nicolson])


def slow_rhs(u, dx, nu):
    n = len(u)
    return np.array(
        [
            -u[i] * (u[(i + 1) % n] - u[i - 1]) / (2 * dx) + nu * (u[(i + 1) % n] - 2 * u[i] + u[i - 1]) / dx**2
            for i in range(n)
        ]
    )


def noise(*shape, amplitude=1.5, dtype=torch.float64):
    return amplitude * (2 * torch.rand(shape, dtype=dtype) - 1)


def defect(v, u, grid, dim=-1):
    """How far v is from solving v = u + Δt/2 (f(u) + f(v)), in units of what rounding can do."""
    equation = v - u - grid.dt / 2 * (rhs(u, grid, dim) + rhs(v, grid, dim))
    magnitude = 1 + 4 * grid.diffusion + 4 * abs(grid.advection) * v.abs().max()
    return float(equation.abs().max() / (torch.finfo(v.dtype).eps * magnitude * v.abs().max()))


@pytest.mark.parametrize("n", [3, 8, 13])
def test_rhs_is_the_central_difference_formula(n):
    u = noise(n)
    expected = slow_rhs(u.numpy(), 0.3, 0.07)
    np.testing.assert_allclose(rhs(u, BurgersGrid(0.3, 0.01, nu=0.07)), expected, rtol=1e-12)


def test_euler_adds_dt_times_the_rhs():
    u = noise(9)
    np.testing.assert_allclose(euler(u, DEMO), u.numpy() + 0.05 * slow_rhs(u.numpy(), 10 / 31, 0.05), rtol=1e-13)


@pytest.mark.parametrize(
    "grid",
    [PAPER, DEMO, BurgersGrid(10 / 63, 0.1), BurgersGrid(10 / 127, 0.1), BurgersGrid(-0.2, 0.05, nu=0.0)],
    ids=["paper", "demo", "coarse time", "fine space", "inviscid, reversed"],
)
def test_crank_nicolson_is_the_root_that_scipy_finds(grid):
    u = noise(24)

    def equation(v):
        return v - u.numpy() - grid.dt / 2 * (slow_rhs(u.numpy(), grid.dx, grid.nu) + slow_rhs(v, grid.dx, grid.nu))

    root = scipy.optimize.root(equation, euler(u, grid).numpy(), tol=1e-14)
    assert np.abs(root.fun).max() < 1e-12
    np.testing.assert_allclose(crank_nicolson(u, grid), root.x, atol=1e-12, rtol=0)


@settings(max_examples=150)
@given(
    n=st.integers(3, 90),
    courant=st.floats(0.01, 0.4),
    nu=st.floats(0, 1),
    amplitude=st.floats(0.01, 1.5),
    single=st.booleans(),
)
def test_white_noise_is_solved_to_rounding(n, courant, nu, amplitude, single):
    dx = 10 / (n - 1)
    grid = BurgersGrid(dx, courant * dx / 1.5, nu)
    u = noise(4, n, amplitude=amplitude, dtype=torch.float32 if single else torch.float64)
    assert defect(crank_nicolson(u, grid), u, grid) < 16


@pytest.mark.parametrize("grid", [PAPER, DEMO], ids=["paper", "demo"])
def test_noise_of_twice_the_stated_speed_is_still_solved(grid):
    # Rough states of |u| ≤ 1.5 reach such speeds within the five steps between two columns.
    u = noise(4000, 64, amplitude=2 * grid.max_speed)
    v = crank_nicolson(u, grid)
    assert (v - u - grid.dt / 2 * (rhs(u, grid) + rhs(v, grid))).abs().max() < 1e-12
    assert defect(crank_nicolson(u.float(), grid), u.float(), grid) < 4


@settings(max_examples=150)
@given(n=st.integers(12, 300), waves=st.integers(1, 3), front=st.floats(0.01, 0.5), single=st.booleans())
def test_smooth_states_are_solved_to_rounding_however_large_the_step(n, waves, front, single):
    # dt is what makes Δt·max|u_x| = front: up to 24 grid cells in one step, where neither Picard nor Jacobi converge.
    dx = 10 / (n - 1)
    k = 2 * math.pi * waves / (n * dx)
    grid = BurgersGrid(dx, front / (1.5 * k))
    u = 1.5 * torch.sin(k * dx * torch.arange(n, dtype=torch.float32 if single else torch.float64))
    assert defect(crank_nicolson(u, grid), u, grid) < 100


@pytest.mark.parametrize("grid", [PAPER, DEMO, BurgersGrid(10 / 63, 0.05)], ids=["paper", "demo", "coarse time"])
def test_float32_differs_from_float64_by_rounding(grid):
    u = noise(8, 64)
    single = crank_nicolson(u.float(), grid)
    assert single.dtype == torch.float32
    assert (single - crank_nicolson(u.float().double(), grid)).abs().max() < 1e-6


@pytest.mark.parametrize(("step", "ratio"), [(euler, 2), (crank_nicolson, 4)])
def test_order_of_accuracy_in_time(step, ratio):
    u = 0.5 + 0.4 * torch.sin(2 * math.pi * torch.arange(32, dtype=torch.float64) / 32)
    coarse, middle, fine = (advance(u, BurgersGrid(10 / 31, 0.4 / steps), steps, step) for steps in (8, 16, 32))
    assert (coarse - middle).norm() / (middle - fine).norm() == pytest.approx(ratio, rel=0.05)


def test_converges_to_an_exact_solution():
    """Cole–Hopf: φ = 1 + c e^{−νk²t} cos kx solves the heat equation, so u = −2ν φ_x/φ solves Burgers'."""
    nu, end, k, c = 0.5, 1.0, 1.0, 0.8

    def exact(x, t):
        decay = c * math.exp(-nu * k**2 * t)
        return 2 * nu * k * decay * torch.sin(k * x) / (1 + decay * torch.cos(k * x))

    def error(n):
        x = 2 * math.pi / n * torch.arange(n, dtype=torch.float64)
        u = advance(exact(x, 0.0), BurgersGrid(2 * math.pi / n, end / n, nu), n)
        return float((u - exact(x, end)).abs().max())

    assert error(128) < 1e-3
    assert error(64) / error(128) == pytest.approx(4, rel=0.1)


@STEPS
def test_mass_is_conserved(step):
    u = noise(5, 33, amplitude=0.5) + 0.5
    drift = advance(u, DEMO, 50, step).sum(-1) - u.sum(-1)
    assert drift.abs().max() < 1e-12
    assert (advance(u, DEMO, 50, step) - u).abs().max() > 0.1


@STEPS
def test_reversing_space_is_changing_the_sign_of_dx(step):
    u = noise(4, 21)
    reverse = BurgersGrid(-DEMO.dx, DEMO.dt)
    assert torch.equal(step(u.flip(-1), reverse).flip(-1), step(u, DEMO))
    assert not torch.allclose(step(u, reverse), step(u, DEMO), atol=1e-3)


@STEPS
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_space_may_be_any_axis(step, dim):
    u = noise(6, 7, 8)
    torch.testing.assert_close(step(u, DEMO, dim), step(u.movedim(dim, -1), DEMO).movedim(-1, dim), rtol=0, atol=1e-15)


@STEPS
def test_narrow_types_are_stepped_in_float32(step):
    u = noise(3, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        stepped = step(u, DEMO)
    assert torch.equal(stepped, step(u.float(), DEMO))


@pytest.mark.parametrize("grid", [PAPER, BurgersGrid(-10 / 127, 0.1)], ids=["paper", "fine space, reversed"])
def test_gradients_are_exact(grid):
    u = noise(2, 7, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda u: crank_nicolson(u, grid, -2), u)
    assert torch.autograd.gradgradcheck(lambda u: crank_nicolson(u, grid, -2), u)


def test_gradients_under_function_transforms():
    u = noise(4, 9)
    loss = lambda u: crank_nicolson(u, DEMO).pow(3).sum()  # noqa: E731
    u.requires_grad_()
    expected = torch.autograd.grad(loss(u), u)[0]
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(u.detach()), expected)


@pytest.mark.parametrize("amplitude", [3, 5])
def test_fronts_that_break_within_a_step_stay_tame(amplitude):
    # There the implicit equation may have no solution; a Newton iteration gives NaN here.
    u = noise(8, 64, 64, amplitude=amplitude, dtype=torch.float32).requires_grad_()
    slope = {}
    for step in (euler, crank_nicolson):
        v = advance(u, PAPER, 5, step, dim=-2)
        assert v.isfinite().all()
        slope[step] = torch.autograd.grad(v.abs().sum(), u)[0].abs().max().item()
    assert slope[crank_nicolson] < 200 * slope[euler]


def test_memory_does_not_grow_with_the_sweeps():
    saved = []
    u = noise(2, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        crank_nicolson(u, BurgersGrid(10 / 127, 0.1))
    assert len(saved) < 10 < BurgersGrid(10 / 127, 0.1).sweeps(torch.float64)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend):
    def pull(step, u):
        v = step(u, DEMO, -2)
        return v.detach(), *torch.autograd.grad(v.pow(2).sum(), u)

    torch.compiler.reset()
    u = noise(2, 12, 5, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(crank_nicolson, fullgraph=True, backend=backend)
    for ours, eager in zip(pull(compiled, u), pull(crank_nicolson, u), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)


def test_rollout_starts_after_the_first_column_of_steps():
    u = noise(2, 3, 10, amplitude=0.5)
    images = rollout(u, DEMO, columns=4, inner_steps=3)
    assert images.shape == (2, 3, 10, 4)
    for column in range(4):
        assert torch.equal(images[..., column], advance(u, DEMO, 3 * (column + 1)))
    assert torch.equal(rollout(u, DEMO, 1, 2, euler)[..., 0], euler(euler(u, DEMO), DEMO))


@pytest.mark.parametrize(
    "bad", [{"dx": 0.0}, {"dt": 0.0}, {"dt": math.nan}, {"nu": -1.0}, {"max_speed": 0.0}, {"dt": math.inf}]
)
def test_grids_without_meaning_are_refused(bad):
    (name,) = bad
    with pytest.raises(UsageError, match=f"{name}={next(iter(bad.values()))}.*must"):
        BurgersGrid(**{"dx": 0.1, "dt": 0.1} | bad)


def test_a_step_out_of_proportion_is_refused():
    with pytest.raises(UsageError, match=r"crosses 1\.5e\+03 grid cells.*smaller dt"):
        crank_nicolson(torch.ones(8), BurgersGrid(dx=0.1, dt=100.0))
