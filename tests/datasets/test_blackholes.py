"""Black holes: the flux rule and its floor, what a seed means, and what differs between images."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from namm.constraints import TotalFlux
from namm.datasets import BlackHoles, black_holes
from namm.datasets.blackholes import RANGES
from namm.errors import UsageError
from namm.experiments.engine import build
from namm.experiments.flux import FluxData
from namm.numerics import generator


def test_images_are_positive_and_all_have_the_total():
    x = BlackHoles().draw(8, generator(0))
    assert x.shape == (8, 1, 64, 64)
    assert x.dtype == torch.float32
    assert x.isfinite().all()
    assert x.min() >= 0
    assert np.abs(x.double().sum((1, 2, 3)).numpy() - 120).max() < 1e-3
    assert TotalFlux(120.0)(x).max() < 1e-3
    assert len({image.numpy().tobytes() for image in x}) == 8


@settings(max_examples=5)
@given(size=st.integers(4, 20), total=st.floats(1e-3, 1e6), seed=st.integers(0, 5))
def test_any_size_and_total(size, total, seed):
    x = BlackHoles(size=size, total=total).draw(3, generator(seed))
    assert x.shape == (3, 1, size, size)
    assert (x.double().sum((1, 2, 3)) / total - 1).abs().max() < 1e-6
    assert x.min() >= 0


def test_rings_are_bright_and_shadows_dark():
    """Around the middle, on the average of many images: a ring 10.4 wide with a hole in it, and little at the edge."""
    x = BlackHoles(size=32).draw(32, generator(0))[:, 0].mean(0)
    centres = (torch.arange(32) + 0.5) * 26 / 32 - 13
    b = (centres[:, None] ** 2 + centres**2).sqrt()
    ring, hole, rim = (x[(b > low) & (b < high)].mean() for low, high in ((4.5, 6.5), (0, 2), (11, 13)))
    assert ring > 3 * hole
    assert ring > 3 * rim


def test_an_image_depends_on_seed_split_and_number_alone():
    together = black_holes(70, size=6, seed=1, split="val")
    recipe = BlackHoles(size=6)
    assert torch.equal(recipe.images(1, "val", 60, 70), together[60:])
    others = [recipe.block(*which) for which in ((1, "train", 0), (2, "val", 0), (1, "val", 1))]
    assert len({block.numpy().tobytes() for block in (*others, together[:64])}) == 4


def test_the_number_of_threads_changes_nothing(monkeypatch):
    monkeypatch.setattr("namm.simulators.accretion.GRAIN", 4000)  # thirteen images to a piece
    recipe, threads = BlackHoles(size=12), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = recipe.block(0, "test", 3)
        torch.set_num_threads(2)
        assert torch.equal(one, recipe.block(0, "test", 3))
    finally:
        torch.set_num_threads(threads)


def test_parameters_fill_their_ranges():
    flow = BlackHoles().flows(4000, generator(0))
    below = flow.inclination > math.pi / 2
    assert abs(below.double().mean().item() - 0.5) < 0.04
    drawn = vars(flow) | {"inclination": torch.where(below, math.pi - flow.inclination, flow.inclination)}
    assert drawn.keys() == RANGES.keys()
    for name, (low, high) in RANGES.items():
        unit = (drawn[name] - low) / (high - low)
        assert 0 <= unit.min() < 0.01
        assert 0.99 < unit.max() <= 1
        assert abs(unit.mean().item() - 0.5) < 0.03
    table = torch.stack(list(drawn.values()))
    off_diagonal = torch.corrcoef(table) - torch.eye(len(table))
    assert off_diagonal.abs().max() < 0.08


def test_settings_of_the_experiment_are_the_datasets_own():
    assert FluxData().recipe == {f.name: f.default for f in fields(BlackHoles)}
    assert BlackHoles.sizes == {"train": 100_000, "val": 100, "test": 10_000}
    data = FluxData(size=16, total=7.0)
    x = build.dataset(data).draw(2, generator(0))
    assert build.constraint(data.rule)(x).max() < 1e-5


@pytest.mark.parametrize(("size", "total"), [(3, 120.0), (64, 0.0), (64, -1.0), (64, math.inf), (64, math.nan)])
def test_sizes_and_totals_without_sense_are_refused(size, total):
    with pytest.raises(UsageError, match="size must be 4 or more, total positive and finite"):
        BlackHoles(size=size, total=total)
