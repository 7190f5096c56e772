"""The nearest image on a rule against pseudo-inverses, closed forms, SciPy's solvers and an enumeration of faces."""

import importlib
import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import namm
from namm import Burgers, Constraint, DivergenceFree, Periodic, TotalFlux, polish
from namm.errors import ConstraintError, DataError, UsageError
from namm.exact.gauss_newton import STEPS
from namm.exact.polyak import POLYAK_STEPS
from namm.simulators.burgers import BurgersGrid, crank_nicolson, euler

solver = importlib.import_module("namm.exact.polish")  # the package has a function of that name
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def generic(rule):
    """The same rule without its closed form: polish has to solve."""
    kind = type(rule)
    rule.__class__ = type(kind.__name__, (kind,), {"nearest": Constraint.nearest, "__module__": kind.__module__})
    return rule


def equations(residual, name="equations"):
    """A rule of equations, ℓ = mean |residual|."""
    return namm.constraint(lambda x: residual(x).reshape(len(x), -1).abs().mean(1), residual=residual, name=name)


def inequalities(h, name="inequalities"):
    """A rule of inequalities, ℓ = mean of what is positive."""
    return namm.constraint(lambda x: h(x).reshape(len(x), -1).clamp(min=0).mean(1), inequality=h, name=name)


def linear(matrix, right):
    """A x = b on images, as a residual."""
    matrix, right = torch.as_tensor(matrix), torch.as_tensor(right)
    return lambda x: x.flatten(1) @ matrix.to(x).T - right.to(x)


def closed_projection(residual, x, scale):
    """x − s (J s)⁺ r(x) of a linear residual, image by image in NumPy."""
    shape = x.shape[1:]
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    basis = torch.eye(shape.numel(), dtype=torch.float64).reshape(-1, *shape)
    offset = residual(zero).flatten().numpy()
    jacobian = residual(basis).reshape(len(basis), -1).numpy().T - offset[:, None]
    s = np.broadcast_to(scale.numpy(), shape).reshape(-1)
    inverse = np.linalg.pinv(jacobian * s, rcond=1e-11)
    moved = [image - s * (inverse @ (jacobian @ image + offset)) for image in x.flatten(1).numpy()]
    return torch.from_numpy(np.stack(moved)).reshape(x.shape)


def distance_moved(x, y, scale=1.0):
    return ((y - x) / scale).flatten(1).norm(dim=1)


