"""MMD against brute force, closed forms and its own null distribution."""

from importlib import import_module
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.errors import DataError, UsageError
from namm.evaluation import median_bandwidth, mmd, mmd2, mmd2_null, mmd_floor
from namm.evaluation.mmd import Subset, in_memory, read
from namm.numerics import generator

module = import_module("namm.evaluation.mmd")  # `namm.evaluation.mmd`, the attribute, is the function


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def brute_force(x, y, sigma, unbiased):
    """Every pair by itself, in NumPy."""
    x, y = (np.asarray(s, dtype=np.float64).reshape(len(s), -1) for s in (x, y))

    def mean(a, b, same):
        k = [
            np.exp(-((p - q) ** 2).sum() / (2 * sigma**2))
            for i, p in enumerate(a)
            for j, q in enumerate(b)
            if not (same and unbiased and i == j)
        ]
        return np.mean(k)

    return mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, False)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)


@given(
    m=st.integers(2, 11),
    n=st.integers(2, 11),
    unbiased=st.booleans(),
    sigma=st.floats(0.5, 5.0),
    block=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_every_pair_counts_once(m, n, unbiased, sigma, block, seed):
    x, y = normal(m, 2, 3, 2, seed=seed), 1 + normal(n, 2, 3, 2, seed=seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        ours = mmd2(x, y, unbiased=unbiased, bandwidth=sigma)
    assert ours == pytest.approx(brute_force(x, y, sigma, unbiased), abs=1e-12)


@given(n=st.integers(2, 13), block=st.integers(1, 14))
def test_median_is_that_of_all_pairs(n, block):
    x = normal(n, 5, seed=n)
    squared = [float((x[i] - x[j]).square().sum()) for i in range(n) for j in range(i)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        assert median_bandwidth(x) == pytest.approx(np.sqrt(np.median(squared) / 2), rel=1e-12)


def test_median_of_many_images_comes_from_some(monkeypatch):
    x = normal(400, 8)
    monkeypatch.setattr(module, "MEDIAN_IMAGES", 200)
    some = median_bandwidth(x)
    monkeypatch.undo()
    assert some != median_bandwidth(x)
    assert some == pytest.approx(median_bandwidth(x), rel=0.02)


def test_float32_images_far_from_zero_lose_nothing():
    x, y = normal(300, 64).float(), 0.05 + normal(300, 64, seed=1).float()
    exact = mmd2((1000 + x).double(), (1000 + y).double())
    assert mmd2(1000 + x, 1000 + y) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("delta", [0.5, 2.0])
def test_shifted_gaussians_have_their_closed_form(delta):
    # x ~ N(0, I), y ~ N(δ, I) in d dimensions: E k = c exp(−‖δ‖²/2(σ² + 2)) with c = (σ²/(σ² + 2))^{d/2}
    d, sigma, repeats = 3, 1.5, 30
    c = (sigma**2 / (sigma**2 + 2)) ** (d / 2)
    exact = 2 * c * (1 - np.exp(-d * delta**2 / (2 * (sigma**2 + 2))))
    values = [
        mmd2(normal(100, d, seed=2 * k), delta + normal(100, d, seed=2 * k + 1), unbiased=True, bandwidth=sigma)
        for k in range(repeats)
    ]
    error = np.std(values, ddof=1) / np.sqrt(repeats)
    assert error < 0.05 * exact
    assert abs(np.mean(values) - exact) < 3 * error


@pytest.mark.parametrize(("m", "n", "d"), [(60, 60, 20), (90, 40, 20), (60, 60, 1)])
def test_null_standard_error_is_the_spread_between_samples_of_one_distribution(m, n, d):
    repeats = 300
    nulls = [mmd2_null(normal(m, d, seed=k), normal(n, d, seed=10_000 + k)) for k in range(repeats)]
    values, errors = np.array(nulls).T
    assert abs(values.mean()) < 3 * values.std() / np.sqrt(repeats)  # unbiased
    # The standard deviation of so many values is known to within 4 % where they are normal, 13 % where they are χ²₁.
    assert values.std() == pytest.approx(np.sqrt(np.mean(errors**2)), rel=0.12 if d > 1 else 0.35)
    assert np.mean([abs(null.z) > 3 for null in nulls]) < 0.04
    assert nulls[0].mmd2 == mmd2(normal(m, d, seed=0), normal(n, d, seed=10_000), unbiased=True)


def test_null_standard_error_is_the_spread_over_permutations():
    x, y = normal(40, 6), 0.3 + normal(25, 6, seed=1)
    sigma, pool = median_bandwidth(x), torch.cat([x, y])
    k = np.exp(-(torch.cdist(pool, pool).numpy() ** 2) / (2 * sigma**2))
    np.fill_diagonal(k, 0)
    rng, values = np.random.default_rng(0), []
    for _ in range(4000):
        p = rng.permutation(65)
        a, b = p[:40], p[40:]
        values.append(
            k[np.ix_(a, a)].sum() / (40 * 39) + k[np.ix_(b, b)].sum() / (25 * 24) - 2 * k[np.ix_(a, b)].mean()
        )
    assert mmd2_null(x, y).standard_error == pytest.approx(np.std(values), rel=0.05)


def test_null_sees_a_difference():
    assert mmd2_null(normal(200, 20), 0.3 + normal(200, 20, seed=1)).z > 5


def test_subsets_are_the_biased_root_with_their_own_bandwidth():
    x, y = normal(30, 5), 1 + normal(40, 5, seed=1)
    whole = mmd(x, y[:30], subsets=3, size=30)
    assert whole.mean == pytest.approx(np.sqrt(brute_force(x, y[:30], median_bandwidth(x), False)))
    assert whole.std == pytest.approx(0, abs=1e-12)
    parts = mmd(x, y, subsets=20, size=10, seed=4)
    assert parts.std > 0
    assert parts.mean > whole.mean  # the bias falls as 1/size
    assert parts == mmd(x, y, subsets=20, size=10, seed=4) != mmd(x, y, subsets=20, size=10, seed=5)
    assert float(parts) == parts.mean


def test_floor_and_collapse_are_those_of_the_paper():
    """Two real sets, E k = 1/e, differ by √(2(1 − 1/e)/n); one image unlike any other scores √(1 + 1/e) = 1.17."""
    real = normal(400, 64)
    floor = mmd(real[:200], real[200:], subsets=3, size=200).mean
    assert floor == pytest.approx(np.sqrt(2 * (1 - np.exp(-1)) / 200), rel=0.05)
    assert mmd(real[:200], torch.full((200, 64), 9.0), subsets=3, size=200).mean == pytest.approx(1.17, abs=0.01)


def test_floor_averages_over_divisions_of_the_set():
    """Where the first half of the data is unlike the second, their distance is no floor."""
    x = torch.cat([normal(100, 8), 3 + normal(100, 8, seed=1)])
    found = mmd_floor(x, subsets=30, size=50)
    expected = [mmd(x[p[:50]], x[p[50:100]], subsets=1, size=50).mean for p in map(torch.randperm, 30 * [200])]
    assert found.mean == pytest.approx(np.mean(expected), abs=4 * np.std(expected) / np.sqrt(30))
    assert found.std == pytest.approx(np.std(expected), rel=0.5)
    assert found == mmd_floor(x, subsets=30, size=50) != mmd_floor(x, subsets=30, size=50, seed=1)
    apart = torch.eye(20, dtype=torch.float64)  # all equally far: a shared image would bring two subsets closer
    assert mmd_floor(apart, subsets=5, size=10) == pytest.approx((np.sqrt(2 * (1 - np.exp(-1)) / 10), 0), abs=1e-12)
    with pytest.raises(DataError, match="drawn from 10 images, half of the true ones"):
        mmd_floor(apart, size=11)
    with pytest.raises(UsageError, match="at least one subset"):
        mmd_floor(apart, size=10, subsets=0)


@pytest.mark.parametrize("kind", ["numpy", "hdf5"])
def test_images_on_disk_give_the_same(kind, tmp_path, small_blocks):
    x, y = normal(13, 1, 3, 2).float(), normal(9, 1, 3, 2, seed=1).float()
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["x"] = x.numpy()
        source = {"numpy": x.numpy(), "hdf5": file["x"]}[kind]
        assert mmd2(source, y) == mmd2(x, y)
        assert mmd(source, y, subsets=2, size=5) == mmd(x, y, subsets=2, size=5)
        assert mmd2_null(source, y) == mmd2_null(x, y)


def test_what_cannot_be_compared_is_refused(small_blocks):
    x = normal(20, 1, 4, 4)
    broken = x.clone()
    broken[17, 0, 1, 1] = float("nan")
    with pytest.raises(DataError, match="image 17 of the samples holds NaN"):
        mmd2(x, broken)
    with pytest.raises(DataError, match="image 17 of the true images holds NaN"):
        mmd(broken, x, size=20, subsets=1)
    with pytest.raises(DataError, match="image 17 of the samples"):  # its number in the set, not in the subset
        mmd(x, broken, size=8, subsets=40)
    with pytest.raises(DataError, match=r"\(20, 1, 4, 4\) and the samples \(20, 1, 2, 8\)"):
        mmd2(x, x.reshape(20, 1, 2, 8))
    with pytest.raises(DataError, match="subsets of 1000 images cannot be drawn from 20"):
        mmd(x, x)
    with pytest.raises(DataError, match=r"at least two images.*\(1, 1, 4, 4\)"):
        mmd2(x, x[:1])
    with pytest.raises(DataError, match="at least half of the pairs"):
        mmd2(x[:1].expand(20, -1, -1, -1), x)
    with pytest.raises(DataError, match="at least half of the pairs"):
        mmd2(torch.cat([x[:1].expand(18, -1, -1, -1), x[:2]]).float(), x)
    with pytest.raises(DataError, match="at least two images"):
        median_bandwidth(x[:1])
    with pytest.raises(DataError, match="the 40 images are alike"):
        mmd2_null(torch.ones_like(x), torch.ones_like(x), bandwidth=1.0)
    with pytest.raises(UsageError, match=r"bandwidth .* got -1"):
        mmd2(x, x, bandwidth=-1)
    with pytest.raises(UsageError, match="at least one subset"):
        mmd(x, x, subsets=0, size=4)


# How metrics read images


class Disk:
    """Images that count how often they are read."""

    def __init__(self, images):
        self.images, self.shape, self.reads = images, tuple(images.shape), 0

    def __getitem__(self, index):
        self.reads += 1
        return self.images[index]


@pytest.fixture
def images():
    return torch.randn(20, 1, 3, 2, generator=torch.Generator().manual_seed(0))


def test_what_is_held_is_read_once(images):
    disk = Disk(images)
    copy = in_memory(disk)
    assert isinstance(copy, torch.Tensor)
    assert torch.equal(copy, images)
    assert in_memory(copy) is copy
    assert disk.reads == 1


def test_subsets_are_drawn_from_memory(images):
    disk = Disk(images)
    assert mmd(disk, images + 1, subsets=5, size=8) == mmd(images, images + 1, subsets=5, size=8)
    assert disk.reads == 1
    assert mmd_floor(disk, subsets=5, size=8) == mmd_floor(images, subsets=5, size=8)
    assert disk.reads == 2


def test_a_view_keeps_its_rows_and_their_numbers(images):
    images[7] = torch.nan
    view = in_memory(Subset(Disk(images), np.array([2, 5, 7])))
    assert torch.equal(view[:2], images[[2, 5]])
    with pytest.raises(DataError, match="image 7 of the samples"):
        read(view, slice(None), "samples")


def test_what_would_fill_the_memory_stays_on_disk(images, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * 4 * images.numel() - 1))
    disk = Disk(images)
    assert in_memory(disk) is disk
    assert disk.reads == 0
