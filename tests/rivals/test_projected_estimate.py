"""The projected estimate: steps of Gauss–Newton against the pseudoinverse, the law of independent pixels, exactness."""

import numpy as np
import pytest
import torch
from rival_oracles import CORRELATED, INDEPENDENT, PLANE, ROUNDING, assert_law, given_rule, law, model_of

from namm.constraints import Constraint, constraint
from namm.errors import ConstraintError
from namm.generative import DPMSolver
from namm.rivals import ProjectedEstimate
from namm.rivals.projected_estimate import LinearisedRule

ROWS = torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 1.0, 1.0]])


def sphere(x):
    return x.square().sum((1, 2, 3)) - 9


def equations(x):
    return x.flatten(1) @ ROWS.to(x).T - 1


LINEAR = constraint(lambda x: equations(x).abs().mean(1), residual=equations)
SPHERE = constraint(lambda x: sphere(x).abs(), residual=lambda x: sphere(x)[:, None])


@pytest.mark.parametrize("rule", [LINEAR, SPHERE], ids=["linear", "sphere"])
def test_a_step_is_that_of_the_pseudoinverse(rule):
    x = torch.randn(6, 1, 1, 4) + 2
    moved = LinearisedRule(model_of(CORRELATED), rule, ProjectedEstimate()).corrected(x)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda each: rule.residual(each[None])[0]))(x)
    J, r = jacobian.flatten(2).numpy(), rule.residual(x).numpy()
    expected = x.flatten(1).numpy() - np.einsum("bij,bj->bi", np.linalg.pinv(J), r)
    assert moved.flatten(1).numpy() == pytest.approx(expected, abs=1e-5)


def test_steps_in_each_evaluation_converge():
    x = torch.randn(6, 1, 1, 4) + 2
    once, thrice = (
        LinearisedRule(model_of(CORRELATED), SPHERE, ProjectedEstimate(iterations=k)).corrected(x) for k in (1, 3)
    )
    assert (SPHERE(once) < SPHERE(x)).all()
    assert SPHERE(thrice).max() < 0.01 * SPHERE(once).max()


def test_a_step_away_from_the_rule_is_not_made():
    steep = constraint(lambda x: x.sum((1, 2, 3)).atan().abs(), residual=lambda x: x.sum((1, 2, 3)).atan()[:, None])
    x = torch.full((1, 1, 1, 4), 2.0)  # Newton's step for atan diverges from here
    assert torch.equal(LinearisedRule(model_of(CORRELATED), steep, ProjectedEstimate()).corrected(x), x)


def test_independent_pixels_get_the_law_given_the_rule():
    method = ProjectedEstimate()
    x = method.sample(model_of(INDEPENDENT), PLANE, 8000, sampler=DPMSolver(25), generator=0, batch_size=4000)
    assert_law(x, *given_rule(*law(INDEPENDENT)))
    assert PLANE(x).max() < ROUNDING


def test_a_curved_rule_holds_exactly_in_the_end():
    x = ProjectedEstimate().sample(model_of(CORRELATED), SPHERE, 64, sampler=DPMSolver(10), generator=0)
    assert SPHERE(x).max() < 1e-5


def test_a_sample_that_diverges_leaves_the_others_as_they_are(monkeypatch):
    model, options = model_of(CORRELATED), {"sampler": DPMSolver(5), "generator": 0}
    expected = ProjectedEstimate().sample(model, SPHERE, 4, **options)
    plain, third = model.denoise, torch.arange(4).reshape(-1, 1, 1, 1) == 2
    monkeypatch.setattr(model, "denoise", lambda y, t: plain(y, t).masked_fill(third, torch.nan))
    x = ProjectedEstimate().sample(model, SPHERE, 4, **options)
    assert x[2].isnan().all()
    assert torch.equal(x[[0, 1, 3]], expected[[0, 1, 3]])
    monkeypatch.setattr(model, "denoise", lambda y, t: torch.full_like(y, torch.nan))
    assert ProjectedEstimate().sample(model, SPHERE, 4, **options).isnan().all()


class Preconditioned(Constraint):
    """The linear equations with a preconditioner, times x so that it is NaN where x is."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = torch.tensor(matrix)

    def distance(self, x):
        return equations(x).abs().mean(1)

    def residual(self, x):
        return equations(x)

    def preconditioner(self, x, scale):
        of_image = 1 + x.flatten(1).square().sum(1, keepdim=True)
        return lambda u: of_image * (u @ self.matrix.to(u))


def test_a_wrong_preconditioner_is_refused_in_the_first_step():
    x = torch.randn(3, 1, 1, 4)
    wrong, right = (Preconditioned([[1.0, off], [0.0, 1.0]]) for off in (0.9, 0.0))
    with pytest.raises(ConstraintError, match="not symmetric"):
        LinearisedRule(model_of(CORRELATED), wrong, ProjectedEstimate()).corrected(x)
    x[1] = torch.nan
    moved = LinearisedRule(model_of(CORRELATED), right, ProjectedEstimate()).corrected(x)
    assert right(moved[[0, 2]]).max() < 1e-5
    assert moved[1].isnan().all()