RANDOM = linear(randn(7, 2 * 8 * 8, seed=1), randn(7, seed=2))
LINEAR = {
    "flux": lambda: TotalFlux(12.0),
    "periodic": lambda: Periodic((2, 4)),
    "divergence": lambda: DivergenceFree(8),
    "random": lambda: equations(RANDOM),
    "sum": lambda: 2.0 * (TotalFlux(3.0) + Periodic((2, 2))),
}
SCALES = {
    "uniform": torch.tensor(0.3, dtype=torch.float64),
    "channels": torch.tensor([0.5, 2.0], dtype=torch.float64).reshape(2, 1, 1),
    "pixels": torch.exp(0.5 * randn(2, 8, 8, seed=3)),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_rules_are_the_closed_projection(name, scale):
    x, s = randn(3, 2, 8, 8, seed=5), SCALES[scale]
    for rule in (LINEAR[name](), generic(LINEAR[name]())):
        found = polish(x, rule, scale=s if scale != "channels" else [0.5, 2.0])
        expected = closed_projection(rule.residual, x, s)
        torch.testing.assert_close(found.images, expected, rtol=0, atol=1e-12 * float(x.abs().max()))
        certificate = found.certificate
        assert certificate.reached.all(), certificate
        assert not certificate.notes
        expected_rms = distance_moved(x, expected, s) / math.sqrt(128)
        np.testing.assert_allclose(certificate.moved, expected_rms, rtol=1e-9)


@pytest.mark.parametrize("name", LINEAR)
def test_frozen_pixels_stay_to_the_bit_and_the_others_share_the_move(name):
    frozen = torch.zeros(8, 8, dtype=torch.bool)
    frozen[:2, 0] = frozen[3, 1] = True  # in one tile: the same pixel frozen in two would be a contradiction
    x, rule = randn(3, 2, 8, 8, seed=6), LINEAR[name]()
    found = polish(x, rule, scale=SCALES["pixels"], frozen=frozen)
    assert torch.equal(found.images[..., frozen], x[..., frozen])
    expected = closed_projection(rule.residual, x, SCALES["pixels"] * ~frozen)
    torch.testing.assert_close(found.images, expected, rtol=0, atol=1e-12 * float(x.abs().max()))
    assert found.certificate.method == "Gauss-Newton"
    assert not found.certificate.notes


def test_the_closed_form_is_used_where_there_is_one():
    x = randn(2, 2, 8, 8)
    assert polish(x, TotalFlux(1.0)).certificate.method == "closed form"
    assert polish(x, 3.0 * Periodic((2, 2))).certificate.method == "closed form"
    assert polish(x, DivergenceFree(8), scale=[1.0, 2.0]).certificate.method == "closed form"
    assert polish(x, DivergenceFree(8), scale=SCALES["pixels"]).certificate.method == "Gauss-Newton"
    assert polish(x, TotalFlux(1.0), bounds=(-9, 9)).certificate.method == "Gauss-Newton"


@given(seeds, st.floats(0.5, 20))
def test_a_sphere_is_met_on_the_ray(seed, radius):
    x = randn(4, 1, 3, 3, seed=seed)
    rule = equations(lambda x: x.flatten(1).norm(dim=1) - radius)
    expected = radius * x / x.flatten(1).norm(dim=1)[:, None, None, None]
    found = polish(x, rule)
    torch.testing.assert_close(found.images, expected, rtol=0, atol=1e-6)
    assert found.certificate.reached.all(), found.certificate


@given(seeds)
def test_unit_colours_are_met_pixel_by_pixel(seed):
    x = randn(2, 3, 4, 4, seed=seed)
    x = x + 0.5 * x.sign()  # a black pixel is as near to every colour
    rule = equations(lambda x: x.square().sum(1) - 1)
    expected = x / x.norm(dim=1, keepdim=True)
    found = polish(x, rule)
    torch.testing.assert_close(found.images, expected, rtol=1e-9, atol=1e-9)
    assert not found.certificate.notes


def scipys_nearest(x0, scale, *, equal=None, at_most=None, bounds=None, method="SLSQP", start=None):
    """min ½ ‖(x − x⁰)/s‖² of one flat image by SciPy; constraints as functions of NumPy vectors."""
    weight = 1 / np.square(scale)
    kinds = [("eq", equal, 1), ("ineq", at_most, -1)]
    constraints = [{"type": k, "fun": (lambda x, f=f, g=g: g * f(x))} for k, f, g in kinds if f is not None]
    if method == "trust-constr":
        limits = [(equal, 0, 0), (at_most, -np.inf, 0)]
        constraints = [scipy.optimize.NonlinearConstraint(f, a, b) for f, a, b in limits if f is not None]
    options = {"maxiter": 2000} | ({"ftol": 1e-15} if method == "SLSQP" else {"gtol": 1e-10, "xtol": 1e-13})
    result = scipy.optimize.minimize(
        lambda x: 0.5 * np.sum(weight * (x - x0) ** 2),
        x0 if start is None else start,
        jac=lambda x: weight * (x - x0),
        hess=(lambda x: np.diag(weight)) if method == "trust-constr" else None,
        constraints=constraints,
        bounds=None if bounds is None else [bounds] * len(x0),
        method=method,
        options=options,
    )
    return result.x


def quadratic(seed, n, rows=2, curvature=0.08):
    """Rows a·x + xᵀQx − b that have a root, for tensors and for NumPy vectors."""
    a, q = randn(rows, n, seed=seed), curvature * randn(rows, n, n, seed=seed + 1)
    point = 0.3 * randn(n, seed=seed + 3)
    b = a @ point + torch.einsum("rij,i,j->r", q, point, point)

    def residual(x):
        x = x.flatten(1)
        return x @ a.T + torch.einsum("rij,bi,bj->br", q, x, x) - b

    return residual, lambda x: residual(torch.from_numpy(x)[None])[0].numpy()


@settings(max_examples=12)
@given(seeds)
def test_quadratic_equations_agree_with_slsqp(seed):
    residual, rows = quadratic(seed, 9)
    x = 0.5 * randn(1, 1, 3, 3, seed=seed + 4)
    scale = torch.exp(0.3 * randn(1, 3, 3, seed=seed + 5))
    found = polish(x, equations(residual), scale=scale)
    s = scale.flatten().numpy()
    ours = found.images.flatten().numpy()
    # From our own point too: there may be several nearest points, and ours has to be one.
    start = x.flatten().numpy()
    others = [scipys_nearest(start, s, equal=rows), scipys_nearest(start, s, equal=rows, start=ours)]
    assert np.abs(rows(ours)).max() < 1e-12
    length = np.linalg.norm((ours - start) / s)
    assert np.linalg.norm((ours - others[1]) / s) < 1e-4 * length
    assert length < 1.01 * np.linalg.norm((others[0] - start) / s)


def test_quadratic_equations_agree_with_trust_constr():
    residual, rows = quadratic(3, 16, rows=4, curvature=0.05)
    x = 0.5 * randn(1, 1, 4, 4, seed=8)
    ours = polish(x, equations(residual)).images.flatten().numpy()
    expected = scipys_nearest(x.flatten().numpy(), np.ones(16), equal=rows, method="trust-constr")
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


@settings(max_examples=15)
@given(seeds, st.floats(1.5, 4))
def test_far_outside_and_inside_an_ellipse(seed, ratio):
    """Curvature times distance above 1: plain Gauss–Newton steps would oscillate or stop beside the nearest point."""
    axes = torch.tensor([ratio, 1.0, 1.3, 0.8], dtype=torch.float64).reshape(1, 2, 2)
    x = 2 * randn(1, 1, 2, 2, seed=seed)

    def residual(x):
        return (x / axes).square().flatten(1).sum(1) - 1

    found = polish(x, equations(residual))
    ours, start = found.images.flatten().numpy(), x.flatten().numpy()

    def rows(x):
        return residual(torch.from_numpy(x).reshape(1, 1, 2, 2)).numpy()

    assert abs(rows(ours)).max() < 1e-12, found.certificate
    near = scipys_nearest(start, np.ones(4), equal=rows, start=ours)
    assert np.linalg.norm(ours - start) < 1.02 * np.linalg.norm(near - start) + 1e-9


# Trajectories


def trajectories(rule, n=2, rows=8, columns=4, error=0.05, seed=0):
    """Smooth trajectories with smooth errors, and the truth."""
    waves = torch.arange(rows, dtype=torch.float64)[:, None] / rows
    phase = torch.rand(n, 1, 1, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    first = 0.5 + 0.4 * torch.sin(2 * math.pi * (waves + phase))
    truth = rule.project(first.expand(n, 1, rows, columns))
    return truth + error * randn(n, 1, rows, columns, seed=seed + 1), truth


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("step", [crank_nicolson, euler])
def test_burgers_is_least_squares_over_the_first_column(step, varying):
    rule = Burgers(step, dt=0.1, inner_steps=2)
    x, _ = trajectories(rule)
    scale = torch.exp(0.4 * randn(1, 8, 4, seed=2)) if varying else torch.ones(1, 8, 4, dtype=torch.float64)
    fitted, solved = (
        polish(x, rule, scale=scale),
        polish(x, generic(Burgers(step, dt=0.1, inner_steps=2)), scale=scale),
    )
    assert (fitted.certificate.method, solved.certificate.method) == ("closed form", "Gauss-Newton")

    for i, image in enumerate(x):

        def misfit(first, image=image):
            trajectory = rule.project(torch.from_numpy(first)[None, None, :, None].expand_as(image[None]))
            return ((trajectory[0] - image) / scale).flatten().numpy()

        best = scipy.optimize.least_squares(misfit, image[0, :, 0].numpy(), xtol=1e-12, ftol=1e-14, gtol=1e-12)
        expected = rule.project(torch.from_numpy(best.x)[None, None, :, None].expand_as(image[None]))[0]
        length = float(((expected - image) / scale).norm())
        for found in (fitted.images[i], solved.images[i]):
            assert float(((found - expected) / scale).norm()) < 1e-4 * length
        rollout = rule.project(image[None])[0]
        assert length < 0.9 * float(((rollout - image) / scale).norm())
    for polished in (fitted, solved):
        assert polished.certificate.reached.all(), polished.certificate


def test_burgers_with_a_known_column_or_speeds_within_bounds():
    rule = Burgers(dt=0.1, inner_steps=2)
    x, _ = trajectories(rule)
    frozen = torch.zeros(8, 4, dtype=torch.bool)
    frozen[:, 0] = True
    torch.testing.assert_close(polish(x, rule, frozen=frozen).images, rule.project(x), rtol=0, atol=1e-12)
    low, high = 0.3, 0.75
    found = polish(x, rule, bounds=(low, high))
    assert found.images.min() >= low
    assert found.images.max() <= high
    assert rule(found.images).max() < 1e-9


@pytest.mark.parametrize("step", [crank_nicolson, euler])
def test_the_derivative_that_burgers_knows_is_that_of_its_residual(step):
    rule = Burgers(step, dt=0.1, inner_steps=2)
    x, _ = trajectories(rule)
    v, u = randn(2, 1, 8, 4, seed=3), randn(2, 1, 8, 3, seed=4)
    times, transposed = rule.derivative(x)
    h = 1e-4
    differences = (rule.residual(x + h * v) - rule.residual(x - h * v)) / (2 * h)
    torch.testing.assert_close(times(v), differences, rtol=0, atol=1e-7)
    torch.testing.assert_close(transposed(u), torch.func.vjp(rule.residual, x)[1](u)[0], rtol=0, atol=1e-12)


class Halves(Constraint):
    """x² = ½ row by row in every second row, which is a residual (B, H/2, W) with a derivative of its own."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor

    def distance(self, x):
        return self.residual(x).abs().mean((1, 2))

    def residual(self, x):
        return x[:, 0, ::2].square() - 0.5

    def derivative(self, x):
        slope = 2 * x[:, 0, ::2]

        def transposed(u):
            image = torch.zeros_like(x)
            image[:, 0, ::2] = self.factor / 2 * slope * u
            return image

        return (lambda v: slope * v[:, 0, ::2]), transposed


def test_a_rule_that_knows_its_derivative_in_a_sum_with_bounds():
    x = 0.3 + randn(3, 1, 4, 6).abs()
    for rule in (Halves(), 2 * Halves() + inequalities(lambda x: x.mean((1, 2, 3)) - 9)):
        found = polish(x, rule, bounds=(0, 2)).images
        torch.testing.assert_close(found[:, 0, ::2], torch.full((3, 2, 6), math.sqrt(0.5), dtype=x.dtype))
        torch.testing.assert_close(found[:, 0, 1::2], x[:, 0, 1::2].clamp(max=2), rtol=0, atol=1e-12)
    with pytest.raises(ConstraintError, match="its derivatives are wrong"):
        polish(x, Halves(factor=3.0))


def test_burgers_with_scales_that_differ_a_millionfold():
    rule = Burgers(dt=0.1, inner_steps=2)
    x, _ = trajectories(rule)
    scale = torch.ones(1, 8, 4, dtype=torch.float64)
    scale[..., ::2, 1] = 1e-6
    found = polish(x, rule, scale=scale)
    assert rule(found.images).max() < 1e-9
    frozen = scale < 0.5  # all but frozen
    expected = polish(x, rule, frozen=frozen)
    assert not expected.certificate.notes
    torch.testing.assert_close(found.images, expected.images, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dx", [0.3, -0.3])
def test_the_forward_derivative_of_a_step_is_that_of_differences_and_of_the_backward_pass(dx, dim):
    grid = BurgersGrid(dx, 0.05, nu=0.03)
    u, v, w = (0.7 * randn(3, 9, 9, seed=seed) for seed in range(3))

    def step(u):
        return crank_nicolson(u, grid, dim)

    value, forward = torch.func.jvp(step, (u,), (v,))
    torch.testing.assert_close(value, step(u), rtol=0, atol=0)
    h = 1e-4
    fourth_order = (8 * (step(u + h * v) - step(u - h * v)) - step(u + 2 * h * v) + step(u - 2 * h * v)) / (12 * h)
    torch.testing.assert_close(forward, fourth_order, rtol=0, atol=1e-10)
    (backward,) = torch.func.vjp(step, u)[1](w)
    torch.testing.assert_close((w * forward).sum(), (backward * v).sum(), rtol=1e-12, atol=0)
    many = torch.func.vmap(lambda v: torch.func.jvp(step, (u,), (v,))[1])(torch.stack([v, w]))
    torch.testing.assert_close(many[0], forward, rtol=0, atol=1e-14)


def test_trajectories_that_explode_are_left_as_they_were():
    rule = Burgers(euler, dt=2.0, inner_steps=30)
    x = torch.cat([30 * randn(1, 1, 8, 6), torch.full((1, 1, 8, 6), 0.5, dtype=torch.float64)])
    found = polish(x, rule)
    assert torch.isfinite(found.images).all()
    assert list(found.certificate.reached) == [False, True]
    assert any("finite" in note for note in found.certificate.notes)


# Equations that cannot be solved one by one


def test_rows_that_repeat_each_other_change_nothing():
    x, once = randn(2, 1, 4, 4, seed=1), linear(randn(5, 16, seed=2), randn(5, seed=3))
    expected = closed_projection(once, x, torch.ones(1))
    for rows in (
        lambda x: torch.cat([once(x), once(x)], 1),
        lambda x: torch.cat([once(x), once(x).sum(1, keepdim=True), 0 * once(x)], 1),
        lambda x: x.flatten(1) - closed_projection_layer(x),
    ):
        found = polish(x, equations(rows))
        torch.testing.assert_close(found.images, expected, rtol=0, atol=1e-11)
        assert not found.certificate.notes


def closed_projection_layer(x):
    """P(x) of the five rows above, for the residual x − P(x)."""
    a, b = randn(5, 16, seed=2), randn(5, seed=3)
    return x.flatten(1) - (x.flatten(1) @ a.T - b) @ torch.linalg.pinv(a).T


def test_contradicting_equations_end_at_least_squares_with_a_note():
    x, matrix, right = randn(3, 1, 4, 4, seed=1), randn(4, 16, seed=2), randn(4, seed=3)
    matrix[1] = matrix[0]
    right[1] = right[0] + 1  # a·x = b and a·x = b + 1
    residual = linear(matrix, right)
    found = polish(x, equations(residual))
    torch.testing.assert_close(found.images, closed_projection(residual, x, torch.ones(1)), rtol=0, atol=1e-6)
    assert not found.certificate.reached.any()
    assert any("contradict" in note for note in found.certificate.notes)
    assert found.certificate.iterations.max() < 10


@pytest.mark.parametrize(
    ("residual", "distance", "note"),
    [
        (lambda x: torch.stack([x.sum((1, 2, 3)) - k for k in (3, 5)], 1), None, solver.CONTRADICTION),
        (lambda x: x.square().sum((1, 2, 3)) + 1, None, solver.CONTRADICTION),
        (lambda x: x.sum((1, 2, 3)) - 3, lambda x: (x.sum((1, 2, 3)) - 4).abs(), solver.DISAGREEMENT),
    ],
    ids=["two totals", "a negative square", "another rule"],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_cannot_be_met_is_said(residual, distance, note, seed):
    rule = equations(residual) if distance is None else namm.constraint(distance, residual=residual)
    certificate = polish(randn(1, 1, 8, 8, seed=seed, dtype=torch.float32), rule).certificate
    assert not certificate.reached.any()
    assert certificate.notes == (note,)


def test_one_image_that_cannot_obey_spoils_no_other():
    """x² = c of each image's own mean: no root where c < 0."""
    x = torch.stack([torch.full((1, 2, 2), value, dtype=torch.float64) for value in (2.0, 0.5, 3.0)])
    x[1, 0, 0, 0] = -9.0  # frozen below, so that its square is to be −9
    frozen = torch.tensor([[True, False], [False, False]])
    found = polish(x, equations(lambda x: x[:, 0, 1].square() - x[:, 0, 0, :1]), frozen=frozen)
    assert list(found.certificate.reached) == [True, False, True]
    torch.testing.assert_close(found.images[0, 0, 1], torch.full((2,), math.sqrt(2), dtype=torch.float64))
    assert torch.isfinite(found.images).all()
    assert found.certificate.notes


def test_a_residual_that_does_not_depend_on_the_image():
    x = randn(2, 1, 4, 4)
    found = polish(x, equations(lambda x: torch.ones(len(x), 3, dtype=x.dtype)))
    assert torch.equal(found.images, x)
    assert any("contradict" in note for note in found.certificate.notes)
    zero = polish(x, equations(lambda x: torch.zeros(len(x), 3, dtype=x.dtype)))
    assert torch.equal(zero.images, x)
    assert not zero.certificate.notes
    partly = polish(x, equations(lambda x: torch.stack([x.sum((1, 2, 3)), torch.ones(len(x), dtype=x.dtype)], 1)))
    assert partly.images.sum((1, 2, 3)).abs().max() < 1e-6
    assert any("contradict" in note for note in partly.certificate.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_on_the_rule_are_left_without_a_word(dtype):
    """What rounding leaves of a rank-deficient rule is no contradiction."""
    x = randn(4, 2, 8, 8, dtype=dtype)
    for make in LINEAR.values():
        obeying = polish(x, make()).images
        for rule in (make(), generic(make())):
            again = polish(obeying, rule)
            torch.testing.assert_close(again.images, obeying, rtol=0, atol=4 * torch.finfo(dtype).eps * 4)
            assert not again.certificate.notes, again.certificate
            assert again.certificate.reached.all(), again.certificate


def test_rows_in_other_units_are_the_same_set():
    """A rule in its own units beside bounds in those of pixels: neither may drown the other."""
    x = randn(2, 1, 4, 4, seed=1).abs()
    for unit in (1e-8, 1.0, 1e8):
        rule = equations(lambda x, unit=unit: unit * (x.sum((1, 2, 3)) - 3))
        found = polish(x, rule, bounds=(0, None)).images
        expected = np.stack([onto_simplex(image, 3.0) for image in x.flatten(1).numpy()])
        np.testing.assert_allclose(found.flatten(1), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e-6])
def test_short_rows_are_met_as_well_as_long_ones(ratio):
    """d x = b pixel by pixel, with d that differs between columns: the only solution is x = b / d."""
    d = torch.tensor([1.0, ratio], dtype=torch.float64)
    x, b = randn(4, 1, 8, 2), randn(1, 1, 8, 2, seed=1)
    found = polish(x, equations(lambda x: x * d.to(x) - b.to(x)))
    assert (found.certificate.after < 1e-9 * found.certificate.before).all()
    torch.testing.assert_close(found.images, (b / d).expand_as(x), rtol=1e-6, atol=1e-9 / ratio)


def test_a_part_of_a_sum_that_has_a_distance_alone_is_met_with_the_others():
    rule = TotalFlux(20.0) + namm.constraint(lambda x: (x.var((1, 2, 3)) - 1).abs(), name="variance")
    found = polish(randn(4, 1, 8, 8, dtype=torch.float32), rule)
    assert found.certificate.reached.all()
    np.testing.assert_allclose(found.images.sum((1, 2, 3)), 20, rtol=1e-5)
    np.testing.assert_allclose(found.images.var((1, 2, 3)), 1, rtol=1e-5)


def onto_simplex(x, total):
    """The nearest vector with entries ≥ 0 and this sum, by sorting (Held, Wolfe and Crowder 1974)."""
    descending = np.sort(x)[::-1]
    shifts = (np.cumsum(descending) - total) / np.arange(1, len(x) + 1)
    shift = shifts[np.nonzero(descending > shifts)[0][-1]]
    return np.maximum(x - shift, 0)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_images_and_scales_in_any_unit(size):
    residual, _ = quadratic(1, 16)
    x = randn(2, 1, 4, 4, seed=3)
    expected = polish(x, equations(residual), bounds=(-1, 1)).images
    rule = equations(lambda x: size * residual(x / size))
    for scale in (1e-12, 1e12):
        found = polish(size * x, rule, bounds=(-size, size), scale=scale)
        torch.testing.assert_close(found.images / size, expected, rtol=0, atol=1e-6)
        assert found.certificate.reached.all(), found.certificate


# Inequalities


def nearest_by_faces(x0, matrix, right, s):
    """Nearest point with A x ≤ b by trying every set of rows as equations: at most 2⁶ of them."""
    best, least = None, np.inf
    for size in range(len(matrix) + 1):
        for rows in itertools.combinations(range(len(matrix)), size):
            a, b = matrix[list(rows)], right[list(rows)]
            x = x0 - s * (np.linalg.pinv(a * s) @ (a @ x0 - b)) if rows else x0
            if (matrix @ x <= right + 1e-9).all() and (moved := np.linalg.norm((x - x0) / s)) < least:
                best, least = x, moved
    return best


@settings(max_examples=30)
@given(seeds, st.integers(1, 6))
def test_half_spaces_agree_with_every_face_tried(seed, count):
    matrix, point = randn(count, 4, seed=seed), randn(4, seed=seed + 1)
    right = matrix @ point + 0.3 * randn(count, seed=seed + 2).abs()  # the point is inside
    x = 3 * randn(5, 1, 2, 2, seed=seed + 3)
    scale = torch.exp(0.5 * randn(1, 2, 2, seed=seed + 4))
    found = polish(x, inequalities(linear(matrix, right)), scale=scale)
    expected = [
        nearest_by_faces(image, matrix.numpy(), right.numpy(), scale.flatten().numpy())
        for image in x.flatten(1).numpy()
    ]
    np.testing.assert_allclose(found.images.flatten(1), np.stack(expected), rtol=0, atol=1e-8)
    assert not found.certificate.notes
    assert found.certificate.reached.all(), found.certificate


def test_parallel_half_spaces_and_empty_ones():
    """x ≤ 0 and x ≤ 1, both broken: as equations they contradict each other."""
    x = torch.full((1, 1, 2, 2), 2.0, dtype=torch.float64)
    found = polish(x, inequalities(lambda x: torch.cat([x.flatten(1), x.flatten(1) - 1], 1)))
    torch.testing.assert_close(found.images, torch.zeros_like(x), rtol=0, atol=1e-12)
    assert not found.certificate.notes
    empty = polish(x, inequalities(lambda x: torch.cat([x.flatten(1), 1 - x.flatten(1)], 1)))
    torch.testing.assert_close(empty.images, torch.full_like(x, 0.5), rtol=0, atol=1e-6)
    assert any("contradict" in note for note in empty.certificate.notes)


@settings(max_examples=15)
@given(seeds, st.floats(-1.0, 8.0))
def test_bounds_and_a_sum_agree_with_slsqp(seed, total):
    x, low, high = randn(2, 1, 2, 3, seed=seed), -0.2, 1.4
    rule = TotalFlux(total)
    found = polish(x, rule, bounds=(low, high))
    for ours, image in zip(found.images.flatten(1).numpy(), x.flatten(1).numpy(), strict=True):
        expected = scipys_nearest(image, np.ones(6), equal=lambda x: np.array([x.sum() - total]), bounds=(low, high))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)
    assert found.images.min() >= low
    assert found.images.max() <= high
    assert not found.certificate.notes


@pytest.mark.parametrize("n", [4, 10])
def test_the_simplex_of_many_pixels(n):
    x = randn(5, 1, n, n, seed=n)
    found = polish(x, TotalFlux(2.0), bounds=(0, None))
    expected = np.stack([onto_simplex(image, 2.0) for image in x.flatten(1).numpy()])
    np.testing.assert_allclose(found.images.flatten(1), expected, rtol=0, atol=1e-9)
    assert found.images.min() == 0


@settings(max_examples=12)
@given(seeds)
def test_equations_and_inequalities_together_agree_with_scipy(seed):
    equal, equal_rows = quadratic(seed, 6, rows=1, curvature=0.1)
    x = randn(1, 1, 2, 3, seed=seed + 9)

    def at_most(x):
        return torch.cat([x.flatten(1)[:, :2] - 0.1, x.flatten(1).square().sum(1, keepdim=True) - 4], 1)

    rule = equations(equal) + 0.5 * inequalities(at_most)
    found = polish(x, rule)
    start, ours = x.flatten().numpy(), found.images.flatten().numpy()
    near = scipys_nearest(
        start,
        np.ones(6),
        equal=equal_rows,
        at_most=lambda x: at_most(torch.from_numpy(x)[None])[0].numpy(),
        start=ours,
    )
    np.testing.assert_allclose(ours, near, rtol=0, atol=1e-5)
    assert found.certificate.method == "Gauss-Newton"
    assert float(rule(found.images)) < 1e-10


def test_a_disc_agrees_with_its_closed_form_and_with_trust_constr():
    x = torch.cat([randn(2, 1, 2, 2, seed=3) * 3, randn(1, 1, 2, 2, seed=4) * 0.1])
    found = polish(x, inequalities(lambda x: x.square().sum((1, 2, 3)) - 1)).images
    norms = x.flatten(1).norm(dim=1)[:, None, None, None]
    torch.testing.assert_close(found, x / norms.clamp(min=1), rtol=0, atol=1e-8)
    rows = lambda x: np.array([np.sum(x**2) - 1])  # noqa: E731
    scipys = scipys_nearest(x[0].flatten().numpy(), np.ones(4), at_most=rows, method="trust-constr")
    np.testing.assert_allclose(found[0].flatten(), scipys, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_that_satisfy_inequalities_stay_exactly(dtype):
    x = torch.rand(3, 1, 4, 4, dtype=dtype)
    x[0, 0, 0, 0], x[1, 0, 0, 0] = 1.0, 0.0  # on the bounds
    x[2] += 5
    rule = inequalities(lambda x: torch.cat([x.flatten(1) - 1, x.mean((1, 2, 3))[:, None] - 0.9], 1))
    found = polish(x, rule, bounds=(0, 1))
    assert torch.equal(found.images[:2], x[:2])
    assert not torch.equal(found.images[2], x[2])
    assert (found.certificate.moved[:2] == 0).all()
    assert found.certificate.reached.all()


def test_bounds_without_room_for_the_sum():
    x = randn(2, 1, 4, 4).abs()
    found = polish(x, TotalFlux(120.0), bounds=(0, 1))
    assert torch.isfinite(found.images).all()
    assert 0 <= found.images.min() <= found.images.max() <= 1
    assert not found.certificate.reached.any()
    assert any("contradict" in note for note in found.certificate.notes)


def test_a_frozen_pixel_out_of_bounds_stays_and_the_others_obey():
    x = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    x[:, 0, 0, 0] = 3.0
    frozen = torch.zeros(4, 4, dtype=torch.bool)
    frozen[0, 0] = True
    for rule in (TotalFlux(9.0), namm.constraint(lambda x: (x.sum((1, 2, 3)) - 9).abs())):
        found = polish(x, rule, frozen=frozen, bounds=(0, 1))
        assert (found.images[:, 0, 0, 0] == 3).all()
        assert found.images[..., ~frozen].max() <= 1


def test_numbers_of_inequalities_keep_their_plane_constant():
    rule = namm.constraint(
        lambda x, c: (x.mean((1, 2, 3)) - c).clamp(min=0), inequality=lambda x, c: x.mean((1, 2, 3)) - c, condition=-1
    )
    x = namm.with_number(randn(2, 1, 4, 4), [-1.0, 3.0]) + 0.1 * randn(2, 2, 4, 4, seed=1)
    found = polish(x, rule)
    assert rule(found.images).max() < 1e-9
    assert found.images[:, -1].std((1, 2)).max() < 1e-9


# ℓ alone


@pytest.mark.parametrize("floor", [0.0, 0.02])
@pytest.mark.parametrize(
    "distance",
    [
        lambda x: (x.sum((1, 2, 3)) - 3).abs(),
        lambda x: (x.mean((1, 2, 3)) - 0.3).square(),
        lambda x: x.diff(dim=-1).abs().mean((1, 2, 3)),
        lambda x: (x.square().sum(1) - 1).square().mean((1, 2)),
        lambda x: (x - x.flip(-1)).square().mean((1, 2, 3)).sqrt(),
    ],
    ids=["absolute", "square", "total variation", "colours", "mirror"],
)
def test_a_distance_alone_descends_to_the_floor(distance, floor):
    x = randn(4, 2, 4, 4, seed=7)
    found = polish(x, namm.constraint(distance), floor=floor)
    assert found.certificate.method == "Polyak"
    assert (distance(found.images) <= 1.01 * floor + 1e-4 * distance(x)).all()
    assert (found.certificate.iterations <= POLYAK_STEPS).all()
    if floor:
        assert found.certificate.reached.all(), found.certificate
        assert found.certificate.iterations.mean() < 100


def test_a_smooth_distance_is_met_at_the_nearest_point():
    x = randn(3, 1, 4, 4, seed=8)
    found = polish(x, namm.constraint(lambda x: (x.sum((1, 2, 3)) - 3).abs()), scale=SCALES["pixels"][:1, :4, :4])
    closed = polish(x, TotalFlux(3.0), scale=SCALES["pixels"][:1, :4, :4])
    torch.testing.assert_close(found.images, closed.images, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "distance",
    [
        lambda x: 1 + 0 * x.sum((1, 2, 3)),
        lambda x: torch.ones(len(x), dtype=x.dtype),
        lambda x: x.square().mean((1, 2, 3)) + 1,
        lambda x: (x > 0).to(x.dtype).mean((1, 2, 3)),
    ],
    ids=["no slope", "no dependence", "no root", "no derivative"],
)
def test_a_distance_that_leads_nowhere_ends(distance):
    x = randn(2, 1, 4, 4)
    found = polish(x, namm.constraint(distance))
    assert torch.isfinite(found.images).all()
    assert (found.certificate.after <= found.certificate.before).all()
    assert not found.certificate.reached.any()


# What is asked for wrongly


X = torch.zeros(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"scale": [1.0, 2.0]}, "scale"),
        ({"scale": torch.ones(3, 4, 5)}, "scale"),
        ({"scale": "large"}, "scale"),
        ({"frozen": torch.ones(4, 4, dtype=torch.bool)}, "free to move"),
        ({"frozen": torch.ones(5, dtype=torch.bool)}, "frozen"),
        ({"bounds": (1, 0)}, "bounds"),
        ({"bounds": (0, 0)}, "bounds"),
        ({"bounds": (math.nan, None)}, "bounds"),
        ({"bounds": (math.inf, None)}, "bounds"),
        ({"bounds": 1.0}, "bounds"),
        ({"floor": -1.0}, "floor"),
        ({"floor": math.nan}, "floor"),
    ],
)
def test_wrong_arguments_are_answered_by_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        polish(X, TotalFlux(), **options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_images_that_are_not_finite_are_named(value):
    x = torch.zeros(5, 1, 4, 4)
    x[3, 0, 1, 1] = value
    with pytest.raises(DataError, match="NaN or inf"):
        polish(x, TotalFlux())


def test_wrong_shapes_are_answered_by_a_sentence():
    with pytest.raises(DataError, match="four axes"):
        polish(torch.zeros(4, 4), TotalFlux())
    with pytest.raises(DataError, match="empty"):
        polish(torch.zeros(0, 1, 4, 4), TotalFlux())
    with pytest.raises(DataError, match="two channels"):
        polish(X, DivergenceFree(4))
    with pytest.raises(ConstraintError, match="per image"):
        polish(X, namm.constraint(lambda x: x.square().mean((1, 2, 3)), residual=lambda x: x.mean()))


@pytest.mark.parametrize("call", [polish, namm.certify])
def test_a_function_is_a_rule(call):
    x = randn(3, 1, 4, 4)
    found = call(x, lambda x: (x.sum((1, 2, 3)) - 5).abs())
    expected = call(x, namm.constraint(lambda x: (x.sum((1, 2, 3)) - 5).abs()))
    certificates = [each if call is namm.certify else each.certificate for each in (found, expected)]
    assert certificates[0].after.tolist() == certificates[1].after.tolist()


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (TotalFlux, "TotalFlux is a class: make a rule of it"),
        (None, "must be a namm.Constraint or a function of images"),
    ],
)
def test_what_is_no_rule(rule, sentence):
    for call in (polish, namm.certify):
        with pytest.raises(UsageError, match=sentence):
            call(randn(1, 1, 4, 4), rule)


