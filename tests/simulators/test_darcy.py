"""Darcy flow against polynomials, literal stencils, NumPy's dense least squares and SciPy's nearest pairs."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares

from namm.errors import DataError, UsageError
from namm.simulators import darcy
from namm.simulators.darcy import (
    MIN_PERMEABILITY,
    eigenpairs,
    first_derivative,
    log_permeability,
    nearest,
    residual,
    second_derivative,
    solve,
    source,
    zero_mean,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def media(n, size=3, seed=0):
    return log_permeability(normal(size, 64, seed=seed), n).exp()


def slow_stencils(n):
    """First and second derivative as NumPy matrices, entry by entry."""
    h, first, second = 1 / (n - 1), np.zeros((n, n)), np.zeros((n, n))
    for i in range(1, n - 1):
        first[i, [i - 1, i + 1]] = -1 / (2 * h), 1 / (2 * h)
        second[i, [i - 1, i, i + 1]] = np.array([1, -2, 1]) / h**2
    first[0, :3], first[-1, -3:] = np.array([-3, 4, -1]) / (2 * h), np.array([1, -4, 3]) / (2 * h)
    second[0, :4], second[-1, -4:] = np.array([2, -5, 4, -1]) / h**2, np.array([-1, 4, -5, 2]) / h**2
    return first, second


def slow_source(n):
    centres = (np.arange(n) + 0.5) / n
    x, y = np.meshgrid(centres, centres, indexing="ij")
    return 10.0 * ((x <= 1 / 8) & (y <= 1 / 8)) - 10.0 * ((x >= 7 / 8) & (y >= 7 / 8))


def equations(K):
    """Matrix (n² + 4n, n²) and right-hand side of all that is asked of p, from NumPy's K (n, n)."""
    n = len(K)
    first, second = slow_stencils(n)
    unit = np.eye(n)
    dx, dy, dxx, dyy = np.kron(first, unit), np.kron(unit, first), np.kron(second, unit), np.kron(unit, second)
    k = K.reshape(-1, 1)
    inside = -k * (dxx + dyy) - (dx @ k) * dx - (dy @ k) * dy
    rows = np.arange(n * n).reshape(n, n)
    walls = [-dx[rows[0]], dx[rows[-1]], -dy[rows[:, 0]], dy[rows[:, -1]]]
    return np.concatenate([inside, *walls]), np.concatenate([slow_source(n).reshape(-1), np.zeros(4 * n)])


def slow_solve(K):
    matrix, right = equations(K)
    p = np.linalg.lstsq(matrix, right, rcond=1e-13)[0].reshape(K.shape)
    x = np.linspace(0, 1, len(K))
    return p - np.trapezoid(np.trapezoid(p, x), x)


@pytest.mark.parametrize("dim", [-2, -1])
def test_derivatives_of_quadratics_are_exact_up_to_the_walls(dim):
    x = torch.linspace(0, 1, 9, dtype=torch.float64)
    u = (2 - 3 * x + 5 * x**2).expand(4, 7, 9)
    u, expected = (u.movedim(-1, dim), (10 * x - 3).expand(4, 7, 9).movedim(-1, dim))
    torch.testing.assert_close(first_derivative(u, dim), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(second_derivative(u, dim), torch.full_like(u, 10.0), rtol=0, atol=1e-10)


def test_residual_of_polynomials_is_the_analytic_one():
    """p = x² + y and K = 1 + x y: −K p_xx − K_x p_x − K_y p_y = −2(1 + xy) − 2xy − x."""
    x, y = torch.meshgrid(2 * [torch.linspace(0, 1, 16, dtype=torch.float64)], indexing="ij")
    equation, rows, columns = residual(x**2 + y, 1 + x * y)
    torch.testing.assert_close(equation, -2 - 4 * x * y - x - source(16), rtol=0, atol=1e-10)
    expected = torch.zeros(16, 16, dtype=torch.float64)
    expected[-1] = 2.0
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12)
    expected = torch.zeros(16, 16, dtype=torch.float64)
    expected[:, 0], expected[:, -1] = -1.0, 1.0
    torch.testing.assert_close(columns, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [8, 9, 12])
