"""The divergence-free rule: what ℓ averages, each state on its own, exact projection, what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.constraints import DivergenceFree
from namm.constraints.description import describe, rebuild
from namm.errors import DataError, UsageError
from namm.experiments.divergence import DivergenceRule
from namm.experiments.engine.build import constraint

layouts = st.tuples(st.integers(1, 3), st.integers(1, 3))
sizes = st.integers(2, 5)
seeds = st.integers(0, 2**31)


def images(layout=(2, 3), size=4, n=3, seed=0, dtype=torch.float64):
    rows, columns = layout
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, rows * size, columns * size, generator=generator, dtype=dtype)


def slow_divergence(image, size, h):
    """Pixel by pixel, from NumPy (2, H, W): neighbours are sought within the pixel's own state."""
    u, v = image
    out = np.empty_like(u)
    for i, j in np.ndindex(u.shape):
        above = i - 1 if i % size else i - 1 + size
        left = j - 1 if j % size else j - 1 + size
        out[i, j] = (u[i, j] - u[above, j]) / h + (v[i, j] - v[i, left]) / h
    return out


@given(layouts, sizes, seeds, st.floats(0.5, 9))
def test_residual_and_distance_are_the_stencil_of_each_state(layout, size, seed, extent):
    x, rule = images(layout, size, seed=seed), DivergenceFree(size, extent)
    expected = np.stack([slow_divergence(image, size, extent / size) for image in x.numpy()])
    np.testing.assert_allclose(rule.residual(x)[:, 0], expected, rtol=0, atol=1e-12)
    assert rule.residual(x).shape == (3, 1, *x.shape[2:])
    np.testing.assert_allclose(rule(x), np.abs(expected).mean((1, 2)), rtol=1e-12)


@given(layouts, sizes, seeds)
def test_projection_is_least_squares_over_the_whole_image(layout, size, seed):
    """ℓ's matrix column by column; the nearest point removes the part of x in the range of its transpose."""
    x, rule = images(layout, size, n=2, seed=seed), DivergenceFree(size)
    shape = x.shape[1:]
    basis = torch.eye(shape.numel(), dtype=x.dtype).reshape(-1, *shape)
    matrix = rule.residual(basis).flatten(1).T.numpy()
    projected = rule.project(x)
    for image, ours in zip(x.numpy(), projected.numpy(), strict=True):
        part, *_ = np.linalg.lstsq(matrix.T, image.reshape(-1), rcond=None)
        np.testing.assert_allclose(ours.reshape(-1), image.reshape(-1) - matrix.T @ part, rtol=0, atol=1e-12)


def test_projection_obeys_stays_and_keeps_each_state_s_mean():
    rule, x = DivergenceFree(8), images((2, 2), 8)
    projected = rule.project(x)
    assert projected.shape == x.shape
    assert rule(x).min() > 1
    assert rule(projected).max() < 1e-13
    torch.testing.assert_close(rule.project(projected), projected, rtol=0, atol=1e-14)
    means = [image.unfold(2, 8, 8).unfold(3, 8, 8).mean((-1, -2)) for image in (x, projected)]
    torch.testing.assert_close(*means, rtol=0, atol=1e-14)


def test_float32_images_are_projected_to_the_rounding_of_their_pixels():
    rule, x = DivergenceFree(), images((2, 4), 64, n=2, dtype=torch.float32)
    projected = rule.project(x)
    assert projected.dtype == torch.float32
    # Each of four velocities of about 1 is off by at most half an ulp, 6e-8, over h = 0.098.
    assert rule(projected).max() < 4 * 6e-8 / 0.098
    assert rule.check(projected).floor_ratio < 1e-6


def test_a_raised_pixel_shows_in_two_cells_of_its_own_state():
    x = torch.zeros(1, 2, 8, 12, dtype=torch.float64)
    x[0, 0, 3, 5] = 1.0  # u on the last row of the first row of states: the cell ahead is the state's first row
    residual = DivergenceFree(4, extent=4.0).residual(x)[0, 0]
    assert residual.nonzero().tolist() == [[0, 5], [3, 5]]
    assert residual[3, 5].item() == 1.0
    assert residual[0, 5].item() == -1.0


@pytest.mark.parametrize("method", ["distance", "residual", "project"])
def test_gradients_are_exact(method):
    assert torch.autograd.gradcheck(getattr(DivergenceFree(3), method), images((1, 2), 3, n=1).requires_grad_())


def test_autocast_and_narrow_types_change_nothing():
    rule, x = DivergenceFree(4), images(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = rule(x), rule.residual(x), rule.project(x)
    assert all(torch.equal(a, b) for a, b in zip(inside, (rule(x), rule.residual(x), rule.project(x)), strict=True))
    assert torch.equal(rule.residual(x.bfloat16()), rule.residual(x.bfloat16().float()))
    assert torch.equal(rule.project(x.bfloat16()), rule.project(x.bfloat16().float()))


def test_compiles_whole_at_one_layout_after_another():
    torch.compiler.reset()
    rule = DivergenceFree(4)
    compiled = torch.compile(lambda x: (rule(x), rule.project(x)), fullgraph=True, backend="aot_eager")
    for layout, n in (((1, 1), 2), ((2, 3), 3)):
        x = images(layout, n=n).requires_grad_()
        both = compiled(x), (rule(x), rule.project(x))
        torch.testing.assert_close(*both)
        torch.testing.assert_close(*(torch.autograd.grad(ell.sum() + p.square().sum(), x) for ell, p in both))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 1, 8, 8), "two channels.*(2, 1, 8, 8)"),
        ((2, 3, 8, 8), "two channels"),
        ((2, 8, 8), r"\(B, 2, H, W\)"),
        ((2, 2, 8, 10), "8×10 pixels into states of 4×4.*crop"),
        ((2, 2, 6, 8), "6×8 pixels into states of 4×4"),
    ],
)
@pytest.mark.parametrize("method", ["distance", "residual", "project"])
def test_images_that_hold_no_states_are_refused(shape, words, method):
    with pytest.raises(DataError, match=words):
        getattr(DivergenceFree(4), method)(torch.zeros(shape))


@pytest.mark.parametrize(
    "bad", [{"size": 1}, {"size": 8.0}, {"extent": 0.0}, {"extent": -1.0}, {"extent": math.inf}, {"extent": "2π"}]
)
def test_settings_without_meaning_are_refused_at_once(bad):
    ((name, value),) = bad.items()
    with pytest.raises(UsageError, match=f"{name}={value!r}"):
        DivergenceFree(**bad)


def test_the_rule_survives_json_and_is_what_the_settings_describe():
    x = images()
    for rule in (DivergenceFree(4, extent=3.0), constraint(DivergenceRule(size=4, extent=3.0))):
        again = rebuild(describe(rule))
        assert repr(again) == repr(rule) == "DivergenceFree(size=4, extent=3.0)"
        assert torch.equal(again(x), DivergenceFree(4, 3.0)(x))
    assert describe(DivergenceFree(4, 3.0)) == {"name": "DivergenceFree", "size": 4, "extent": 3.0}
