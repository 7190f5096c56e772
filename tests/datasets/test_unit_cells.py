"""Unit cells: tiling, seams and phases by direct inspection; block-wise seeding by property."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.datasets import UnitCells, unit_cells
from namm.errors import UsageError


def test_images_are_binary_tilings_with_a_repeated_seam():
    x = unit_cells(100).numpy()
    assert x.shape == (100, 1, 64, 64)
    assert x.dtype == np.float32
    assert set(np.unique(x)) == {0.0, 1.0}
    cell = x[:, :, :32, :32]
    np.testing.assert_array_equal(x, np.tile(cell, (1, 1, 2, 2)))
    np.testing.assert_array_equal(cell[:, :, 0], cell[:, :, -1])
    np.testing.assert_array_equal(cell[..., 0], cell[..., -1])
    assert np.unique(x, axis=0).shape[0] == 100


def test_reference_distance_of_the_images_is_zero(parity):
    """The formula of the parity file's section on tiles, checked on its numbers before ours."""

    def distance(x: np.ndarray) -> np.ndarray:
        tiles = [x[:, i : i + 32, j : j + 32] for i in (0, 32) for j in (0, 32)]
        return np.sum([np.abs(x - np.tile(t, (1, 2, 2))).mean((1, 2)) for t in tiles], axis=0)

    reference = parity("constraints.npz")
    np.testing.assert_allclose(distance(reference["periodic_x"][..., 0]), reference["periodic_loss"], rtol=1e-5)
    assert distance(unit_cells(20)[:, 0].numpy()).max() == 0


def test_phases_have_the_orthant_probabilities_of_the_field():
    """P(both pixels above the mean) = 1/4 + asin(ρ)/(2π) for a Gaussian pair of correlation ρ."""
    x = unit_cells(4000)[:, 0, :31, :31].double()
    assert abs(x.mean().item() - 0.5) < 0.02
    for shift in (1, 3, 8):
        rho = np.exp(-2 * np.sin(np.pi * shift / 31) ** 2 / 0.7**2)
        both = (x * x.roll(shift, -1)).mean().item()
        assert abs(both - (0.25 + np.arcsin(rho) / (2 * np.pi))) < 0.01


def test_without_threshold_grey_values_cross_it_where_the_phases_do():
    grey, phases = unit_cells(64, threshold=None), unit_cells(64)
    assert torch.equal((grey > 0.5).float(), phases)
    assert 0 <= grey.min() <= grey.max() <= 1
    # The variance of N(0.5, 0.7²) clipped to [0, 1], by quadrature.
    u = np.linspace(-6, 6, 100_001)
    density = np.exp(-(u**2) / 2) / np.exp(-(u**2) / 2).sum()
    expected = (density * (np.clip(0.5 + 0.7 * u, 0, 1) - 0.5) ** 2).sum()
    assert unit_cells(2000, threshold=None).var().item() == pytest.approx(expected, rel=0.05)


@given(
    size=st.sampled_from([8, 12]),
    tiles=st.sampled_from([1, 2, 4]),
    ends=st.lists(st.integers(0, 200), min_size=2, max_size=2).map(sorted),
    seed=st.integers(0, 5),
)
def test_an_image_does_not_depend_on_what_else_is_drawn(size, tiles, ends, seed):
    start, stop = ends
    recipe = UnitCells(size=size, tiles=tiles)
    piece = recipe.images(seed, "val", start, stop)
    assert piece.shape == (stop - start, 1, size, size)
    assert torch.equal(piece, recipe.images(seed, "val", 0, 200)[start:stop])
    assert torch.equal(piece, torch.cat([torch.empty(0, *recipe.shape), *recipe.pieces(seed, "val", start, stop)]))


def test_seeds_splits_and_blocks_are_different_streams():
    recipe = UnitCells(size=16)
    draws = [recipe.block(seed, split, k) for seed in (0, 1) for split in ("train", "val", "test") for k in (0, 1)]
    assert len({draw.numpy().tobytes() for draw in draws}) == len(draws) == 12


@pytest.mark.parametrize(("size", "tiles"), [(63, 2), (64, 0), (4, 4)])
def test_sizes_that_do_not_tile_are_refused(size, tiles):
    with pytest.raises(UsageError, match=f"{size} pixels cannot be cut into {tiles} tiles"):
        UnitCells(size=size, tiles=tiles)


def test_wrong_splits_and_ranges_are_refused():
    with pytest.raises(UsageError, match=r"no split 'valid'; the splits are train, val, test"):
        unit_cells(1, split="valid")
    with pytest.raises(UsageError, match="Images 5 to 3"):
        UnitCells().images(0, "train", 5, 3)
