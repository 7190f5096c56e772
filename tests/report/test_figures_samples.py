"""Figures of samples: what is drawn, on which scale, and what cannot be."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from namm.errors import DataError
from namm.formatting import format_number
from namm.report.figures.base import INK, View, limits, look, mosaic, plain_ticks, png
from namm.report.figures.samples import Method, grids_figure, samples_figure

RNG = np.random.default_rng(0)


def method(name, scale=1.0, residuals=True, shape=(1, 6, 5)):
    return Method(
        name,
        RNG.random((3, *shape)),
        np.array([0.1, 0.2, 0.3]) * scale,
        scale * np.exp(RNG.normal(size=50)),
        scale * RNG.normal(size=(3, 1, *shape[1:])) if residuals else None,
    )


def pictures(figure):
    """(values, map, limits) of every picture, colour bars left out."""
    return [
        (shown.get_array(), shown.get_cmap().name, shown.get_clim())
        for axes in figure.axes
        for shown in axes.get_images()
    ]


def histogram(figure):
    (axes,) = (axes for axes in figure.axes if axes.get_xlabel().startswith("constraint"))
    return axes


# Fig. 3


def test_samples_stand_above_residuals_on_common_scales():
    ours, baseline = method("ours", 0.1), method("baseline")
    rows = pictures(samples_figure([ours, baseline]))
    assert [row[1] for row in rows] == ["viridis"] * 2 + ["RdBu_r"] * 2
    assert rows[0][2] == rows[1][2]
    assert rows[2][2] == rows[3][2]
    assert rows[2][2][0] == -rows[2][2][1]
    np.testing.assert_array_equal(rows[0][0][:, :5], ours.images[0, 0])
    np.testing.assert_array_equal(rows[3][0][:, -5:], baseline.residuals[2, 0])


def test_residuals_stand_below_their_samples_whatever_their_scales():
    ours, baseline = method("ours", 1e-7), method("baseline", 1e3)
    figure = samples_figure([ours, baseline])
    figure.canvas.draw()
    places = [axes.get_position(original=True) for axes in figure.axes if axes.get_images()]
    assert len(places) == 4
    assert len({(round(place.x0, 6), round(place.x1, 6)) for place in places}) == 1


def test_every_sample_has_its_distance_and_the_histogram_all_of_them():
    ours, baseline = method("ours", 0.1), method("baseline")
    figure = samples_figure([ours, baseline], floor=4e-8)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["ℓ 0.010", "ℓ 0.020", "ℓ 0.030", "ℓ 0.10", "ℓ 0.20", "ℓ 0.30"]
    axes = histogram(figure)
    heights = sum(patch.get_height() for patch in axes.patches)
    assert heights == 100  # every sample is in a bin
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert f"ours: mean {format_number(ours.distances.mean(), '.2g')}" in labels
    assert "data: mean 4.0·10⁻⁸" in labels


def test_without_a_residual_of_both_methods_there_are_images_alone():
    assert len(pictures(samples_figure([method("a"), method("b", residuals=False)]))) == 2
    one_number = Method("c", RNG.random((2, 1, 4, 4)), np.ones(2), np.ones(3), np.array([[[[2.0]]], [[[-1.0]]]]))
    values, name, ends = pictures(samples_figure([one_number]))[1]
    assert name == "RdBu_r"
    assert ends == (-2, 2)
    assert (values[:, :4] == 2).all()
    assert (values[:, -4:] == -1).all()


def test_a_view_decides_what_is_seen_of_two_channels():
    view = View(lambda x: x[:, 0] - x[:, 1], "difference", signed=True)
    flow = method("a", shape=(2, 4, 8))
    values, name, (low, high) = pictures(samples_figure([flow], view=view, with_distances=False))[0]
    np.testing.assert_array_equal(values[:, :8], flow.images[0, 0] - flow.images[0, 1])
    assert name == "RdBu_r"
    assert low == -high


def test_a_residual_of_several_channels_is_their_size_with_the_sign_of_the_first():
    residual = np.array([[[[-3.0]], [[4.0]]]]) * np.ones((1, 2, 4, 4))
    one = Method("a", np.zeros((1, 1, 4, 4)), np.zeros(1), np.ones(2), residual)
    values, _, _ = pictures(samples_figure([one]))[1]
    np.testing.assert_allclose(values, -np.sqrt((9 + 16) / 2))


def test_a_distance_of_zero_is_counted_too():
    some = Method("a", np.ones((1, 1, 2, 2)), np.zeros(1), np.array([0.0, 0.0, 0.1, 2.0]))
    heights = [patch.get_height() for patch in histogram(samples_figure([some])).patches]
    assert sum(heights) == 4
    assert max(heights) == 3  # with the smallest that there is


@pytest.mark.parametrize("value", [0.0, -2.5, 1e-30, 7e8])
def test_constant_images_and_distances_can_be_drawn(value):
    constant = Method("a", np.full((2, 1, 4, 4), value), np.zeros(2), np.zeros(5), np.zeros((2, 1, 4, 3)))
    assert _coloured(png(lambda: samples_figure([constant, constant], floor=0.0), "light"))
    for _, _, (low, high) in pictures(samples_figure([constant])):
        assert low < high


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"images": np.full((2, 1, 3, 3), np.nan)}, r"samples of mine: the value at \[0, 0, 0, 0\] is nan"),
        ({"distances": np.array([1.0, np.inf])}, r"distances of mine: the value at \[1\] is inf"),
        ({"residuals": np.full((2, 1, 3, 3), -np.inf)}, r"residuals of mine: .* is -inf"),
        ({"distances": np.zeros(0)}, "distances of mine: there is nothing to show"),
    ],
)
def test_what_is_not_finite_is_refused_by_name(broken, message):
    good = {"images": np.ones((2, 1, 3, 3)), "shown_distances": np.ones(2), "distances": np.ones(4)}
    with pytest.raises(DataError, match=message):
        samples_figure([Method("mine", **{**good, **broken})])


def test_a_view_that_makes_no_pictures_is_refused():
    with pytest.raises(DataError, match=r"pictures \(N, H, W\); that of a made \(3, 1, 6, 5\)"):
        samples_figure([method("a")], view=View(lambda x: x))


# Fig. 9


def test_grids_show_nine_of_every_set_on_one_scale():
    sets = {"data": RNG.random((20, 1, 4, 6)), "ours": 3 * RNG.random((9, 1, 4, 6)), "dm": RNG.random((5, 1, 4, 6))}
    figure = grids_figure(sets)
    shown = pictures(figure)
    assert [axes.get_title() for axes in figure.axes if axes.get_images()] == list(sets)
    assert len({row[2] for row in shown}) == 1
    np.testing.assert_array_equal(shown[1][0][-4:, -6:], sets["ours"][8, 0])
    assert [row[0].count() for row in shown] == [9 * 24, 9 * 24, 5 * 24]  # pixels that are not gaps


def test_a_single_set_is_a_figure_too():
    assert len(pictures(grids_figure({"data": RNG.random((2, 1, 4, 4))}))) == 1
    with pytest.raises(DataError, match="data: the value at"):
        grids_figure({"data": np.full((1, 1, 2, 2), np.inf)})


# What figures are made of


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(1, 30))
def test_a_mosaic_holds_every_picture_and_nothing_else(n, columns, height, width):
    tiles = RNG.random((n, height, width))
    canvas = mosaic(tiles, columns)
    assert sorted(canvas.compressed()) == sorted(tiles.ravel())
    np.testing.assert_array_equal(canvas[:height, :width], tiles[0])


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=30), st.booleans())
def test_colour_scales_have_an_extent_and_are_symmetric_where_the_sign_counts(values, signed):
    low, high = limits(np.array(values), signed)
    assert low < high or max(map(abs, values)) > 1e15  # where ± 0.5 is below rounding
    assert not signed or low == -high


def test_a_few_wild_pixels_do_not_decide_the_scale():
    values = np.append(np.linspace(0, 1, 1000), 1e6)
    assert limits(values, signed=False)[1] < 1.1
    assert limits(np.append(np.zeros(1000), 5.0), signed=True) == (-5, 5)  # unless there is nothing else
    assert limits(np.append(np.zeros(1000), 5.0), signed=False) == (0, 5)


@pytest.mark.parametrize("high", [1.3, 30.0, 1e7])
def test_logarithmic_axes_have_plain_numbers(high):
    figure = samples_figure([Method("a", np.ones((1, 1, 2, 2)), np.ones(1), np.array([1.0, high]))])
    axes = histogram(figure)
    plain_ticks(axes.xaxis, 1.0, high)
    figure.canvas.draw()
    inside = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    assert 2 <= len(inside) <= 12
    assert not any("mathdefault" in label.get_text() for label in axes.get_xticklabels())


def test_both_themes_have_their_ink_on_a_transparent_ground():
    for theme, ink in INK.items():
        with look(theme):
            axes = histogram(samples_figure([method("a")]))
        assert axes.xaxis.label.get_color() == ink
        image = Image.open(io.BytesIO(png(lambda: samples_figure([method("a")]), theme)))
        assert image.getpixel((0, 0))[3] == 0
    assert histogram(samples_figure([method("a")])).xaxis.label.get_color() == "black"  # and nothing lasts


def _coloured(image: bytes) -> bool:
    """Whether a PNG shows more than one colour."""
    return len(np.unique(np.asarray(Image.open(io.BytesIO(image)))[..., :3])) > 1