def test_residual_is_that_of_the_dense_equations(n):
    p, K = normal(2, n, n), media(n, 2)
    equation, rows, columns = residual(p, K).unbind(1)
    for k in range(2):
        matrix, right = equations(K[k].numpy())
        expected = np.split(matrix @ p[k].numpy().reshape(-1) - right, [n * n, n * n + 2 * n])
        walls = [rows[k][[0, -1]].reshape(-1), columns[k][:, [0, -1]].T.reshape(-1)]
        for ours, theirs in zip((equation[k].reshape(-1), *walls), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    assert not rows[:, 1:-1].any()
    assert not columns[:, :, 1:-1].any()


@pytest.mark.parametrize("n", [8, 12, 63, 64])
def test_the_source_fills_the_corners_whose_cell_centres_are_within_an_eighth(n):
    np.testing.assert_array_equal(source(n), slow_source(n))
    if n == 64:
        assert [int((source(n) == s).sum()) for s in (10, -10)] == [64, 64]


@pytest.mark.parametrize("n", [8, 9, 15])
def test_eigenpairs_are_those_of_the_whole_kernel(n):
    terms = min(64, n * n)
    eigenvalues, fields = eigenpairs(n, 0.1, terms)
    points = np.stack(np.meshgrid(*2 * [np.linspace(0, 1, n)], indexing="ij"), -1).reshape(-1, 2)
    kernel = np.exp(-np.linalg.norm(points[:, None] - points, axis=-1) / 0.1)
    np.testing.assert_allclose(eigenvalues, np.linalg.eigvalsh(kernel)[::-1][:terms], rtol=1e-12)
    vectors = fields.reshape(terms, -1).numpy()
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(terms), rtol=0, atol=1e-12)
    np.testing.assert_allclose(kernel @ vectors.T, vectors.T * eigenvalues.numpy(), rtol=0, atol=1e-12)


def test_eigenvectors_that_share_an_eigenvalue_are_transposes():
    eigenvalues, fields = eigenpairs(24)
    pairs = (eigenvalues[1:] == eigenvalues[:-1]).nonzero()[:, 0]
    assert len(pairs) > 10
    assert torch.equal(fields[pairs], fields[pairs + 1].mT)
    single = torch.ones(64, dtype=torch.bool)
    single[pairs] = single[pairs + 1] = False
    sizes = fields[single].abs()  # each of these is even or odd under every symmetry
    assert all(torch.equal(sizes, each) for each in (sizes.flip(-1), sizes.flip(-2), sizes.mT))


def test_log_permeability_is_linear_in_the_coefficients_with_the_kernels_covariance():
    """With all n² terms the covariance is the kernel itself: variance 1, correlation exp(−r/0.2)."""
    fields = log_permeability(torch.eye(64, dtype=torch.float64), 8, correlation=0.2).reshape(64, 64)
    covariance = (fields.T @ fields).reshape(8, 8, 8, 8)
    torch.testing.assert_close(covariance[3, 3, 3, 3].item(), 1.0)
    assert covariance[0, 0, 3, 4].item() == pytest.approx(np.exp(-5 / 7 / 0.2), rel=1e-9)


@pytest.mark.parametrize("n", [8, 11, 16])
def test_pressure_is_numpys_dense_least_squares_solution(n):
    K = media(n)
    p = solve(K)
    for ours, medium in zip(p.numpy(), K.numpy(), strict=True):
        theirs = slow_solve(medium)
        assert np.linalg.norm(ours - theirs) < 1e-10 * np.linalg.norm(theirs)
    torch.testing.assert_close(zero_mean(p + 3), p, rtol=0, atol=1e-13)