@pytest.mark.parametrize(
    ("residual", "sentence"),
    [
        (lambda x: (x.sum((1, 2, 3)),), "returned tuple"),
        (lambda x: None, "returned NoneType"),
        (lambda x: x.detach().numpy().sum((1, 2, 3)), "returned ndarray"),
        (lambda x: x.sum((1, 2, 3)) > 0, "returned torch.bool"),
        (lambda x: x.sum((1, 2, 3)).long(), "returned torch.int64"),
        (lambda x: torch.fft.fft2(x)[:, 0], r"returned torch.complex\d+: .*view_as_real"),
        (lambda x: torch.zeros(len(x), device="meta"), "is on meta and the images are on cpu"),
        (lambda x: x[:, :0], "values per image"),
        (lambda x: x.sum((1, 2, 3)) - x.mean(), "mixes the images of a batch"),
    ],
)
def test_a_residual_that_is_none_is_answered_by_a_sentence(residual, sentence):
    rule = namm.constraint(lambda x: x.sum((1, 2, 3)).abs(), residual=residual)
    with pytest.raises(ConstraintError, match=sentence):
        polish(randn(3, 1, 4, 4), rule)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_a_scale_whose_square_no_number_holds(scale):
    x = randn(2, 1, 4, 4)
    for bounds in (None, (-9, 9)):
        expected, found = (polish(x, TotalFlux(3.0), bounds=bounds, scale=s) for s in (1.0, scale))
        torch.testing.assert_close(found.images, expected.images, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.certificate.moved * scale, expected.certificate.moved, rtol=1e-9)


