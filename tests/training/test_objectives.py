"""Section 3 of the paper: each equation against numbers worked out by other means."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from namm.constraints import Periodic, TotalFlux, constraint
from namm.errors import UsageError
from namm.experiments.engine import build_models
from namm.experiments.engine.settings import MapSettings, WeightSettings
from namm.maps import ICNN, MirrorMap, ResNet
from namm.training.objectives import (
    FinetuneObjective,
    FixedNoise,
    MapObjective,
    UniformNoise,
    Weights,
    cycle_loss,
    default_regulariser,
    gradient_regulariser,
    identity_regulariser,
)


class Affine(nn.Module):
    """x -> a x + b, for which every term has a closed form."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x + self.b


def small_mirror(**inverse) -> MirrorMap:
    return MirrorMap(ICNN(layers=1, filters=4), ResNet(filters=4, blocks=1, dropout=0.0, **inverse))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_equations_1_to_5_on_affine_maps():
    """g = 2x + 1, f = y/4: f(g(x)) = x/2 + 1/4 and g(f(y)) = y/2 + 1."""
    objective = MapObjective(
        MirrorMap(Affine(2.0, 1.0), Affine(0.25, 0.0)),
        TotalFlux(3.0),
        weights=Weights(constraint=7.0, cycle=0.5, regulariser=0.1),
    )
    x, z = torch.rand(5, 1, 2, 2), torch.randn(5, 1, 2, 2)
    sigma = torch.rand(5, 1, 1, 1)
    y = 2 * x + 1 + sigma * z
    cycle = (x / 2 - 0.25).abs().mean() + (y / 2 - 1).abs().mean()
    distance = (y.sum((1, 2, 3)) / 4 - 3).abs().mean()
    closeness = (x + 1).abs().mean()
    losses = objective(x, sigma, z)
    assert torch.allclose(losses["cycle"], cycle)
    assert torch.allclose(losses["constraint"], distance)
    assert torch.allclose(losses["regulariser"], closeness)
    assert torch.allclose(losses["loss"], 0.5 * cycle + 7 * distance + 0.1 * closeness)


def test_equation_7_on_affine_maps():
    mirror = MirrorMap(Affine(2.0, 1.0), Affine(0.25, 0.0))
    objective = FinetuneObjective(mirror, TotalFlux(3.0), weights=Weights(constraint=7.0, cycle=0.3))
    x, samples, z = torch.rand(3, 5, 1, 2, 2)
    sigma = torch.rand(5, 1, 1, 1)
    y = samples + sigma * z
    cycle = (x / 2 - 0.25).abs().mean() + (y / 2 - 1).abs().mean()
    distance = (y.sum((1, 2, 3)) / 4 - 3).abs().mean()
    losses = objective(x, samples, sigma, z)
    assert torch.allclose(losses["loss"], 0.3 * cycle + 7 * distance)


def test_finetuning_leaves_g_alone():
    mirror = small_mirror()
    objective = FinetuneObjective(mirror, Periodic())
    batch = (torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8))
    objective(*batch, *objective.draw(batch, rng()))["loss"].backward()
    assert all(p.grad is None for p in mirror.g.parameters())
    assert all(p.grad is not None for p in mirror.f.parameters())


def test_uniform_and_fixed_noise():
    like = torch.zeros(20_000, 1, 2, 2)
    sigma = UniformNoise(0.3)(like, rng())
    assert sigma.shape == (20_000, 1, 1, 1)
    assert 0 <= sigma.min() < 1e-3
    assert 0.299 < sigma.max() <= 0.3
    assert sigma.mean().item() == pytest.approx(0.15, rel=0.02)
    assert torch.equal(FixedNoise(0.3)(like, rng()), torch.full((20_000, 1, 1, 1), 0.3))


