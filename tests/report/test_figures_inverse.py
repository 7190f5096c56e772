"""Figures of posterior samples: what is drawn, on which scale, and what cannot be."""

import numpy as np
import pytest

from namm.errors import DataError
from namm.report.figures import View
from namm.report.figures.inverse import Reconstruction, Tried, assimilation_figure, colours, guidance_figure

RNG = np.random.default_rng(0)


def pictures(figure):
    """(values, map, limits) of every picture, colour bars left out."""
    return [
        (shown.get_array(), shown.get_cmap().name, shown.get_clim())
        for axes in figure.axes
        for shown in axes.get_images()
    ]


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def made(name, n=5, scale=1.0, shape=(1, 6, 5), residuals=True):
    return Reconstruction(
        name,
        RNG.random((n, *shape)),
        scale * np.exp(RNG.normal(size=40)),
        scale,
        scale * RNG.normal(size=(n, 1, shape[1], shape[2] - 1)) if residuals else None,
    )


def test_truth_means_samples_spreads_and_residuals():
    truth, observed = RNG.random((1, 6, 5)), np.full((1, 6, 5), np.nan)
    observed[..., :2] = 0.5
    ours, baseline = made("mirror DPS", scale=0.1), made("DPS")
    figure = assimilation_figure(truth, observed, [ours, baseline], floor=1e-7)
    top, first, second, spreads, residuals = pictures(figure)
    assert [row[1] for row in (top, first, second, spreads, residuals)] == ["viridis"] * 4 + ["RdBu_r"]
    assert top[2] == first[2] == second[2]
    np.testing.assert_array_equal(top[0][:, :5], truth[0])
    seen = np.ma.filled(np.ma.masked_invalid(top[0][:, 6:11]), -1)
    np.testing.assert_array_equal(seen[:, :2], 0.5)
    assert (seen[:, 2:] == -1).all()  # what was not observed has no colour
    np.testing.assert_allclose(first[0][:, :5], ours.samples[:, 0].mean(0))
    np.testing.assert_array_equal(first[0][:, 6:11], ours.samples[0, 0])
    np.testing.assert_allclose(spreads[0][:, :5], ours.samples[:, 0].std(0, ddof=1))
    np.testing.assert_allclose(spreads[0][:, 6:], baseline.samples[:, 0].std(0, ddof=1))
    assert spreads[2][0] == 0
    assert residuals[2][0] == -residuals[2][1]
    np.testing.assert_array_equal(residuals[0][:, :4], ours.residuals[0, 0])
    assert {"truth", "observed", "mean", "sample", "mirror DPS\nℓ 0.10", "DPS\nℓ 1.0"} <= set(texts(figure))
    (axes,) = (axes for axes in figure.axes if axes.get_xlabel().startswith("constraint"))
    assert sum(patch.get_height() for patch in axes.patches) == 80


def test_a_view_shows_the_spread_of_what_is_seen():
    view = View(lambda x: x[:, 0] - x[:, 1], "difference", signed=True)
    method = made("DPS", shape=(2, 3, 8), residuals=False)  # wide images: two in a row
    figure = assimilation_figure(RNG.random((2, 3, 8)), None, [method], view=view)
    top, row, spread = pictures(figure)
    seen = method.samples[:, 0] - method.samples[:, 1]
    assert row[0].shape[1] == 2 * 8 + 1
    np.testing.assert_allclose(row[0][:, :8], seen.mean(0))
    np.testing.assert_allclose(spread[0], seen.std(0, ddof=1))
    assert top[1] == "RdBu_r"
    assert "observed" not in texts(figure)


def test_what_is_not_finite_is_refused_by_name():
    broken = made("CG-DPS-200")
    broken.samples[1] = np.nan
    with pytest.raises(DataError, match="samples of CG-DPS-200"):
        assimilation_figure(RNG.random((1, 6, 5)), None, [broken])


def test_a_picture_for_every_setting_and_its_curves():
    names, zetas = ("mirror DPS", "DPS", "CG-DPS-50", "CG-DPS-200"), (0.05, 0.1)
    tried = [
        Tried(name, zeta, (k + 1) * zeta, 1 / zeta, zeta**2, RNG.normal(size=(1, 4, 4)))
        for k, name in enumerate(names)
        for zeta in zetas
    ]
    tried.append(Tried("DPS", 0.2, np.nan, np.nan, np.nan))  # failed: no picture and no point
    figure = guidance_figure(tried)
    rows = pictures(figure)
    assert len(rows) == 4
    assert len({row[2] for row in rows}) == 1
    np.testing.assert_array_equal(rows[1][0][:, 5:9], tried[3].image[0])
    assert "ζ 0.05\nℓ 0.050" in texts(figure)
    assert "ℓ 0.40" in texts(figure)
    curves = [axes for axes in figure.axes if axes.get_ylabel() in ("ℓ", "χ² per value", "error")]
    assert len(curves) == 3
    for axes, values in zip(curves, ([0.1, 0.2], [20, 10], [0.0025, 0.01]), strict=True):
        line = next(line for line in axes.get_lines() if line.get_label() == "DPS")
        np.testing.assert_allclose(line.get_ydata(), values)
    assert len({tuple(colour) for colour in colours(names).values()}) == 4


def test_without_pictures_there_are_curves_alone():
    assert pictures(guidance_figure([Tried("DPS", 0.1, 1.0, 1.0, 1.0), Tried("DPS", 0.2, 2.0, 0.5, 1.0)])) == []
    with pytest.raises(DataError, match="no setting was tried"):
        guidance_figure([])