def test_what_is_far_is_not_called_contradicting_and_what_is_nearly_met_no_disagreement():
    sphere = equations(lambda x: x.square().sum((1, 2, 3)) - 1)
    far = polish(1e9 * randn(3, 1, 5, 7), sphere).certificate
    assert not far.reached.any()
    assert solver.CONTRADICTION not in far.notes
    x = randn(60, 1, 6, 6, dtype=torch.float32) * torch.logspace(0, 1.5, 60)[:, None, None, None]
    moments = equations(lambda x: torch.stack([x.square().mean((1, 2, 3)) - 1, (x**3).mean((1, 2, 3))], 1))
    found = polish(x, moments, bounds=(-3, 3)).certificate
    assert solver.DISAGREEMENT not in found.notes


def test_a_nearest_image_of_another_shape():
    class Bad(Constraint):
        def distance(self, x):
            return x.abs().mean((1, 2, 3))

        def nearest(self, x, scale):
            return torch.zeros_like(x[:, :1])

    with pytest.raises(ConstraintError, match="`nearest` of Bad must return images of the same shape"):
        polish(randn(2, 3, 4, 4), Bad())


def test_infinite_bounds_are_no_bounds():
    x = randn(2, 1, 4, 4)
    expected = polish(x, TotalFlux(3.0), bounds=(0, None)).images
    assert torch.equal(polish(x, TotalFlux(3.0), bounds=(0, math.inf)).images, expected)
    assert polish(x, TotalFlux(3.0), bounds=(-math.inf, math.inf)).certificate.method == "closed form"


