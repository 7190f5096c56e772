"""Figures of comparisons: the numbers that go in are the numbers that are drawn."""

import io

import numpy as np
import pytest
from PIL import Image

from namm.errors import DataError
from namm.report.figures.base import DATA_COLOUR, OTHER_COLOUR, OURS_COLOUR, png
from namm.report.figures.studies import (
    Curve,
    Scored,
    Variant,
    ablation_figure,
    efficiency_figure,
    fixed_noise_figure,
    forward_maps_figure,
    sensitivity_figure,
    training_figure,
)

RNG = np.random.default_rng(0)
SECONDS, MEAN, STD = np.array([10.0, 20.0, 30.0]), np.array([0.3, 0.2, 0.1]), np.array([0.1, 0.5, 0.01])


def histograms(figure):
    return [axes for axes in figure.axes if axes.get_ylabel() == "samples"]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def variant(name, scale=1.0):
    return Variant(name, scale * RNG.normal(size=(1, 5, 4)), scale * np.exp(RNG.normal(size=40)))


def drawable(draw):
    image = Image.open(io.BytesIO(png(draw, "dark", dpi=50)))
    return len(np.unique(np.asarray(image)[..., :3])) > 1


# Fig. 4


def test_curves_are_drawn_where_they_are_with_bars_that_stay_above_zero():
    (axes,) = efficiency_figure([Curve("ours", SECONDS, MEAN, STD, OURS_COLOUR)], floor=1e-7).axes
    line = axes.lines[0]
    np.testing.assert_array_equal(line.get_xdata(), SECONDS)
    np.testing.assert_array_equal(line.get_ydata(), MEAN)
    assert axes.get_yscale() == "log"
    ends = np.array(axes.collections[0].get_segments())[:, :, 1]
    np.testing.assert_allclose(ends[:, 1], MEAN + STD)
    np.testing.assert_allclose(ends[:, 0], [0.2, 0.02, 0.09])  # 0.2 − 0.5 would be below zero
    assert sorted(legend(axes)) == ["data: mean 1.0·10⁻⁷", "ours: 0.10"]


def test_a_single_point_and_a_distance_of_zero_are_curves_too():
    zero = Curve("projected", np.array([5.0]), np.array([0.0]), np.array([0.0]), OTHER_COLOUR)
    (axes,) = efficiency_figure([zero]).axes
    assert axes.get_yscale() == "linear"
    assert drawable(lambda: efficiency_figure([zero]))


def test_a_curve_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="the curve of ours: the value at"):
        efficiency_figure([Curve("ours", SECONDS, MEAN * np.nan, STD, OURS_COLOUR)])


# Figs. 6, 7 and 10


def test_each_setting_shows_its_mirror_images_in_their_own_colours_and_its_distances():
    studies = {"σ_max": [variant("0.1"), variant("0.5", 9.0)], "λ": [variant("1"), variant("10"), variant("100")]}
    figure = sensitivity_figure(studies)
    shown = [image for axes in figure.axes for image in axes.get_images()]
    flat = [v for study in studies.values() for v in study]
    assert len(shown) == len(flat)
    for image, each in zip(shown, flat, strict=True):
        np.testing.assert_array_equal(image.get_array(), each.mirror_image[0])
        assert image.get_clim()[1] <= each.mirror_image.max()
    below = histograms(figure)
    assert [len(legend(axes)) for axes in below] == [2, 3]
    assert [sum(patch.get_height() for patch in axes.patches) for axes in below] == [80, 120]


def test_forward_maps_stand_beside_the_image_and_the_baseline_in_the_histogram():
    x, maps = RNG.random((1, 5, 4)), [variant("ICNN", 0.1), variant("ResNet")]
    figure = forward_maps_figure(x, maps, baseline=np.full(7, 3.0))
    titles = [axes.get_title() for axes in figure.axes if axes.get_images()]
    assert titles == ["data x", "ICNN", "ResNet"]
    (below,) = histograms(figure)
    assert [label.split(":")[0] for label in legend(below)] == ["ICNN", "ResNet", "baseline"]
    colours = {patch.get_facecolor()[:3] for patch in below.patches}
    assert len(colours) == 3
    assert len(legend(histograms(forward_maps_figure(x, maps))[0])) == 2


