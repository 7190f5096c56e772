"""Images of galaxies: what is in them, how bright it is against the sky, and what a seed means."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from namm.datasets import DATASETS, Galaxies, galaxies
from namm.errors import UsageError
from namm.numerics import generator
from namm.simulators.galaxies import background, render


def test_images_are_grey_from_zero_to_one():
    x = galaxies(8)
    assert x.shape == (8, 1, 128, 128)
    assert x.dtype == torch.float32
    assert torch.equal(x.amin((1, 2, 3)), torch.zeros(8))
    assert torch.equal(x.amax((1, 2, 3)), torch.ones(8))
    assert DATASETS["galaxies"] is Galaxies
    assert Galaxies.sizes == {"train": 10_000, "val": 1000, "test": 10_000}


@pytest.mark.parametrize(("count", "size"), [(6, 128), (10, 64), (1, 32)])
def test_an_image_is_its_catalogue_and_its_sky_scaled(count, size):
    """Undoing the scaling by two pixels leaves exactly the sources on the sky."""
    recipe = Galaxies(size=size, count=count)
    x = recipe.draw(6, generator(3)).double()
    rng = generator(3)
    catalogue = recipe.draw_catalogue(6, rng)
    scene = render(catalogue, size) + background(6, size, scale=8.5, blur=4.0, rng=rng)
    for image, true in zip(x, scene, strict=True):
        slope, offset = np.polyfit(image.flatten().numpy(), true.flatten().numpy(), 1)
        assert slope == pytest.approx((true.max() - true.min()).item(), rel=1e-5)
        np.testing.assert_allclose(slope * image.numpy() + offset, true.numpy(), atol=1e-4)


def test_every_image_holds_its_number_of_peaks_apart():
    """Counted in pixels: without a sky every source is a bump at its centre, unless a brighter one swallows it."""
    recipe = Galaxies(separation=25.0, count=8)
    catalogue = recipe.draw_catalogue(300, generator(1))
    small = catalogue.major.amax(1) < 5  # bumps of 5.9 px or less do not swallow a neighbour 25 px away
    assert small.sum() >= 10
    for image in render(catalogue, 128)[small, 0].numpy():
        bumps = (image == ndimage.maximum_filter(image, 9)) & (image > 1)
        assert bumps.sum() == 8
        rows, columns = np.nonzero(bumps)
        gaps = np.hypot(rows[:, None] - rows, columns[:, None] - columns)
        assert gaps[gaps > 0].min() >= 25 - 2


def test_the_faintest_peak_is_15_decibels_above_the_sky_in_pixels():
    """Measured from pixels: what a source adds at its own brightest pixel, against the variance of skies alone."""
    recipe = Galaxies()
    sky = background(200, 128, scale=recipe.background, blur=recipe.blur, rng=generator(2))
    catalogue = recipe.draw_catalogue(200, generator(4))
    row, column = catalogue.centres.long().unbind(-1)
    added = render(catalogue, 128)[:, 0][torch.arange(200)[:, None], row, column]
    decibels = 10 * (added.square() / sky.var()).log10()
    assert decibels.min().item() == pytest.approx(15, abs=0.15)
    # The brightest is 10: without its neighbours' light, 20 log₁₀(10/0.6) dB.
    assert 10 * (catalogue.peak.max().square() / sky.var()).log10().item() == pytest.approx(24.4, abs=0.15)
    assert recipe.faintest == pytest.approx(8.5 / math.sqrt(4 * math.pi) / 4 * 10**0.75, rel=2e-3)
    louder = Galaxies(signal_to_noise=20.0)
    assert louder.draw_catalogue(500, generator(4)).peak.min().item() == pytest.approx(louder.faintest, rel=0.01)


@given(
    ends=st.lists(st.integers(0, 200), min_size=2, max_size=2).map(sorted),
    seed=st.integers(0, 3),
    split=st.sampled_from(["train", "val", "test"]),
)
def test_an_image_does_not_depend_on_what_else_is_drawn(ends, seed, split):
    start, stop = ends
    recipe = Galaxies(size=16, count=3)
    piece = recipe.images(seed, split, start, stop)
    assert piece.shape == (stop - start, 1, 16, 16)
    assert torch.equal(piece, recipe.images(seed, split, 0, 200)[start:stop])


def test_seeds_splits_and_blocks_are_different_streams():
    recipe = Galaxies(size=16, count=3)
    draws = [recipe.block(seed, split, k) for seed in (0, 1) for split in ("train", "val", "test") for k in (0, 1)]
    assert len({draw.numpy().tobytes() for draw in draws}) == len(draws) == 12
    assert len({image.numpy().tobytes() for image in draws[0]}) == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "from 1 to 238"),
        ({"count": 8, "size": 16}, "8 sources at least 5 px apart need not fit into 16×16 pixels"),
        ({"signal_to_noise": 30.0}, "peak 19, more than the largest"),
        ({"background": 0.0}, "background positive"),
        ({"background": math.nan}, "background positive"),
        ({"blur": 0.0}, "positive width"),
        ({"size": 1}, "size must be 2 or more"),
        ({"separation": -1.0}, "separation 0 or more"),
        ({"peak": math.inf}, "peak finite"),
        ({"peak": math.nan}, "raise peak"),
    ],
)
def test_numbers_that_make_no_image_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Galaxies(**fields)