def test_a_residual_that_is_not_finite_somewhere():
    """log of a negative pixel: that image stays, the other is polished, and steps into the negative are halved."""
    x = torch.tensor([[0.5, 0.02], [-1.0, 0.2]], dtype=torch.float64).reshape(2, 1, 1, 2)
    found = polish(x, equations(lambda x: x.log().sum((1, 2, 3)) + 8))
    assert torch.equal(found.images[1], x[1])
    assert found.images[0].log().sum().item() == pytest.approx(-8, abs=1e-9)
    assert any("finite" in note for note in found.certificate.notes)


def test_a_gradient_that_is_not_finite():
    """The norm of a black image has no derivative: it stays, and nothing becomes NaN."""
    x = torch.cat([torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)])
    for rule in (
        equations(lambda x: x.square().sum((1, 2, 3)).sqrt() - 1),
        namm.constraint(lambda x: (x.square().sum((1, 2, 3)).sqrt() - 1).abs()),
    ):
        found = polish(x, rule)
        assert torch.equal(found.images[0], x[0])
        torch.testing.assert_close(found.images[1], x[1] / 2)


# Types, places, batches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_type_and_place_of_the_result_and_the_input_left_alone(dtype):
    x = randn(3, 2, 8, 8, dtype=dtype)
    before = x.clone()
    for rule in (*(make() for make in LINEAR.values()), namm.constraint(lambda x: x.square().mean((1, 2, 3)))):
        found = polish(x, rule).images
        assert (found.dtype, found.device, found.shape) == (dtype, x.device, x.shape)
        assert not found.requires_grad
        assert torch.equal(x, before)
        if rule.has_residual:
            array = polish(x.numpy(), rule, device="cpu").images
            assert torch.equal(array, found)
            with torch.inference_mode():
                assert torch.equal(polish(x.clone(), rule).images, found)
    assert polish(x.half(), TotalFlux()).images.dtype == torch.float32
    assert polish(x.clone().requires_grad_(), TotalFlux()).images.dtype == dtype