def test_draws_follow_the_generator():
    objective = MapObjective(small_mirror(), Periodic())
    batch = (torch.zeros(4, 1, 8, 8),)
    first, again, other = (objective.draw(batch, rng(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])


def test_gradient_regulariser_is_the_mean_gradient_of_the_potential():
    g = ICNN(layers=1, filters=4).double()
    x = torch.randn(3, 1, 6, 6, dtype=torch.double)
    gradient = torch.func.grad(lambda x: g.potential(x).sum())(x)
    assert torch.allclose(gradient_regulariser(g, x, g(x)), gradient.abs().mean())
    assert not torch.allclose(gradient_regulariser(g, x, g(x)), identity_regulariser(g, x, g(x)))


@pytest.mark.parametrize(
    ("g", "expected"),
    [
        (ICNN(layers=1, filters=4), gradient_regulariser),
        (ICNN(layers=1, filters=4, strong_convexity=1.0), identity_regulariser),
        (ResNet(filters=4, blocks=1), identity_regulariser),
        (Affine(2.0, 1.0), identity_regulariser),
    ],
)
def test_the_default_regulariser_is_the_published_one_where_g_has_a_potential(g, expected):
    assert default_regulariser(g) is expected
    assert MapObjective(MirrorMap(g, ResNet(filters=4, blocks=1)), Periodic()).regulariser is expected


def test_a_regulariser_that_is_chosen_stands():
    objective = MapObjective(small_mirror(), Periodic(), regulariser=identity_regulariser)
    assert objective.regulariser is identity_regulariser


def test_default_weights_are_those_of_a_run_and_of_the_published_results():
    assert asdict(Weights()) == {"constraint": 1.0, "cycle": 0.5, "regulariser": 1e-3, "squared": 0.0}
    assert build_models.weights(WeightSettings(), unit=7.0) == Weights()
    assert build_models.weights(WeightSettings(3.0, relative=True), unit=7.0).constraint == 21
    assert build_models.regulariser(MapSettings()) is default_regulariser(ICNN(layers=1, filters=4))


def test_gradient_regulariser_needs_an_icnn():
    x = torch.rand(1, 1, 8, 8)
    with pytest.raises(UsageError, match="needs g to be an ICNN, not a ResNet"):
        gradient_regulariser(ResNet(filters=4, blocks=1), x, x)


@pytest.mark.parametrize("kind", ["map", "resnet-g", "finetune"])
def test_compiles_as_one_graph_and_equals_eager(kind):
    g = ICNN(layers=1, filters=4)
    if kind == "resnet-g":
        g = ResNet(filters=4, blocks=1, dropout=0.0, activation="none")
    mirror = MirrorMap(g, ResNet(filters=4, blocks=1, dropout=0.0, skip=True, boundary="circular")).double()
    objective = (FinetuneObjective if kind == "finetune" else MapObjective)(mirror, Periodic() + 0.1 * TotalFlux(9.0))
    batch = tuple(torch.rand(2, 1, 8, 8, dtype=torch.double) for _ in range(2 if kind == "finetune" else 1))
    inputs = (*batch, *objective.draw(batch, rng()))

    def evaluate(function):
        objective.zero_grad()
        losses = function(*inputs)
        losses["loss"].backward()
        return losses, {n: p.grad.clone() for n, p in objective.named_parameters() if p.requires_grad}

    torch.compiler.reset()
    losses, gradients = evaluate(objective)
    compiled_losses, compiled_gradients = evaluate(torch.compile(objective, fullgraph=True, backend="aot_eager"))
    for name, value in losses.items():
        assert torch.allclose(compiled_losses[name], value, rtol=1e-10)
    assert gradients.keys() == compiled_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(compiled_gradients[name], gradient, rtol=1e-8, atol=1e-12), name


def test_constraint_loss_is_not_rounded_by_autocast():
    seen = []

    @constraint
    def rule(x):
        seen.append(x.dtype)
        return x.abs().mean((1, 2, 3))

    objective = MapObjective(small_mirror(), rule)
    batch = (torch.rand(2, 1, 8, 8),)
    with torch.autocast("cpu", torch.bfloat16):
        losses = objective(*batch, *objective.draw(batch, rng()))
    assert seen == [torch.float32]
    assert all(value.dtype == torch.float32 for value in losses.values())


def test_squared_errors_are_added_to_the_absolute_ones_of_the_cycle_loss():
    a, b = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.5, 2.0, -1.0])
    assert cycle_loss(a, b) == pytest.approx(0.5)  # (0.5 + 0 + 1) / 3
    assert cycle_loss(a, b, squared=2.0) == pytest.approx(0.5 + 2 * (0.25 + 1) / 3)
    assert build_models.weights(WeightSettings(squared=4.0), unit=7.0).squared == 4.0