def test_pressure_survives_permeabilities_of_five_decades():
    K = (4 * normal(1, 10, 10)).exp()
    assert K.max() > 1e5 * K.min()
    theirs = slow_solve(K[0].numpy())
    assert np.linalg.norm(solve(K)[0].numpy() - theirs) < 1e-8 * np.linalg.norm(theirs)


def cosine_series(n, terms=200):
    """−Δp = s in closed form at the grid points: a cosine series for sources of exactly an eighth of each side."""
    k, x = np.arange(terms), np.linspace(0, 1, n)
    ends = np.sinc(k[:, None] * np.array([1 / 8, 7 / 8, 1])) * np.array([1 / 8, 7 / 8, 1])
    inlet, outlet = ends[:, 0], ends[:, 2] - ends[:, 1]
    strength = 10 * (np.outer(inlet, inlet) - np.outer(outlet, outlet)) * np.outer(2 - (k == 0), 2 - (k == 0))
    waves = np.pi**2 * (k[:, None] ** 2 + k**2) + (k[:, None] + k == 0)
    cosines = np.cos(np.pi * np.outer(x, k))
    return cosines @ (strength / waves) @ cosines.T


def test_the_pressure_of_a_uniform_medium_converges_to_the_closed_form():
    """At first order: points of the source stand for cells that are a little smaller or larger than theirs."""
    errors = []
    for n in (32, 64):
        ours, closed = solve(torch.ones(1, n, n))[0].numpy(), cosine_series(n)
        np.testing.assert_allclose(ours, ours.T, rtol=0, atol=1e-10)
        errors.append(np.linalg.norm(ours - closed) / np.linalg.norm(closed))
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1)
    assert np.corrcoef(ours.ravel(), closed.ravel())[0, 1] > 0.9999


def test_a_field_is_solved_for_itself_whatever_the_pieces(monkeypatch):
    K = media(9, 5)
    whole = solve(K)
    monkeypatch.setattr(darcy, "_at_once", lambda K: 2)
    torch.testing.assert_close(solve(K), whole, rtol=1e-12, atol=1e-14)
    K[1, 4, 4] = torch.nan
    found = solve(K)
    assert found[1].isnan().any()
    torch.testing.assert_close(found[[0, 2, 3, 4]], whole[[0, 2, 3, 4]], rtol=1e-12, atol=1e-14)
    assert solve(K[:0]).shape == (0, 9, 9)


def test_the_gradient_of_the_pressure_is_exact():
    assert torch.autograd.gradcheck(solve, media(8, 1).requires_grad_())


SCALES = torch.tensor([0.05, 0.08], dtype=torch.float64), torch.tensor([1.2, 0.9], dtype=torch.float64)


def given_pairs(n, error):
    """Pairs on the set, and the same with white errors of that many scales."""
    K = media(n, 2, seed=4)
    p = solve(K)
    noise = error * normal(2, 2, n, n, seed=1)
    return p, K, p + SCALES[0][:, None, None] * noise[0], K + SCALES[1][:, None, None] * noise[1]


def distance(p, K, p0, K0):
    parts = (
        ((a - b) / s[:, None, None]).square().sum((1, 2)) for a, b, s in zip((p, K), (p0, K0), SCALES, strict=True)
    )
    return sum(parts)


def test_the_nearest_pair_is_scipys():
    n, (s_p, s_K) = 8, (float(s[0]) for s in SCALES)
    p0, K0 = (field[:1] for field in given_pairs(n, 0.02)[2:])

    def misfit(flat):
        medium = flat.reshape(n, n)
        return np.concatenate([(slow_solve(medium) - p0[0].numpy()) / s_p, (medium - K0[0].numpy()) / s_K]).ravel()

    found = least_squares(misfit, K0.numpy().clip(MIN_PERMEABILITY).ravel(), xtol=1e-10, ftol=1e-12, gtol=1e-10)
    p, K = nearest(p0, K0, s_p, s_K, steps=40)
    ours = misfit(K.numpy().ravel())
    assert ours @ ours == pytest.approx(2 * found.cost, rel=1e-6)
    np.testing.assert_allclose(K.numpy().ravel(), found.x, rtol=0, atol=2e-4)
    torch.testing.assert_close(p, solve(K), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("error", "near"), [(0.01, 1.05), (0.1, 2.0)])