def test_a_rule_that_computes_in_float32_alone_says_so():
    convolution = torch.nn.Conv2d(1, 2, 3, padding=1, bias=False).requires_grad_(False)
    rule = equations(lambda x: convolution(x)[:, :, ::2, ::2] - 0.1)
    x = randn(2, 1, 6, 6, dtype=torch.float32)
    frozen = torch.zeros(6, 6, dtype=torch.bool)
    frozen[5, 5] = True
    for options in ({}, {"frozen": frozen}, {"bounds": (-9, 9)}):
        found = polish(x, rule, **options)
        assert found.certificate.method == "Gauss-Newton"
        assert rule(found.images).max() < 1e-5
        assert found.certificate.reached.all(), found.certificate
        (note,) = found.certificate.notes
        assert "float32 alone" in note
    assert polish(x.double(), rule).images.dtype == torch.float64
    wide = closed_projection(
        lambda x: (convolution(x.float())[:, :, ::2, ::2] - 0.1).double(), x.double(), torch.ones(1)
    )
    torch.testing.assert_close(polish(x, rule).images, wide.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"bounds": (0, None)}])
def test_rounding_to_float32_does_not_add_up(options):
    """All pixels move by the same amount, so that rounding to nearest errs by the same in each of a binade."""
    x = torch.rand(8, 1, 32, 32, generator=torch.Generator().manual_seed(0)) ** 4
    x[0] *= 205 / x[0].double().sum()
    found = polish(x, TotalFlux(205.0), **options)
    assert found.certificate.reached.all(), found.certificate
    torch.testing.assert_close(
        found.images, polish(x.double(), TotalFlux(205.0), **options).images.float(), rtol=0, atol=2e-7
    )
    periodic = polish(x, Periodic((2, 2))).images
    assert Periodic((2, 2))(periodic).max() == 0


