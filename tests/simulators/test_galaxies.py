"""Sources and sky against closed forms; catalogues against SciPy's distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage, stats

from namm.errors import UsageError
from namm.simulators.galaxies import (
    Catalogue,
    background,
    background_variance,
    blur_kernel,
    draw_catalogue,
    render,
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_source(row: float, column: float, major: float, ellipticity: float, angle: float, peak: float) -> Catalogue:
    values = (torch.tensor([[value]], dtype=torch.float64) for value in (major, ellipticity, angle, peak))
    return Catalogue(torch.tensor([[[row, column]]], dtype=torch.float64), *values)


def smallest_distance(centres: torch.Tensor) -> torch.Tensor:
    """Smallest distance between two centres of each image: (n,)."""
    distance = torch.cdist(centres, centres)
    distance.diagonal(dim1=1, dim2=2).fill_(math.inf)
    return distance.amin((1, 2))


# Sources


@given(
    major=st.floats(1.5, 5.0),
    ellipticity=st.floats(0.0, 0.5),
    angle=st.floats(0.0, math.pi),
    peak=st.floats(0.5, 20.0),
    row=st.integers(40, 60),
    column=st.integers(40, 60),
)
def test_a_source_is_the_gaussian_of_the_closed_form(major, ellipticity, angle, peak, row, column):
    """Peak, sum 2π s_a s_b A, centroid and covariance R diag(s_a², s_b²) Rᵀ with s = √(2 ln 2) a."""
    catalogue = one_source(row, column, major, ellipticity, angle, peak)
    image = render(catalogue, 101)[0, 0].numpy()
    assert image[row, column] == image.max() == pytest.approx(peak, rel=1e-12)
    s_a = math.sqrt(2 * math.log(2)) * major
    s_b = s_a * math.sqrt((1 - ellipticity) / (1 + ellipticity))
    assert catalogue.minor.item() == pytest.approx(s_b / 1.17741, rel=1e-5)
    assert image.sum() == pytest.approx(2 * math.pi * s_a * s_b * peak, rel=1e-3)
    y, x = np.mgrid[:101, :101]
    weights = image / image.sum()
    assert (weights * y).sum() == pytest.approx(row, abs=1e-2)
    assert (weights * x).sum() == pytest.approx(column, abs=1e-2)
    along = np.array([math.cos(angle), math.sin(angle)])  # of (x, y)
    across = np.array([-along[1], along[0]])
    offsets = np.stack([x - column, y - row])
    measured = np.einsum("ihw,jhw,hw->ij", offsets, offsets, weights)
    expected = s_a**2 * np.outer(along, along) + s_b**2 * np.outer(across, across)
    np.testing.assert_allclose(measured, expected, atol=0.01 * s_a**2)


def test_half_the_peak_is_reached_at_2_ln_2_semi_axes():
    """exp(−r²/(4 ln 2 a²)) = 1/2 at r = 2 ln 2 · a."""
    a = 20 / (2 * math.log(2))  # so that the half maximum lies on a pixel
    row = render(one_source(50, 50, a, 0.0, 0.0, 6.0), 101)[0, 0, 50]
    assert row[70].item() == row[30].item() == pytest.approx(3.0, rel=1e-12)
    narrow = render(one_source(50, 50, a, 0.6, 0.0, 6.0), 101)[0, 0]  # minor axis a √(0.4/1.6) = a/2, along the rows
    assert narrow[50, 70].item() == narrow[60, 50].item() == pytest.approx(3.0, rel=1e-12)


def test_sources_add_up():
    catalogue = draw_catalogue(3, count=5, size=40, peaks=(3.0, 10.0), separation=5.0, rng=rng())
    columns = (catalogue.major, catalogue.ellipticity, catalogue.angle, catalogue.peak)
    one_by_one = [
        render(Catalogue(catalogue.centres[:, k : k + 1], *(column[:, k : k + 1] for column in columns)), 40)
        for k in range(5)
    ]
    torch.testing.assert_close(render(catalogue, 40), torch.stack(one_by_one).sum(0))


# Catalogues


def test_sizes_ellipticities_angles_and_peaks_follow_their_distributions():
    catalogue = draw_catalogue(1000, count=8, size=128, peaks=(3.4, 10.0), separation=5.0, rng=rng(1))
    gamma = stats.gamma(1.6, scale=0.5 / 0.25)
    beyond = gamma.sf(1.0)

    def above_one_pixel(a: np.ndarray) -> np.ndarray:
        return np.where(a < 1, 0.0, 1 - gamma.sf(a) / beyond)

    drawn = {
        "major": (catalogue.major, above_one_pixel),
        "ellipticity": (catalogue.ellipticity, stats.beta(1.7, 4.5).cdf),
        "angle": (catalogue.angle, stats.uniform(0, math.pi).cdf),
        "peak": (catalogue.peak, stats.uniform(3.4, 6.6).cdf),
    }
    for name, (values, cdf) in drawn.items():
        assert values.shape == (1000, 8)
        assert stats.kstest(values.flatten().numpy(), cdf).pvalue > 1e-3, name
    assert catalogue.major.min() >= 1
    assert stats.kstest(catalogue.major.flatten().numpy(), gamma.cdf).pvalue < 1e-6  # the cut shows
    pairs = np.corrcoef([values.flatten().numpy() for values, _ in drawn.values()])
    assert np.abs(pairs - np.eye(4)).max() < 0.05


def test_centres_are_spread_over_all_pixels():
    centres = draw_catalogue(4000, count=2, size=16, peaks=(3, 4), separation=3.0, rng=rng(2)).centres
    assert torch.equal(centres, centres.round())
    first = np.ravel_multi_index(centres[:, 0].long().numpy().T, (16, 16))
    assert stats.chisquare(np.bincount(first, minlength=256)).pvalue > 0.01
    # The second is uniform over what the first leaves free, so near the first it is missing and nowhere else.
    offset = (centres[:, 1] - centres[:, 0]).square().sum(-1)
    assert offset.min() == 9
    near = ((offset >= 9) & (offset < 16)).double().mean().item()
    pixels = torch.cartesian_prod(torch.arange(16), torch.arange(16)).double()
    squared = torch.cdist(pixels, pixels).square().round()
    allowed = squared >= 9
    expected = ((allowed & (squared < 16)).sum(1) / allowed.sum(1)).mean().item()
    assert near == pytest.approx(expected, abs=4 * math.sqrt(expected / 4000))


@given(count=st.integers(1, 12), size=st.integers(24, 64), separation=st.sampled_from([0.0, 1.0, 2.5, 5.0, 6.3]))
def test_every_image_has_the_number_and_the_separation_asked_for(count, size, separation):
    if (count - 1) * math.pi * (separation + 1) ** 2 > size**2:
        return
    centres = draw_catalogue(50, count=count, size=size, peaks=(3, 4), separation=separation, rng=rng(count)).centres
    assert centres.shape == (50, count, 2)
    assert 0 <= centres.min() <= centres.max() <= size - 1
    assert smallest_distance(centres).min() >= separation


def test_the_tightest_catalogue_that_is_allowed_is_drawn_and_the_next_refused():
    # 9 pixels are closer than 2 px to a centre, so 8 centres cover at most 72 of 81 pixels.
    tight = draw_catalogue(200, count=9, size=9, peaks=(3, 4), separation=2.0, rng=rng())
    assert smallest_distance(tight.centres).min() >= 2
    with pytest.raises(UsageError, match=r"10 sources at least 2 px apart need not fit into 9×9 pixels.* from 1 to 9"):
        draw_catalogue(1, count=10, size=9, peaks=(3, 4), separation=2.0, rng=rng())
    with pytest.raises(UsageError, match="from 1 to 238"):
        draw_catalogue(1, count=0, size=128, peaks=(3, 4), separation=5.0, rng=rng())


def test_the_same_generator_gives_the_same_catalogue():
    a, b, c = (draw_catalogue(4, count=3, size=32, peaks=(3, 4), separation=5.0, rng=rng(seed)) for seed in (0, 0, 1))
    for name in ("centres", "major", "ellipticity", "angle", "peak"):
        assert torch.equal(getattr(a, name), getattr(b, name))
        assert not torch.equal(getattr(a, name), getattr(c, name))


# The sky


def test_the_sky_is_white_noise_filtered_without_borders():
    """Against SciPy's Gaussian filter, away from the border that SciPy has and we do not."""
    sky = background(2, 50, scale=3.0, blur=2.0, rng=rng(5))
    white = torch.randn(2, 1, 66, 66, generator=rng(5), dtype=torch.float64).numpy()
    expected = 3.0 * ndimage.gaussian_filter(white, (0, 0, 2.0, 2.0), truncate=4.0)[..., 8:-8, 8:-8]
    np.testing.assert_allclose(sky.numpy(), expected, atol=1e-12)


def test_the_skys_variance_is_the_same_everywhere_and_known():
    assert background_variance(8.5, 4.0) == pytest.approx(8.5**2 / (4 * math.pi * 4.0**2), rel=2e-3)
    sky = background(4000, 24, scale=8.5, blur=4.0, rng=rng(3))
    variance = sky.square().mean(0)[0]
    assert variance.mean().item() == pytest.approx(background_variance(8.5, 4.0), rel=0.02)
    for part in (variance[0], variance[-1], variance[:, 0], variance[10:14, 10:14]):
        assert part.mean().item() == pytest.approx(background_variance(8.5, 4.0), rel=0.06)
    # Two pixels at distance d have the correlation exp(−d²/4σ²), also across the whole image.
    for d in (4, 8, 23):
        measured = (sky[..., 0] * sky[..., d]).mean().item() / variance.mean().item()
        assert measured == pytest.approx(math.exp(-(d**2) / 64), abs=0.04)


def test_the_kernel_adds_up_to_one_and_needs_a_width():
    assert blur_kernel(4.0).shape == (33,)
    assert blur_kernel(0.7).sum().item() == pytest.approx(1, abs=1e-12)
    for blur in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="positive width"):
            blur_kernel(blur)
