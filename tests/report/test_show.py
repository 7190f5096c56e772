"""`namm.show` draws the images, the rule's residual and ℓ, and refuses what cannot be drawn."""

import io
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import namm
from namm.errors import DataError, UsageError
from namm.report.figures import View

RNG = torch.Generator().manual_seed(0)
HEIGHT, WIDTH = 5, 20  # a gap between pictures is one pixel wide


def draw(n, channels=1):
    return torch.randn(n, channels, HEIGHT, WIDTH, generator=RNG)


@namm.constraint(residual=lambda x: x.sum(1, keepdim=True))
def neutral(x):
    return x.sum(1).abs().mean((1, 2))


def tiles(figure, columns):
    """What is drawn, axes by axes, colour bars left out: pictures (columns, H, W), NaN where none is."""
    found = []
    for axes in figure.axes:
        for shown in axes.get_images():
            values = np.ma.filled(shown.get_array().astype(float), np.nan)
            assert values.shape[:2] == (HEIGHT, columns * (WIDTH + 1) - 1)
            found.append(np.stack([values[:, k * (WIDTH + 1) :][:, :WIDTH] for k in range(columns)]))
    return found


def captions(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def bars(figure):
    return [axes.get_ylabel() for axes in figure.axes if not axes.get_images()]


def test_one_channel_is_drawn_as_it_is_row_after_row():
    x = draw(5)
    first, second = tiles(namm.show(x, columns=3), 3)
    np.testing.assert_array_equal(first, x[:3, 0])
    np.testing.assert_array_equal(second[:2], x[3:, 0])
    assert np.isnan(second[2]).all()


def test_residual_and_distance_are_the_rules_own():
    x = draw(3, 2)
    figure = namm.show({"few": x[:1], "more": x}, neutral)
    drawn = tiles(figure, 3)
    for channel in range(2):
        np.testing.assert_array_equal(drawn[2 * channel][0], x[0, channel])
        np.testing.assert_array_equal(drawn[2 * channel + 1], x[:, channel])
    residual = x.double().sum(1).numpy()
    np.testing.assert_allclose(drawn[4][0], residual[0], atol=1e-6)
    np.testing.assert_allclose(drawn[5], residual, atol=1e-6)
    distances = [float(text.removeprefix("ℓ ")) for text in captions(figure)]
    expected = np.abs(residual).mean((1, 2))
    np.testing.assert_allclose(distances, [expected[0], *expected], rtol=0.06)  # two digits
    assert [axes.get_ylabel() for axes in figure.axes if axes.get_images()] == ["few", "more"] * 3
    assert bars(figure) == ["channel 0", "channel 1", "residual"]


def test_sets_share_one_scale_and_the_residual_is_signed():
    x = draw(2)
    figure = namm.show({"small": x, "large": 10 * x}, namm.constraint(lambda x: x.abs().mean((1, 2, 3)), residual=abs))
    values, residuals = np.array([axes.get_images()[0].get_clim() for axes in figure.axes[:4]]).reshape(2, 2, 2)
    assert (values[0] == values[1]).all()
    assert values[0, 1] > 5 * x.max()
    assert (residuals[:, 0] == -residuals[:, 1]).all()


def test_three_channels_are_colours():
    x = draw(2, 3).sigmoid()
    (drawn,) = tiles(namm.show(x), 2)
    np.testing.assert_allclose(drawn[..., :3], x.permute(0, 2, 3, 1), atol=1e-6)
    assert (drawn[..., 3] == 1).all()
    wide = torch.linspace(-100, 100, 2 * 3 * HEIGHT * WIDTH).reshape(2, 3, HEIGHT, WIDTH)
    figure = namm.show(wide)
    (drawn,) = tiles(figure, 2)
    inner = (drawn[..., :3] > 0) & (drawn[..., :3] < 1)
    line = np.polyfit(wide.permute(0, 2, 3, 1).numpy()[inner], drawn[..., :3][inner], 1)
    np.testing.assert_allclose(line, [1 / 198, 0.5], rtol=0.01)  # half a per cent is clipped at either end
    assert figure.axes[0].get_xlabel() == "red, green, blue: -99 to 99"


def test_what_a_view_makes_is_drawn_instead():
    x = draw(2, 2)
    (drawn,) = tiles(namm.show(x, view=lambda images: images[:, 0] - images[:, 1]), 2)
    np.testing.assert_array_equal(drawn, x[:, 0] - x[:, 1])
    assert bars(namm.show(x, view=View(lambda images: images[:, 0], "pressure"))) == ["pressure"]
    with pytest.raises(DataError, match="a view must make pictures"):
        namm.show(x, view=lambda images: images)


def test_flows_are_shown_by_their_vorticity():
    n = 20
    along = torch.sin(2 * torch.pi * torch.arange(n) / n)  # u(y): the rotation is −∂u/∂y
    flow = torch.stack([along.expand(n, n), torch.zeros(n, n)])[None]
    figure = namm.show(flow, namm.DivergenceFree(n))
    drawn = figure.axes[0].get_images()[0].get_array()
    h = 2 * np.pi / n
    expected = -np.cos(2 * np.pi * (np.arange(n) + 0.5) / n) * 2 * np.sin(h / 2) / h
    np.testing.assert_allclose(drawn, np.broadcast_to(expected, (n, n)), atol=1e-5)
    assert bars(figure)[0].startswith("vorticity")


def test_a_residual_that_is_no_picture_is_left_out():
    total = namm.constraint(lambda x: x.sum((1, 2, 3)).abs(), residual=lambda x: x.sum((1, 2, 3))[:, None])
    assert len(tiles(namm.show(draw(2), total), 2)) == 1


def test_arrays_and_tensors_that_are_trained_are_drawn_alike():
    x = draw(2)
    for each in (x.numpy(), x.double().requires_grad_(), (255 * x.sigmoid()).byte(), x[:, :, :, :] > 0):
        (drawn,) = tiles(namm.show(each, lambda x: x.square().mean((1, 2, 3))), 2)
        values = each.detach().numpy() if isinstance(each, torch.Tensor) else each
        np.testing.assert_allclose(drawn, values[:, 0] / (255 if values.dtype == np.uint8 else 1), rtol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_images_on_a_gpu_are_drawn():
    x = draw(2)
    np.testing.assert_array_equal(tiles(namm.show(x.cuda(), neutral), 2)[0], x[:, 0])


def test_the_figure_displays_itself_and_is_saved(tmp_path):
    figure = namm.show(draw(2))
    figure.savefig(tmp_path / "images.png")
    with Image.open(io.BytesIO(figure._repr_png_())) as shown, Image.open(tmp_path / "images.png") as saved:
        assert shown.size == saved.size
        difference = np.abs(np.asarray(shown, float) - np.asarray(saved, float))
        assert difference.mean() < 2  # letters may move by part of a pixel when a figure is laid out again


@pytest.mark.parametrize(
    ("images", "options", "sentence"),
    [
        (torch.full((1, 1, 4, 4), torch.nan), {}, "the images: the value at [0, 0, 0, 0] is nan"),
        ({"ours": draw(1), "theirs": draw(2) / 0}, {}, "the images 'theirs': the value at [0, 0, 0, 0] is"),
        (draw(1)[0], {}, "the images must have four axes (N, C, H, W); this has shape (1, 5, 20)"),
        (draw(201), {}, "the images are 201, and at most 200 are drawn"),
        ({"a": draw(1), "b": draw(1, 2)}, {}, "the images 'b' are (2, 5, 20) and others (1, 5, 20)"),
        ({}, {}, "there is nothing to show"),
        (draw(0), {}, "the images is empty"),
        (draw(1), {"columns": 0}, "columns must be a whole number of at least 1, not 0"),
        (draw(1), {"rule": 3}, "a rule must be a namm.Constraint or a function"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(images, options, sentence):
    with pytest.raises((DataError, UsageError), match=re.escape(sentence)):
        namm.show(images, **options)


def test_namm_alone_does_not_load_matplotlib():
    code = "import sys, namm; namm.TotalFlux; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
