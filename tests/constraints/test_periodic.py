"""Periodic images: the definition spelt out in NumPy, least squares, and exact tilings."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.constraints import Periodic
from namm.errors import DataError, UsageError

tilings = st.tuples(st.integers(1, 3), st.integers(1, 3)).filter(lambda t: t[0] * t[1] > 1)
cells = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))  # channels, rows, columns
seeds = st.integers(0, 2**31)


def tile(cell: torch.Tensor, tiles: tuple[int, int]) -> torch.Tensor:
    return torch.from_numpy(np.tile(cell.numpy(), (1, 1, *tiles)))


def images(tiles, cell, seed: int = 0, n: int = 2, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    shape = (n, cell[0], tiles[0] * cell[1], tiles[1] * cell[2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def distance_by_definition(image: np.ndarray, tiles: tuple[int, int]) -> float:
    """Σ over tiles of mean |image − tiling of that tile|, one tile at a time."""
    h, w = image.shape[1] // tiles[0], image.shape[2] // tiles[1]
    corners = [(i * h, j * w) for i in range(tiles[0]) for j in range(tiles[1])]
    copies = [np.tile(image[:, r : r + h, c : c + w], (1, *tiles)) for r, c in corners]
    return sum(np.abs(image - copy).mean() for copy in copies)


@given(tilings, cells, seeds)
def test_distance_follows_its_definition(tiles, cell, seed):
    x = images(tiles, cell, seed)
    expected = [distance_by_definition(image, tiles) for image in x.numpy()]
    assert Periodic(tiles)(x).tolist() == pytest.approx(expected, rel=1e-12)


@given(tilings, cells, seeds, st.sampled_from([torch.float32, torch.float64]))
def test_tiled_images_have_no_distance_and_no_residual(tiles, cell, seed, dtype):
    x = tile(images((1, 1), cell, seed, dtype=dtype), tiles)
    rule = Periodic(tiles)
    assert rule(x).tolist() == [0.0, 0.0]
    assert not rule.residual(x).any()


@given(tilings, cells, seeds, st.data())
def test_one_changed_pixel_is_seen(tiles, cell, seed, draw):
    """It differs from T − 1 others, each pair counts twice, over T tiles of m pixels: 2 (T − 1) δ / (T m)."""
    x = tile(images((1, 1), cell, seed), tiles)
    where = tuple(draw.draw(st.integers(0, size - 1)) for size in x.shape)
    x[where] += 0.5
    count, pixels = tiles[0] * tiles[1], cell[0] * cell[1] * cell[2]
    distance = Periodic(tiles)(x)
    assert distance[where[0]].item() == pytest.approx(0.5 * 2 * (count - 1) / (count * pixels))
    assert distance[1 - where[0]].item() == 0.0
    assert Periodic(tiles).residual(x)[where].item() == pytest.approx(0.5 * (count - 1) / count)


@given(tilings, cells, seeds)
def test_projection_is_least_squares_over_unit_cells(tiles, cell, seed):
    x = images(tiles, cell, seed)
    size = int(np.prod(cell))
    basis = torch.eye(size, dtype=x.dtype).reshape(size, *cell)
    design = tile(basis, tiles).reshape(size, -1).T.numpy()  # column k: unit cell e_k, tiled
    p = Periodic(tiles).project(x)
    for image, projected in zip(x.numpy(), p.numpy(), strict=True):
        best, *_ = np.linalg.lstsq(design, image.reshape(-1), rcond=None)
        assert projected == pytest.approx((design @ best).reshape(image.shape), abs=1e-12)


@given(tilings, cells, seeds, st.sampled_from([torch.float32, torch.float64]))
def test_projection_lands_on_the_set_and_stays(tiles, cell, seed, dtype):
    rule, x = Periodic(tiles), images(tiles, cell, seed, dtype=dtype)
    p = rule.project(x)
    assert not rule(p).any()
    assert torch.equal(rule.project(p), p)
    assert torch.equal(rule.residual(x), x - p)


def test_gradient_agrees_with_finite_differences():
    x = images((2, 3), (1, 2, 2)).requires_grad_()
    assert torch.autograd.gradcheck(Periodic((2, 3)), x)


def test_gradient_vanishes_on_the_set():
    x = tile(images((1, 1), (1, 4, 4)), (2, 2)).requires_grad_()
    Periodic((2, 2))(x).sum().backward()
    assert not x.grad.any()


def test_one_number_means_both_axes():
    x = images((3, 3), (1, 2, 2))
    assert Periodic(3).tiles == (3, 3)
    assert torch.equal(Periodic(3)(x), Periodic([3, 3])(x))
    assert Periodic().tiles == (2, 2)


def test_half_precision_images_are_projected_in_float32():
    assert Periodic(2).project(images((2, 2), (1, 2, 2)).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("size", [(5, 6), (4, 8)])
def test_refuses_a_size_that_the_tiling_does_not_divide(size):
    with pytest.raises(DataError, match=rf"cannot cut images of {size[0]}×{size[1]} pixels into 2×3 equal tiles"):
        Periodic((2, 3))(torch.zeros(1, 1, *size))


@pytest.mark.parametrize("tiles", [0, 1, (1, 1), (-2, 2), (2,), (2, 2, 2), 2.5, (2, 0.5), "22", None])
def test_refuses_a_tiling_that_is_none(tiles):
    with pytest.raises(UsageError, match="Periodic needs the repeats of the unit cell"):
        Periodic(tiles)
