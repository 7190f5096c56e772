"""MMD² and the median rule against the published reference numbers."""

import math

import pytest
import torch

from namm.evaluation import median_bandwidth, mmd2

TOLERANCE = 1e-9


@pytest.fixture
def reference(parity):
    return parity("mmd.npz")


@pytest.fixture
def sets(reference):
    return tuple(torch.from_numpy(reference[name]).double() for name in "XY")


def pooled(x, y):
    return torch.cat([x, y])


def first(x, _):
    return x


RULES = pytest.mark.parametrize(("rule", "sigma"), [(first, "sigma_X"), (pooled, "sigma_pooled")])


@RULES
def test_median_rule(reference, sets, rule, sigma):
    expected = float(reference[sigma.replace("sigma_", "sigma_from_")])
    assert median_bandwidth(rule(*sets)) == pytest.approx(expected, abs=TOLERANCE)


@RULES
@pytest.mark.parametrize(("unbiased", "kind"), [(False, "biased"), (True, "unbiased")])
def test_value(reference, sets, rule, sigma, unbiased, kind):
    expected = float(reference[f"mmd2_{kind}_{sigma}_f64"])
    given = float(reference[sigma.replace("sigma_", "sigma_from_")])
    assert mmd2(*sets, unbiased=unbiased, bandwidth=given) == pytest.approx(expected, abs=TOLERANCE)
    assert mmd2(*sets, unbiased=unbiased, bandwidth=median_bandwidth(rule(*sets))) == pytest.approx(
        expected, abs=TOLERANCE
    )
    in_float32 = mmd2(*(s.float() for s in sets), unbiased=unbiased, bandwidth=given)
    assert in_float32 == pytest.approx(expected, abs=1e-8)


def test_the_first_set_gives_the_bandwidth(reference, sets):
    assert math.isclose(mmd2(*sets), float(reference["mmd2_biased_sigma_X_f64"]), abs_tol=TOLERANCE)
