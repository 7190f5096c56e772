"""Rules as JSON: what comes back measures the same."""

import json

import pytest
import torch

from namm.constraints import Burgers, Constraint, Periodic, TotalFlux, constraint
from namm.constraints.description import describe, rebuild
from namm.errors import UsageError
from namm.simulators.burgers import euler

COARSE = Burgers(step=euler, nu=0.2, length=8.0, dt=0.01, inner_steps=2, flipped=False, max_speed=2.0)


class HalfFlux(TotalFlux):
    """A subclass that measures something else."""

    def distance(self, x):
        return super().distance(2 * x)


@pytest.mark.parametrize(
    "rule",
    [
        TotalFlux(3.5),
        Periodic((2, 4)),
        Burgers(),
        COARSE,
        TotalFlux(1) + 0.5 * Periodic(2),
        3 * (TotalFlux(2) + COARSE),
    ],
    ids=repr,
)
def test_a_rule_survives_json(rule):
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    again = rebuild(json.loads(json.dumps(describe(rule))))
    assert repr(again) == repr(rule)
    assert torch.equal(again(x), rule(x))
    assert (rule(x) > 0).all()


def test_numbers_that_repr_hides_survive_too():
    assert rebuild(describe(COARSE)).max_speed == 2.0


def test_the_format_is_the_documented_one():
    assert describe(TotalFlux(120) + 0.5 * Periodic(2)) == {
        "sum": [{"name": "TotalFlux", "total": 120.0}, {"scale": 0.5, "of": {"name": "Periodic", "tiles": [2, 2]}}]
    }


@constraint
def bright(x):
    return (1 - x).relu().mean((1, 2, 3))


@pytest.mark.parametrize(
    "rule",
    [bright, 2 * bright, TotalFlux(1) + bright, HalfFlux(1), Burgers(step=lambda u, grid, dim=-1: u)],
    ids=["function", "scaled", "sum", "subclass", "own step"],
)
def test_a_rule_of_ones_own_is_named_but_not_rebuilt(rule: Constraint):
    assert describe(rule) == {"own": rule.name}
    with pytest.raises(UsageError, match="constraint=rule"):
        rebuild(describe(rule))


@pytest.mark.parametrize("description", [{}, {"name": "TotalFlow", "total": 1}])
def test_an_unknown_description_is_refused(description):
    with pytest.raises(UsageError, match="describes no rule"):
        rebuild(description)