def test_few_steps_come_near_the_minimum_and_none_leads_away(error, near):
    p_true, K_true, p0, K0 = given_pairs(10, error)
    start = K0.clamp(min=MIN_PERMEABILITY)
    distances = [distance(solve(start), start, p0, K0)]
    for steps in (1, 4, 12):
        p, K = nearest(p0, K0, *SCALES, steps=steps)
        assert K.min() >= MIN_PERMEABILITY
        distances.append(distance(p, K, p0, K0))
    assert all((after < before).all() for before, after in pairwise(distances))
    assert (distances[2] < near * distances[3]).all()
    # The truth is on the set, so that the nearest pair is no farther than it.
    assert (distances[3] < distance(p_true, K_true, p0, K0)).all()


def test_the_gradient_vanishes_at_the_nearest_pair():
    _, _, p0, K0 = given_pairs(10, 0.01)

    def gradient(K):
        K = K.clone().requires_grad_()
        (found,) = torch.autograd.grad(distance(solve(K), K, p0, K0).sum(), K)
        return found.norm(dim=(1, 2))

    _, K = nearest(p0, K0, *SCALES, steps=40)
    assert (gradient(K) < 1e-4 * gradient(K0)).all()
    # By central differences, too, along a direction that has nothing to do with the solver.
    direction, h = normal(2, 10, 10, seed=9), 1e-4

    def slope(K):
        return (
            distance(solve(K + h * direction), K + h * direction, p0, K0)
            - distance(solve(K - h * direction), K - h * direction, p0, K0)
        ) / (2 * h)

    assert (slope(K).abs() < 1e-3 * slope(K0).abs()).all()


def test_permeabilities_of_any_sign_become_positive_and_the_nearer_for_it():
    p, K = solve(media(10)), media(10)
    K0 = K - 1.5 * K.amin((1, 2), keepdim=True)
    assert (K0.amin((1, 2)) < 0).all()
    found = nearest(p, K0, 0.06, 1.2)
    start = K0.clamp(min=MIN_PERMEABILITY)
    assert found[1].min() >= MIN_PERMEABILITY

    def far(p1, K1):
        return ((p1 - p) / 0.06).square().sum((1, 2)) + ((K1 - K0) / 1.2).square().sum((1, 2))

    assert (far(*found) < far(solve(start), start)).all()


def test_a_pair_on_the_set_stays():
    K = media(9)
    p, found = nearest(solve(K), K, 0.06, 1.2)
    torch.testing.assert_close(found, K, rtol=0, atol=1e-9)
    torch.testing.assert_close(p, solve(K), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 9), (1, 7, 7), (1, 1, 8, 8)])
def test_fields_that_are_no_square_grid_are_refused(shape):
    with pytest.raises(DataError, match=r"square fields \(B, n, n\) of 8×8"):
        solve(torch.ones(shape))


def test_numbers_without_meaning_are_refused():
    with pytest.raises(UsageError, match="correlation=0"):
        log_permeability(torch.zeros(1, 4), 8, correlation=0)
    with pytest.raises(UsageError, match="terms=65"):
        log_permeability(torch.zeros(1, 65), 8)
    K = torch.ones(1, 8, 8)
    with pytest.raises(UsageError, match="steps >= 1"):
        nearest(K, K, steps=0)
    with pytest.raises(UsageError, match="in scales > 0"):
        nearest(K, K, 0.0)
