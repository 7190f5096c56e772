"""Coordinates of images: an experiment's pixels lie where its simulator puts them."""

import math

import numpy as np
import pytest
import torch

from namm.constraints import DivergenceFree
from namm.experiments.burgers import BurgersData
from namm.experiments.darcy import DarcyData
from namm.experiments.divergence import DivergenceData
from namm.experiments.engine.stages.report import view_of
from namm.experiments.presets import EXPERIMENTS, preset
from namm.report.coordinates import PIXELS, Axis


def places(axis, indices):
    return axis.first + axis.step * np.asarray(indices)


@pytest.mark.parametrize("flipped", [True, False])
def test_a_front_of_burgers_moves_along_x_as_fast_as_it_should(flipped):
    data = BurgersData(size=64, dt=0.02, inner_steps=5, length=10.0, flipped=flipped)
    coordinates, build = data.coordinates, data.build()
    x = torch.linspace(0, 10, 64, dtype=torch.float64)
    image = build.trajectories((1 - 0.01 * (2 * math.pi * x / 10).cos())[None])[0, 0].numpy()
    # A small wave on speed 1 travels with it: its trough, at x = 0 when t = 0, is at x = t.
    trough = places(coordinates.rows, image.argmin(0))
    times = places(coordinates.columns, np.arange(64))
    np.testing.assert_allclose((trough - times + 5) % 10 - 5, 0, atol=0.25)
    assert coordinates.time == coordinates.columns
    assert sorted(coordinates.rows.ends(64)) == pytest.approx([0, 10])


def test_a_residual_of_burgers_is_shown_at_the_later_of_its_two_columns():
    data = BurgersData(size=8)
    image = data.build().images(0, "train", 0, 1)
    image[..., 5] += 0.1
    broken = data.rule.build().residual(image).abs().sum((0, 1, 2)) > 1e-3
    first = int(broken.nonzero()[0])
    assert data.coordinates.residual == (0, 5 - first)


def test_vorticity_and_divergence_of_a_flow_are_where_a_formula_has_them():
    data = DivergenceData(size=64, rows=1, columns=1)
    h, c = 2 * math.pi / 64, data.coordinates
    rule, view = DivergenceFree(64), view_of(DivergenceFree(64), c)
    i = torch.arange(64, dtype=torch.float64)
    along, across = (i + 1) * h, (i + 0.5) * h  # where the staggered grid has u
    flow = torch.stack([(along[:, None] + 2 * across).sin(), torch.zeros(64, 64)])[None]
    x, y = places(c.rows, i.numpy())[:, None], places(c.columns, i.numpy())
    np.testing.assert_allclose(view.show(flow.numpy())[0], -2 * np.cos(x + 2 * y), atol=0.01)  # −∂u/∂y
    down, right = c.residual
    x, y = places(c.rows, i.numpy() + down)[:, None], places(c.columns, i.numpy() + right)
    np.testing.assert_allclose(rule.residual(flow)[0, 0], np.cos(x + 2 * y), atol=0.01)  # ∂u/∂x


def test_states_of_a_flow_and_points_of_a_square():
    flow = DivergenceData().coordinates
    assert flow.time.ends(8) == pytest.approx((3.0, 4.4))  # docs: the states at t = 3.0, 3.2, …
    line = "down x, across y, 0.0982 to 6.28"  # corners of the cells: 2π/64 to 2π
    assert flow.in_words(128, 256) == f"{line}; states at t = 3, 3.2, …, 4.4"
    assert flow.in_words(64, 128) == f"{line}; states at t = 3, 3.2"
    square = DarcyData(size=33).coordinates
    np.testing.assert_allclose(places(square.rows, range(33)), np.linspace(0, 1, 33))
    assert square.in_words(33, 33) == "down x, across y, 0 to 1"
    front = BurgersData(size=64, dt=0.02, inner_steps=5, length=10.0, flipped=True).coordinates
    assert front.in_words(64, 64) == "down x, 10 to 0; across t, 0.1 to 6.4"


def test_what_nothing_is_known_of_is_counted_in_pixels():
    assert PIXELS.in_words(8, 8) == ""
    assert Axis("row").ends(4) == (0, 3)
    known = {name for name in EXPERIMENTS if preset(name, "demo").settings.data.coordinates != PIXELS}
    assert known == {"burgers", "divergence", "darcy"}
