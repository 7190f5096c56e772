"""Scores of samples against data, each figure by an independent route, and the generators that they expose."""

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.constraints import Periodic, TotalFlux, constraint
from namm.datasets import unit_cells
from namm.errors import ConstraintError, DataError
from namm.evaluation import compare, distance_summary, floor, mmd, total_variation

RULE = Periodic((2, 2))
FEW = {"subsets": 4, "size": 60}


@pytest.fixture(scope="module")
def cells():
    return unit_cells(200, seed=0, split="test")


@given(n=st.integers(1, 30), batch=st.integers(1, 40))
def test_distances_in_figures(n, batch):
    x = torch.rand(n, 1, 4, 6)
    values = np.abs(x.double().numpy().sum((1, 2, 3)) - 12)
    found = distance_summary(TotalFlux(12.0), x.double(), batch_size=batch)
    assert found.n == n
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.std == pytest.approx(values.std(ddof=1) if n > 1 else 0, rel=1e-12)
    assert found.quantiles == pytest.approx(tuple(np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])), rel=1e-12)
    assert found.median == pytest.approx(np.median(values))
    assert (found.worst, found.max) == (values.argmax(), pytest.approx(values.max()))
    assert found.cd(0.01) == pytest.approx(values.mean())  # 100 · 0.01 · ℓ


def test_total_variation_of_known_images():
    ramp = torch.arange(5.0).expand(1, 1, 3, 5)  # 1 along rows, 0 along columns
    torch.testing.assert_close(total_variation(torch.cat([ramp, -3 * ramp, 0 * ramp])), torch.tensor([1.0, 3.0, 0.0]))
    torch.testing.assert_close(total_variation(ramp + 10 * torch.arange(3.0)[:, None]), torch.tensor([11.0]))
    torch.testing.assert_close(total_variation(ramp[:, :, :1]), torch.tensor([1.0]))  # one row has no columns' part


@given(batch=st.integers(1, 50))
def test_ratios_are_those_of_numpy(batch):
    rng = np.random.default_rng(0)
    made, real = 50 + rng.normal(size=(40, 2, 4, 4)) * 0.3, 50 + rng.normal(size=(45, 2, 4, 4))
    scores = compare(made, real, RULE, subsets=1, size=40, batch_size=batch)
    assert scores.spread == pytest.approx(made.std(0, ddof=1).mean() / real.std(0, ddof=1).mean(), rel=1e-10)
    tv = [sum(np.abs(np.diff(x, axis=axis)).mean() for axis in (2, 3)) for x in (made, real)]
    assert scores.total_variation == pytest.approx(tv[0] / tv[1], rel=1e-10)
    assert scores.mmd == mmd(real, made, subsets=1, size=40)
    assert scores.distance == distance_summary(RULE, made)


def test_a_constant_image_keeps_the_rule_and_is_exposed(cells):
    constant = cells.mean() * torch.ones_like(cells)
    scores, lowest = compare(constant, cells, RULE, **FEW), floor(cells, RULE, **FEW)
    assert scores.distance.max == 0
    assert scores.spread == 0
    assert scores.total_variation == 0
    assert scores.mmd.mean > 2 * lowest.mmd.mean
    repeated = compare(cells[:1].expand_as(cells), cells, RULE, **FEW)
    assert repeated.distance.max == 0
    assert repeated.spread == 0
    assert repeated.total_variation > 0.5  # one good image: its variation alone does not give it away
    assert repeated.mmd.mean > 2 * lowest.mmd.mean


def test_smoothing_and_noise_show_in_the_total_variation(cells):
    smooth = torch.nn.functional.avg_pool2d(cells.repeat(1, 1, 2, 2), 5, 1, 2)[..., 32:96, 32:96]
    noisy = cells + 0.3 * torch.randn_like(cells)
    assert compare(smooth, cells, RULE, **FEW).total_variation < 0.9
    assert compare(noisy, cells, RULE, **FEW).total_variation > 1.5


def test_floor_is_between_two_disjoint_halves(cells):
    lowest = floor(cells, RULE, **FEW)
    assert lowest.distance.n == 100
    assert lowest.spread == pytest.approx(1, abs=0.05)
    assert lowest.total_variation == pytest.approx(1, abs=0.05)
    assert lowest.mmd.mean == pytest.approx(np.sqrt(2 * (1 - np.exp(-1)) / 60), rel=0.1)
    # Images that are all equally far apart have k = 1/e: halves that shared one would be closer than this.
    apart = torch.eye(64).reshape(64, 1, 8, 8)
    for size in (20, 32):
        assert floor(apart, RULE, subsets=2, size=size).mmd.mean == pytest.approx(np.sqrt(2 * (1 - np.exp(-1)) / size))


def test_floor_divides_the_data_in_two_for_the_ratios():
    steps = torch.arange(1.0, 21.0)  # total variation and ℓ of image i: i + 1
    images = torch.stack([torch.zeros(20), steps], dim=1).reshape(20, 1, 1, 2)
    found = floor(images, constraint(lambda x: x.sum((1, 2, 3))), subsets=1, size=5)
    first = found.distance.mean * 10
    assert found.total_variation == pytest.approx(first / (steps.sum().item() - first))


def test_images_on_disk_give_the_same(cells, tmp_path):
    few = cells[:40]
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["x"] = few.numpy()
        assert floor(file["x"], RULE, subsets=2, size=20) == floor(few, RULE, subsets=2, size=20)
        assert compare(file["x"], few, RULE, subsets=2, size=20) == compare(few, few, RULE, subsets=2, size=20)


def test_what_cannot_be_scored_is_refused(cells):
    few = cells[:20]
    broken = few.clone()
    broken[7] = float("inf")
    with pytest.raises(DataError, match="image 7 of the samples holds NaN or inf"):
        compare(broken, few, RULE, subsets=1, size=20, batch_size=4)
    with pytest.raises(DataError, match="image 7 of the reference images holds NaN or inf"):
        compare(few, broken, RULE, subsets=1, size=20)
    with pytest.raises(DataError, match="subsets of 1000 images cannot be drawn from 20 samples"):
        compare(few, cells, RULE)
    with pytest.raises(DataError, match="subsets of 30 images cannot be drawn from 20 reference images"):
        compare(cells, few, RULE, size=30)
    with pytest.raises(DataError, match="drawn from 10 images, half of the reference"):
        floor(few, RULE, size=20)
    with pytest.raises(DataError, match=r"different\s+shape"):
        compare(few[..., :32], few, RULE, size=20)
    with pytest.raises(DataError, match="four axes"):
        distance_summary(RULE, few[0])
    overflowing = constraint(lambda x: x.flatten(1).sum(1) / 0, name="overflowing")
    with pytest.raises(ConstraintError, match="overflowing of image 0 of the images is inf"):
        distance_summary(overflowing, few)
