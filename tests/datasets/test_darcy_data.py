"""Darcy images: the benchmark's published statistics, the pair on the equation, block-wise seeding."""

import math

import pytest
import torch

from namm.constraints import Darcy
from namm.datasets import DarcyFlow, darcy_flow
from namm.errors import UsageError
from namm.numerics import generator
from namm.simulators.darcy import eigenpairs, solve


@pytest.fixture(scope="module")
def images():
    return DarcyFlow().draw(10, generator(0))


def test_the_statistics_are_those_of_the_benchmark(images):
    """Residual error 1.2e-3, standard deviation of p 0.07, mean of K 1.39; few images are a tenth off."""
    assert images.shape == (10, 2, 64, 64)
    assert images.dtype == torch.float32
    assert Darcy()(images).mean().item() == pytest.approx(1.2e-3, rel=0.15)
    p, K = images.double().unbind(1)
    assert p.std().item() == pytest.approx(0.07, rel=0.2)
    assert K.mean().item() == pytest.approx(1.39, rel=0.15)
    assert 1.0 < K.std().item() < 1.6
    assert K.min() > 0.01
    trapezium = torch.trapezoid(torch.trapezoid(p, dx=1 / 63), dx=1 / 63)
    assert trapezium.abs().max() < 1e-8


def test_noise_of_a_fiftieth_of_the_spread_breaks_the_rule_as_published(images):
    scale = torch.tensor([0.07, 1.3])[:, None, None]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert Darcy()(images + 0.02 * scale * noise).mean().item() == pytest.approx(9.7, rel=0.15)


def test_the_log_permeability_has_the_variance_of_its_terms():
    log_K = DarcyFlow(size=8, terms=20).images(0, "train", 0, 2000)[:, 1].double().log()
    eigenvalues, fields = eigenpairs(8, 0.1, 20)
    expected = (eigenvalues[:, None, None] * fields.square()).sum(0)
    torch.testing.assert_close(log_K.var(0), expected, rtol=0.15, atol=0)
    assert log_K.mean().abs() < 3 / math.sqrt(2000)


def test_the_pressure_is_that_of_the_permeability():
    p, K = darcy_flow(5, size=10).unbind(1)
    torch.testing.assert_close(solve(K).float(), p, rtol=1e-4, atol=1e-6)


def test_an_image_depends_on_seed_split_and_number_alone():
    recipe = DarcyFlow(size=8)
    whole = recipe.images(3, "val", 0, 150)
    assert torch.equal(recipe.images(3, "val", 60, 130), whole[60:130])
    assert torch.equal(darcy_flow(70, size=8, seed=3, split="val"), whole[:70])
    draws = [recipe.block(seed, split, k) for seed in (0, 1) for split in ("train", "val", "test") for k in (0, 1)]
    assert len({draw.numpy().tobytes() for draw in draws}) == len(draws) == 12


@pytest.mark.parametrize("bad", [{"size": 7}, {"correlation": 0.0}, {"terms": 0}, {"size": 8, "terms": 65}])
def test_recipes_without_meaning_are_refused(bad):
    with pytest.raises(UsageError, match="size must be 8 or more, correlation positive, and terms 1 to size²"):
        DarcyFlow(**bad)
