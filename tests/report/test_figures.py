"""The figure of the worst image: what is drawn, with which colours."""

import numpy as np
import pytest

from namm.errors import RunFolderError
from namm.report.figures import save, worst_residual_figure

IMAGE = np.random.default_rng(0).random((2, 6, 5))


def pictures(figure):
    """(values, map, limits) of every panel."""
    return [
        (np.asarray(shown.get_array()), shown.get_cmap().name, shown.get_clim())
        for axes in figure.axes
        for shown in axes.get_images()
    ]


def test_each_channel_beside_its_residual():
    residual = np.stack([IMAGE[0] - 0.5, 0.1 * IMAGE[1]])
    panels = pictures(worst_residual_figure(IMAGE, residual, "title"))
    assert [panel[1] for panel in panels] == ["viridis", "RdBu_r"] * 2
    for k in range(2):
        np.testing.assert_array_equal(panels[2 * k][0], IMAGE[k])
        np.testing.assert_array_equal(panels[2 * k + 1][0], residual[k])
    largest = np.abs(residual).max()
    assert {panel[2] for panel in panels[1::2]} == {(-largest, largest)}  # one scale for all, zero in the middle


def test_a_residual_of_one_number_is_a_constant_picture():
    panels = pictures(worst_residual_figure(IMAGE[:1], np.full((1, 1, 1), -3.0), "title"))
    assert panels[1][0].shape == (6, 5)
    assert (panels[1][0] == -3).all()
    assert panels[1][2] == (-3, 3)


@pytest.mark.parametrize("residual", [None, np.zeros(7)])
def test_without_a_picture_of_the_residual_the_image_stands_alone(residual):
    assert len(pictures(worst_residual_figure(IMAGE, residual, "title"))) == 2


def test_a_residual_of_zeros_can_be_drawn(tmp_path):
    figure = worst_residual_figure(IMAGE, np.zeros((1, 6, 4)), "title")
    assert len(pictures(figure)) == 3
    save(figure, tmp_path / "deep" / "a.png")
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    figure = worst_residual_figure(IMAGE, None, "title")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.png", tmp_path / "a.nonsense"):
        with pytest.raises(RunFolderError, match="cannot be written"):
            save(figure, path)
