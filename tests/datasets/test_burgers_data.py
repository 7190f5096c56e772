"""Burgers' images against the parity file, and against a NumPy Newton solver sharing no code with ours."""

import numpy as np
import pytest
import torch

from namm.constraints.burgers import Burgers
from namm.datasets import BurgersTrajectories, burgers_trajectories
from namm.errors import UsageError

DEMO = {"size": 32, "dt": 0.05}


def rhs(u: np.ndarray, dx: float, nu: float) -> np.ndarray:
    right, left = np.roll(u, -1, -1), np.roll(u, 1, -1)
    return -u * (right - left) / (2 * dx) + nu * (right - 2 * u + left) / dx**2


def newton_crank_nicolson(u: np.ndarray, dx: float, dt: float, nu: float) -> np.ndarray:
    """Solve v = u + Δt/2 (f(u) + f(v)) with the dense Jacobian; u: (m, n)."""
    n = u.shape[-1]
    up, down = np.roll(np.eye(n), 1, 1), np.roll(np.eye(n), -1, 1)
    v = u.copy()
    for _ in range(8):
        slope = (np.roll(v, -1, -1) - np.roll(v, 1, -1)) / (2 * dx)
        jacobian = -slope[..., None] * np.eye(n) - v[..., None] * (up - down) / (2 * dx)
        jacobian = jacobian + nu * (up - 2 * np.eye(n) + down) / dx**2
        residual = v - u - dt / 2 * (rhs(u, dx, nu) + rhs(v, dx, nu))
        v = v - np.linalg.solve(np.eye(n) - dt / 2 * jacobian, residual[..., None])[..., 0]
    return v


def test_images_of_the_reference_states_are_the_reference_images(parity):
    reference = parity("burgers.npz")
    recipe = BurgersTrajectories(
        size=reference["ic"].shape[1],
        dt=float(reference["cfg/dt"]),
        inner_steps=int(reference["cfg/inner_steps"]),
        nu=float(reference["cfg/nu"]),
    )
    assert recipe.grid.dx == pytest.approx(float(reference["cfg/dx"]))
    images = recipe.trajectories(torch.from_numpy(reference["ic"]))
    np.testing.assert_allclose(images.permute(0, 2, 3, 1), reference["cn_image"], atol=1e-9)


@pytest.mark.parametrize("settings", [{}, DEMO], ids=["paper", "demo"])
def test_columns_follow_one_another_by_crank_nicolson(settings):
    recipe = BurgersTrajectories(**settings)
    images = recipe.block(3, "test", 0)[:3]
    assert images.dtype == torch.float32
    assert images.shape == (3, 1, recipe.size, recipe.size)
    states = images[:, 0].flip(-2).double().transpose(1, 2).numpy()  # (images, time, x)
    after = states[:, :-1].reshape(-1, recipe.size)
    for _ in range(5):
        after = newton_crank_nicolson(after, 10 / (recipe.size - 1), recipe.dt, 0.05)
    floor = np.abs(after.reshape(3, -1, recipe.size) - states[:, 1:]).mean((1, 2))
    assert floor.max() < 1e-6


@pytest.mark.parametrize("settings", [{}, DEMO, {**DEMO, "flipped": False}], ids=["paper", "demo", "upright"])
def test_the_constraint_finds_rounding_alone(settings):
    recipe = BurgersTrajectories(**settings)
    rule = Burgers(dt=recipe.dt, flipped=recipe.flipped)
    assert rule(recipe.block(0, "train", 0)).max() < 1e-6


def test_the_first_column_is_five_steps_after_the_initial_state():
    recipe = BurgersTrajectories(**DEMO, flipped=False)
    u = recipe.initial_states(2, torch.Generator().manual_seed(0))
    after = u.numpy()
    for _ in range(5):
        after = newton_crank_nicolson(after, 10 / 31, 0.05, 0.05)
    np.testing.assert_allclose(recipe.trajectories(u)[:, 0, :, 0], after, atol=1e-12)


def test_orientation_only_reverses_the_rows():
    upright = BurgersTrajectories(**DEMO, flipped=False).block(0, "val", 0)
    assert torch.equal(BurgersTrajectories(**DEMO).block(0, "val", 0), upright.flip(-2))


def test_initial_states_are_distributed_as_numpy_draws_them():
    recipe = BurgersTrajectories()
    ours = recipe.initial_states(6000, torch.Generator().manual_seed(0)).numpy()
    assert (ours.min(1) == 0).all()
    assert (ours.max(1) == 1).all()

    x = np.linspace(-1, 1, 64)
    s = np.sqrt(3) * np.abs(x[:, None] - x) / 0.2
    rng = np.random.default_rng(0)
    theirs = rng.multivariate_normal(np.ones(64), (1 + s) * np.exp(-s), 6000)
    theirs = (theirs - theirs.min(1, keepdims=True)) / np.ptp(theirs, axis=1, keepdims=True)
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 5 * 0.27 * np.sqrt(2 / 6000)
    assert np.abs(np.cov(ours.T) - np.cov(theirs.T)).max() < 5 * 0.1 * np.sqrt(2 / 6000)


def test_images_do_not_depend_on_how_many_are_drawn():
    recipe = BurgersTrajectories(size=8)
    whole = recipe.images(1, "train", 0, 130)
    assert torch.equal(recipe.images(1, "train", 60, 70), whole[60:70])
    assert torch.equal(burgers_trajectories(3, size=8, seed=1), whole[:3])
    assert len(np.unique(whole.numpy(), axis=0)) == 130


@pytest.mark.parametrize("settings", [{"size": 2}, {"inner_steps": 0}, {"dt": 0.0}, {"length": 0.0}, {"nu": -1.0}])
def test_settings_without_meaning_are_refused(settings):
    (name,) = settings
    with pytest.raises(UsageError, match=f"{name}.*must"):
        BurgersTrajectories(**settings)
