"""The Burgers' constraint: what ℓ averages, which way residuals point, what projection keeps, what is refused."""

import math

import numpy as np
import pytest
import torch

from namm.constraints.burgers import Burgers
from namm.errors import DataError, UsageError
from namm.simulators.burgers import BurgersGrid, advance, crank_nicolson, euler

STEPS = pytest.mark.parametrize("step", [euler, crank_nicolson])


def images(n=3, rows=16, columns=9, dtype=torch.float32):
    """Smooth periodic columns with a little noise, in [0, 1]."""
    x = torch.arange(rows, dtype=dtype)[:, None] / rows + torch.rand(n, 1, 1, columns, dtype=dtype)
    return 0.5 + 0.4 * torch.sin(2 * math.pi * x) + 0.05 * torch.randn(n, 1, rows, columns, dtype=dtype)


def stay(u, grid, dim=-1):
    return u


def test_distance_is_the_mean_over_all_steps():
    x = images()
    differences = np.abs(np.diff(x.numpy(), axis=-1)).mean((1, 2, 3))
    np.testing.assert_allclose(Burgers(step=stay)(x), differences, rtol=1e-6)


def test_each_column_is_compared_with_where_its_predecessor_leads():
    x = images(rows=11, columns=4, dtype=torch.float64)
    rule = Burgers(nu=0.1, length=4.0, dt=0.01, inner_steps=3, flipped=False)
    grid = BurgersGrid(dx=0.4, dt=0.01, nu=0.1)
    expected = [x[..., j + 1] - advance(x[..., j], grid, 3) for j in range(3)]
    torch.testing.assert_close(rule.residual(x), torch.stack(expected, -1), rtol=0, atol=1e-14)
    torch.testing.assert_close(rule(x), torch.stack(expected, -1).abs().mean((1, 2, 3)))


@STEPS
def test_orientation_is_only_a_convention(step):
    x = images()
    upright, flipped = Burgers(step, flipped=False), Burgers(step)
    assert torch.equal(flipped.residual(x.flip(-2)).flip(-2), upright.residual(x))
    assert torch.equal(flipped.project(x.flip(-2)).flip(-2), upright.project(x))
    assert ((upright(x) - flipped(x)).abs() > 1e-3).all()


def test_a_raised_pixel_shows_positive_in_its_own_column_and_then_downstream():
    rule = Burgers()
    x = rule.project(images(1, 32, 12))
    y = x.clone()
    y[0, 0, 10, 5] += 0.1
    residual = rule.residual(y)[0, 0]
    assert residual.shape == (32, 11)
    assert residual[10, 4].item() == pytest.approx(0.1, abs=1e-5)
    assert residual[10, 5].item() < -0.05
    assert residual[:, [0, 1, 2, 3, 6, 7, 8, 9, 10]].abs().max() < 1e-6


@STEPS
@pytest.mark.parametrize(("rows", "dt"), [(64, 0.025), (32, 0.05), (17, 0.05)])
def test_projected_images_obey_to_rounding(step, rows, dt):
    rule = Burgers(step, dt=dt)
    projected = rule.project(images(4, rows, 64))
    assert rule(images(4, rows, 64)).min() > 1e-2
    assert rule(projected).max() < 1e-6
    assert projected.std(dim=-1).mean() > 1e-2  # not because nothing moves


def test_projection_keeps_the_first_column_and_is_idempotent():
    rule, x = Burgers(), images()
    projected = rule.project(x)
    assert projected.shape == x.shape
    assert torch.equal(projected[..., 0], x[..., 0])
    assert torch.equal(rule.project(projected), projected)


def test_the_constraint_reports_its_own_floor():
    rule = Burgers()
    report = rule.check(rule.project(images(8, 32, 32)))
    assert report.floor_ratio < 1e-4
    report.require_obeyed()


@STEPS
def test_residual_and_projection_have_exact_gradients(step):
    x = images(1, 6, 3, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(Burgers(step, length=1.0, dt=0.02).residual, x)
    assert torch.autograd.gradcheck(Burgers(step, length=1.0, dt=0.02).project, x)


def test_autocast_changes_nothing():
    rule, x = Burgers(), images()
    with torch.autocast("cpu", torch.bfloat16):
        inside, residual, projected = rule(x), rule.residual(x), rule.project(x)
    assert torch.equal(inside, rule(x))
    assert torch.equal(residual, rule.residual(x))
    assert torch.equal(projected, rule.project(x))
    assert Burgers(step=stay).residual(x.bfloat16()).dtype == torch.float32


def test_compiles_whole_at_one_size_after_another():
    # From the second size on the number of rows could become a symbol, and with it Δx and the number of sweeps. At 48
    # rows the symbolic Δx and the real one differ in the last bit, and the compiler stumbles over that.
    torch.compiler.reset()
    rule = Burgers(inner_steps=1)
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager")
    for rows, columns in ((16, 6), (12, 5), (48, 5)):
        x = images(2, rows, columns).requires_grad_()
        ours, eager = compiled(x), rule(x)
        torch.testing.assert_close(ours, eager)
        gradients = [torch.autograd.grad(loss.sum(), x)[0] for loss in (ours, eager)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 2, 8, 8), "one channel"),
        ((2, 1, 8, 1), "2 columns"),
        ((2, 1, 2, 8), "3 rows"),
        ((1, 8, 8), r"\(B, 1, H, W\)"),
    ],
)
@pytest.mark.parametrize("method", ["distance", "residual", "project"])
def test_images_that_are_no_trajectory_are_refused(shape, words, method):
    with pytest.raises(DataError, match=words):
        getattr(Burgers(), method)(torch.zeros(shape))


@pytest.mark.parametrize(
    "bad", [{"dt": -0.1}, {"nu": -1.0}, {"length": 0.0}, {"inner_steps": 0}, {"max_speed": 0.0}, {"length": math.nan}]
)
def test_settings_without_meaning_are_refused_at_once(bad):
    (name,) = bad
    with pytest.raises(UsageError, match=name):
        Burgers(**bad)


def test_repr_names_the_step():
    kept = "nu=0.05, length=10.0, dt=0.025, inner_steps=5, flipped=True, max_speed=1.5"
    assert repr(Burgers(euler)) == f"Burgers(step=euler, {kept})"