def test_only_the_residual_computes_in_float32():
    weight = torch.ones(16, 2)
    rule = namm.constraint(lambda x: x.sum((1, 2, 3)).abs(), residual=lambda x: x.flatten(1) @ weight)
    found = polish(randn(2, 1, 4, 4), rule)
    assert found.images.sum((1, 2, 3)).abs().max() < 1e-5
    assert "float32 alone" in found.certificate.notes[0]


class Weighted(Constraint):
    """Σ w x = 1 with w a buffer, and a parameter for good measure."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.1, 1, 16).reshape(1, 4, 4))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def distance(self, x):
        return self.residual(x).abs()

    def residual(self, x):
        return self.scale * ((self.weight * x).sum((1, 2, 3)) - 1)


def test_buffers_and_parameters_are_widened_in_a_copy():
    rule, x = Weighted(), randn(2, 1, 4, 4)
    found = polish(x, rule).images
    w = rule.weight.double()
    share = ((w * x).sum((1, 2, 3)) - 1) / w.square().sum()
    torch.testing.assert_close(found, x - share[:, None, None, None] * w, rtol=0, atol=1e-12)
    assert rule.weight.dtype == rule.scale.dtype == torch.float32
    assert rule.scale.grad is None


class OnceDifferentiable(torch.autograd.Function):
    """x², with a backward that cannot be differentiated again, and a forward derivative."""

    @staticmethod
    def forward(x):
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0] * tangent


class NoForward(OnceDifferentiable):
    """The same without a forward derivative."""

    jvp = torch.autograd.Function.jvp


def test_a_residual_that_can_be_differentiated_once():
    x = randn(2, 3, 4, 4)
    expected = polish(x, equations(lambda x: x.square().sum(1) - 1)).images
    found = polish(x, equations(lambda x: OnceDifferentiable.apply(x).sum(1) - 1)).images
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    with pytest.raises(ConstraintError, match="differentiated"):
        polish(x, equations(lambda x: NoForward.apply(x).sum(1) - 1))


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_split_into_batches_changes_nothing(batch, monkeypatch):
    x = torch.cat([randn(4, 1, 4, 4), 0.01 * randn(3, 1, 4, 4, seed=1)])
    residual, _ = quadratic(5, 16)
    rules = [
        equations(residual),
        equations(residual) + inequalities(lambda x: x.abs().amax((1, 2, 3)) - 1),
        namm.constraint(lambda x: residual(x).square().mean(1)),
        TotalFlux(2.0),
    ]
    whole = [polish(x, rule, bounds=(-2, 2)) for rule in rules]
    monkeypatch.setattr(solver, "PIXELS", {"cpu": 16 * batch})
    for rule, expected in zip(rules, whole, strict=True):
        found = polish(x, rule, bounds=(-2, 2))
        torch.testing.assert_close(found.images, expected.images, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(found.certificate.reached, expected.certificate.reached)
        assert found.certificate.notes == expected.certificate.notes


def test_no_solver_takes_more_steps_than_it_may(monkeypatch):
    """A residual as rough as can be: what is left is said, and the end comes."""
    x = randn(3, 1, 4, 4)
    rough = equations(lambda x: (30 * x).sin().flatten(1) - 0.999 + 0.1 * x.flatten(1).abs())
    found = polish(x, rough)
    assert torch.isfinite(found.images).all()
    assert (found.certificate.iterations <= STEPS).all()
    assert (found.certificate.after <= found.certificate.before).all()
