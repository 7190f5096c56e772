"""What the page's script is given: values to three digits, each picture once, and no more than there is room for."""

import base64
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from namm.report import panels
from namm.report.contents import Contents
from namm.report.figures.base import VALUES
from namm.report.figures.samples import Method, MirrorSpace
from namm.report.panels import encoded, page_data

RNG = np.random.default_rng(0)


def decoded(stored):
    """The values, by Python's own reading of halves."""
    content = base64.b64decode(stored["halves"])
    halves = struct.unpack(f"<{len(content) // 2}e", content)
    return np.array(halves).reshape(stored["height"], stored["width"]) * stored["scale"]


def method(name, k=2, shape=(1, 4, 5)):
    images = RNG.normal(size=(k, *shape)).astype(np.float32)
    return Method(name, images, np.ones(k), np.ones(9), 1e-9 * RNG.normal(size=(k, 1, *shape[1:])))


@pytest.fixture
def contents():
    ours, space = method("ours"), map(method, ("x", "g(x)", "ŷ"))
    made = Method("f(ŷ)", ours.images, ours.shown_distances, ours.distances, ours.residuals)
    grids = {"data": RNG.normal(size=(9, 1, 4, 5)), "ours": np.concatenate([ours.images, method("more", 7).images])}
    return Contents(
        *("a", "b", "c", "d"), methods=[ours, method("baseline")], mirror=MirrorSpace(*space, made), grids=grids
    )


@given(arrays(np.float32, (3, 4), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_every_value_is_right_to_three_digits(picture):
    largest = np.abs(picture).max()
    np.testing.assert_allclose(decoded(encoded(picture)), picture, rtol=5e-4, atol=1e-12 * largest)


def test_panels_hold_the_pictures_of_the_still_figures(contents):
    data = page_data(contents)
    assert set(data["panels"]) == {"samples", "mirror", "grids"}
    image, residual = data["panels"]["samples"]
    for block, values in ((image, "images"), (residual, "residuals")):
        for row, each in zip(block["rows"], contents.methods, strict=True):
            found = [decoded(data["pictures"][k]) for k in row["pictures"]]
            np.testing.assert_allclose(found, getattr(each, values)[:, 0], rtol=5e-4)
    assert residual["signed"]
    assert [row["name"] for block in data["panels"]["mirror"] for row in block["rows"][:2]] == [
        *("x", "f(ŷ)"),
        *("g(x)", "ŷ"),
        *("x", "f(ŷ)"),
    ]
    colours = np.frombuffer(base64.b64decode(data["colours"]["values"]), np.uint8).reshape(256, 3)
    assert colours[0].tolist() == [68, 1, 84]  # viridis begins so
    assert VALUES == "viridis"
    json.dumps(data, allow_nan=False)


def test_a_picture_that_several_figures_show_is_stored_once(contents):
    data = page_data(contents)
    shown = [
        k for blocks in data["panels"].values() for block in blocks for row in block["rows"] for k in row["pictures"]
    ]
    ours = data["panels"]["samples"][0]["rows"][0]["pictures"]
    assert data["panels"]["mirror"][0]["rows"][1]["pictures"] == ours
    assert data["panels"]["grids"][0]["rows"][1]["pictures"][:2] == ours
    assert len(data["pictures"]) == len(set(shown)) == len(shown) - 6  # images and residuals of f(ŷ), two of the grid


def test_of_large_pictures_there_are_fewer_and_then_none(contents, monkeypatch):
    def sizes():
        found = page_data(contents)["panels"]
        return {name: [len(row["pictures"]) for row in blocks[0]["rows"]] for name, blocks in found.items()}

    assert sizes() == {"samples": [2, 2], "mirror": [2, 2], "grids": [9, 9]}
    monkeypatch.setattr(panels, "ROOM", 160)  # 20 values to a picture
    assert sizes() == {"samples": [2, 2], "grids": [4, 4]}
    monkeypatch.setattr(panels, "ROOM", 39)
    assert sizes() == {}
