"""A rule's preconditioner saves products with its derivative and changes nothing else."""

import pytest
import torch

from namm import Constraint, TotalFlux, polish
from namm.errors import ConstraintError
from namm.exact.equations import Linearised

SIZE = 16


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eigenvalues():
    """Those of the five-point Laplacian on a torus."""
    wave = 2 * torch.pi * torch.fft.fftfreq(SIZE, dtype=torch.float64)
    return (2 * wave.cos() - 2)[:, None] + (2 * wave.cos() - 2)


def multiply_spectrum(x, factor):
    return torch.fft.ifft2(factor * torch.fft.fft2(x)).real


class Poisson(Constraint):
    """Δx = s on a torus, a source of mean zero."""

    def __init__(self, power=None):
        super().__init__()
        source = randn(SIZE, SIZE, seed=5)
        self.register_buffer("source", source - source.mean())
        self.power = power  # of |Δ|, that the preconditioner has; -2 is right

    def distance(self, x):
        return self.residual(x).abs().mean((1, 2))

    def residual(self, x):
        x = x[:, 0]
        return sum(x.roll(k, d) for k in (1, -1) for d in (-1, -2)) - 4 * x - self.source

    def preconditioner(self, x, scale):
        if self.power is None:
            return None
        size = eigenvalues().abs()
        factor = torch.where(size > 1e-9, size.clamp_min(1e-9) ** self.power, 1.0)
        return lambda u: multiply_spectrum(u, factor) / scale.square().mean()


def closed_form(x, rule):
    """The nearest image: all frequencies but the mean are those of Δ⁻¹ s."""
    inverse = torch.where(eigenvalues().abs() > 1e-9, 1 / eigenvalues().clamp(max=-1e-9), 0.0)
    return x.mean((1, 2, 3), keepdim=True) + multiply_spectrum(rule.source, inverse)


@pytest.fixture
def products(monkeypatch):
    """How often a derivative has been multiplied."""
    counted, times = [], Linearised.times
    monkeypatch.setattr(Linearised, "times", lambda self, v: counted.append(1) or times(self, v))
    return counted


def test_the_nearest_image_is_the_same_for_a_quarter_of_the_products(products):
    x, plain, preconditioned = randn(3, 1, SIZE, SIZE), Poisson(), Poisson(-2)
    expected = closed_form(x, plain)
    torch.testing.assert_close(polish(x, plain).images, expected, rtol=0, atol=1e-6)
    without = len(products)
    products.clear()
    torch.testing.assert_close(polish(x, preconditioned).images, expected, rtol=0, atol=1e-9)
    assert len(products) < without / 4


def test_a_scale_changes_neither_the_image_nor_the_number_of_products(products):
    x, rule = randn(3, 1, SIZE, SIZE), Poisson(-2)
    polish(x, rule)
    at_one = len(products)
    products.clear()
    torch.testing.assert_close(polish(x, rule, scale=3.0).images, closed_form(x, rule), rtol=0, atol=1e-9)
    assert len(products) <= at_one


def test_a_scale_that_varies_between_pixels():
    """x = x⁰ − s²Jᵀ (J s² Jᵀ)⁺ r(x⁰), with the matrix J of Δ."""
    x, rule, s = randn(2, 1, SIZE, SIZE), Poisson(-2), 1 + 0.3 * randn(1, SIZE, SIZE, seed=1).sin()
    units = torch.eye(SIZE**2, dtype=torch.float64).reshape(-1, 1, SIZE, SIZE)
    jacobian = (rule.residual(units) + rule.source).flatten(1).T
    along = s.flatten().square()[:, None] * jacobian.T
    move = along @ torch.linalg.pinv(jacobian @ along, hermitian=True, rtol=1e-10) @ rule.residual(x).flatten(1).T
    found = polish(x, rule, scale=s)
    assert found.certificate.reached.all()
    torch.testing.assert_close(found.images, x - move.T.reshape(x.shape), rtol=0, atol=1e-6)


def test_a_preconditioner_in_a_sum_with_bounds_that_are_far(products):
    x, found = 0.05 * randn(2, 1, SIZE, SIZE), {}
    for power in (None, -2):
        products.clear()
        polished = polish(x, 2 * Poisson(power) + TotalFlux(3.0), bounds=(-50, 50))
        assert polished.certificate.reached.all()
        found[power] = polished.images, len(products)
    expected = closed_form(x, Poisson()) + (3.0 - x.sum((1, 2, 3), keepdim=True)) / SIZE**2
    torch.testing.assert_close(found[-2][0], expected, rtol=0, atol=1e-8)
    assert found[-2][1] < found[None][1] / 2


def test_a_bound_that_is_met_by_a_shift():
    x, rule = randn(2, 1, SIZE, SIZE), Poisson(-2)
    free = closed_form(x, rule)
    low = float(free.amin()) + 0.3
    shift = (low - free.amin((1, 2, 3), keepdim=True)).clamp(min=0)  # the equation leaves the mean alone
    found = polish(x, rule, bounds=(low, None))
    assert found.certificate.reached.all()
    torch.testing.assert_close(found.images, free + shift, rtol=0, atol=1e-7)


class Lopsided(Poisson):
    """Its preconditioner is not symmetric."""

    def preconditioner(self, x, scale):
        return lambda u: u + 0.5 * u.roll(1, -1)


class Misshapen(Poisson):
    """Its preconditioner takes rows of another shape."""

    def preconditioner(self, x, scale):
        return lambda u: u @ torch.ones(3, 3, dtype=u.dtype)


@pytest.mark.parametrize(("rule", "sentence"), [(Lopsided(), "not symmetric"), (Misshapen(), "preconditioner fails")])
def test_a_wrong_preconditioner_is_refused(rule, sentence):
    with pytest.raises(ConstraintError, match=sentence):
        polish(randn(1, 1, SIZE, SIZE), rule)