def test_fixed_noise_is_compared_before_and_after():
    a, b = np.full(10, 0.1), np.full(20, 0.2)
    figure = fixed_noise_figure({"before": (a, b), "after": (a / 2, b)})
    assert [sum(patch.get_height() for patch in axes.patches) for axes in histograms(figure)] == [30, 30]
    assert legend(histograms(figure)[1]) == ["σ ~ U(0, σ_max): mean 0.050", "σ = σ_max: mean 0.20"]


def test_the_legends_of_fixed_noise_are_inside_the_figure():
    figure = fixed_noise_figure({"before": (np.full(9, 0.123), np.full(9, 0.0012))})
    figure.canvas.draw()
    box, page = histograms(figure)[0].get_legend().get_window_extent(), figure.bbox
    assert 0 <= box.x0 < box.x1 <= page.x1
    assert box.y1 <= page.y1


def test_constant_mirror_images_and_equal_distances_can_be_drawn():
    flat = Variant("flat", np.full((1, 4, 4), 2.0), np.full(9, 0.5))
    assert drawable(lambda: sensitivity_figure({"σ_max": [flat, flat]}))
    assert drawable(lambda: forward_maps_figure(np.zeros((1, 4, 4)), [flat]))
    assert drawable(lambda: fixed_noise_figure({"before": (np.zeros(3), np.zeros(3))}))


def test_a_mirror_image_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="the image of broken"):
        sensitivity_figure({"λ": [Variant("broken", np.full((1, 2, 2), np.nan), np.ones(3))]})


# Tab. 2


def test_an_ablation_is_drawn_at_its_values_with_kid_only_where_all_have_it():
    study = [Scored(0.1, (1.0, 0.2), (0.3, 0.01)), Scored(0.5, (2.0, 0.3), (0.2, 0.02))]
    figure = ablation_figure({"σ_max": study, "shift": [Scored(-1.0, (1.0, 0.1), (0.1, 0.1))]})
    assert len(figure.axes) == 4
    top = figure.axes[0]
    np.testing.assert_array_equal(top.lines[0].get_xydata(), [(0.1, 1.0), (0.5, 2.0)])
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "linear"] * 2
    with_kid = [Scored(0.1, (1.0, 0.2), (0.3, 0.01), (0.01, 0.001))]
    assert [axes.get_ylabel() for axes in ablation_figure({"λ": with_kid}).axes] == ["CD", "√MMD²", "KID"]
    assert len(ablation_figure({"λ": [*with_kid, *study]}).axes) == 2


# Trainings


def test_losses_are_those_of_the_log():
    lines = [
        {"step": 10, "loss": 3.0},
        {"step": 20, "loss": 2.0, "val/loss": 2.5, "val/constraint": 0.1},
        {"step": 30, "loss": float("nan"), "val/loss": 1.5},
    ]
    figure = training_figure({"map": lines, "model": [{"step": 1, "loss": -1.0}], "vae": [{"step": 1}]})
    first, second, third, rest = figure.axes
    drawn = {line.get_color(): line.get_xydata().tolist() for line in first.lines}
    assert drawn == {DATA_COLOUR: [[10, 3], [20, 2]], OTHER_COLOUR: [[20, 2.5], [30, 1.5]], OURS_COLOUR: [[20, 0.1]]}
    assert (first.get_yscale(), second.get_yscale()) == ("log", "linear")  # a negative loss has no logarithm
    assert not third.lines
    assert not rest.axison
    assert drawable(lambda: training_figure({"map": lines}))
