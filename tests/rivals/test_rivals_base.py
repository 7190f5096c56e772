"""What all methods share: noise that belongs to a sample, and needs that are said and kept."""

import pytest
import torch
from rival_oracles import ALONE, CORRELATED, INDEPENDENT, PLANE, model_of

from namm.constraints import Burgers, Darcy, DivergenceFree, Periodic, TotalFlux, constraint
from namm.errors import UsageError
from namm.generative import VAE, DPMSolver
from namm.rivals import (
    ExtrapolateCorrect,
    GradientGuidance,
    ProjectedEstimate,
    ProjectedSteps,
    Projection,
    Rejection,
    ResidualLoss,
    Rival,
)
from namm.rivals.base import Denoiser, projects_linearly

METHODS = [
    Rival(),
    GradientGuidance(),
    ProjectedSteps(),
    ProjectedEstimate(),
    ExtrapolateCorrect(),
    ResidualLoss(),
    Rejection(2),
    Projection(),
]
FEW = DPMSolver(5)


def usable(method, model):
    return method.informed(model, PLANE) if isinstance(method, ResidualLoss) else model


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_seed_decides_and_batches_do_not(method):
    model = usable(method, model_of(CORRELATED))
    x = method.sample(model, PLANE, 70, sampler=FEW, generator=3)
    assert x.shape == (70, 1, 1, 4)
    assert torch.equal(x, method.sample(model, PLANE, 70, sampler=FEW, generator=3))
    torch.testing.assert_close(x, method.sample(model, PLANE, 70, sampler=FEW, generator=3, batch_size=11))
    assert not torch.equal(x, method.sample(model, PLANE, 70, sampler=FEW, generator=4))


@pytest.mark.parametrize("method", [Rival(), ExtrapolateCorrect(resample=2)], ids=["plain", "kept noise"])
def test_a_generator_for_each_sample_decides_on_it_alone(method):
    model = model_of(CORRELATED)
    x = method.sample(model, PLANE, 3, sampler=FEW, generator=[5, 6, 7])
    torch.testing.assert_close(method.sample(model, PLANE, 2, sampler=FEW, generator=[8, 6])[1], x[1])
    assert not torch.allclose(x[0], x[1])


def test_the_method_itself_is_the_plain_model():
    model = model_of(CORRELATED)
    x = model.sample(5, sampler=FEW, generator=1, progress=False)
    assert torch.equal(Rival().sample(model, ALONE, 5, sampler=FEW, generator=1), x)


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        (ProjectedSteps(), "a projection"),
        (Projection(), "a projection"),
        (ProjectedEstimate(), "a residual"),
        (ExtrapolateCorrect(), "a linear projection"),
        (ResidualLoss(), "a model that was trained for it"),
    ],
)
def test_a_rule_that_lacks_what_is_needed_is_refused(method, needed):
    with pytest.raises(UsageError, match=f"cannot be used with plane: it needs {needed}"):
        method.sample(model_of(INDEPENDENT), ALONE, 2)


def test_a_model_without_a_denoiser_is_refused():
    with pytest.raises(UsageError, match=r"give it a namm.Diffusion, not a VAE"):
        Rival().sample(VAE((1, 8, 8), 2, 2, 1.0), ALONE, 2)


def of_shape(*shape):
    model = model_of(INDEPENDENT)
    model.sample_shape = shape
    model.register_statistics()
    return model


@pytest.mark.parametrize(
    ("rule", "shape", "linear"),
    [
        (TotalFlux(3.0), (1, 8, 8), True),
        (2 * Periodic((2, 2)), (1, 8, 8), True),
        (DivergenceFree(8), (2, 8, 8), True),
        (Burgers(), (1, 8, 8), False),
        (Darcy(), (2, 8, 8), False),
        (constraint(lambda x: x.sum((1, 2, 3)), project=lambda x: x.clamp(min=0)), (1, 8, 8), False),
    ],
)
def test_linear_projections_are_told_from_others(rule, shape, linear):
    assert projects_linearly(of_shape(*shape), rule) == linear


def test_a_corrected_denoiser_has_the_score_that_belongs_to_it():
    model = model_of(CORRELATED)
    y, t = torch.randn(3, 1, 1, 4), torch.tensor([0.1, 0.4, 0.9])
    torch.testing.assert_close(Denoiser(model, PLANE).score(y, t), model.score(y, t), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GradientGuidance(-1.0),
        lambda: ProjectedSteps(float("nan")),
        lambda: ProjectedEstimate(iterations=0),
        lambda: ExtrapolateCorrect(mixing=0),
        lambda: ResidualLoss(float("inf")),
        lambda: Rejection(0),
    ],
)
def test_numbers_without_meaning_are_refused(make):
    with pytest.raises(UsageError):
        make()
