"""benchmarks/laws.py: its integrals against each other and against samples that `polish` moved."""

import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import torch

import namm

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
N = 4000


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, FOLDER)
    try:
        import laws
    finally:
        sys.path.remove(FOLDER)
    return laws


@pytest.fixture(params=["ellipse", "parabola", "sphere"])
def toy(script, request):
    return script.TOYS[request.param](k=240)


def test_the_normals_fill_space_once(toy):
    assert toy.polished().sum() * (toy.u[1] - toy.u[0]) == pytest.approx(1, abs=1e-4)


def test_a_point_on_a_circle_becomes_a_projected_normal(script):
    """Errors about one point of a unit circle: the law of the angle is an integral over the radius alone."""
    circle = script.ellipse(sigma=0.4, a=1.0, b=1.0, k=360)
    law = np.zeros_like(circle.u)
    law[90] = 1.0
    toy = script.Toy(**{**vars(circle), "law": law})
    for k in (90, 100, 130):
        apart = circle.u[k] - circle.u[90]
        expected, _ = scipy.integrate.quad(
            lambda r: r * np.exp(-(r**2 - 2 * r * np.cos(apart) + 1) / 0.32) / (2 * np.pi * 0.16),  # noqa: B023
            0,
            8,
        )
        assert toy.polished()[k] == pytest.approx(expected, rel=1e-4)


def test_polish_pushes_the_model_forward_along_the_normals(toy):
    rng = np.random.default_rng(0)
    drawn = toy.drawn(N, rng)
    once, again = (namm.polish(drawn, toy.rule(written)).images for written in ("r₁", "r₂"))
    expected = toy.polished()
    floor = toy.floor(expected, N, rng)
    for polished in (once, again):
        assert toy.rule()(polished).max() < 1e-12
        assert toy.apart(polished, expected) < 2.5 * floor
        assert toy.apart(polished, toy.conditioned("r₂")) > 10 * floor
    # How r is written does not matter, but where two points are about as near.
    assert (torch.linalg.vector_norm(once - again, dim=1) < 0.02).double().mean() > 0.99


def test_what_is_left_near_the_set_depends_on_how_the_rule_is_written(toy):
    rng = np.random.default_rng(1)
    for written, other in (("r₁", "r₂"), ("r₂", "r₁")):
        near, law = toy.near(written, N, rng), toy.conditioned(written)
        floor = toy.floor(law, N, rng)
        assert toy.apart(near, law) < 3 * floor
        assert toy.apart(near, toy.conditioned(other)) > 8 * floor


def test_the_whole_way_at_a_tiny_size(script, capsys):
    script.main(["--only", "parabola", "--n", "300", "--steps", "2"])
    shown = capsys.readouterr().out
    assert "repaired, polished" in shown
    assert "p | r₂ = 0" in shown
