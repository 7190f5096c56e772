"""`namm demo`, with few steps: all its parts, not its quality."""

import re

import pytest
import torch
from matplotlib.image import imread

from namm.cli import main
from namm.experiments.demo import demo
from namm.maps import MirrorMap


def test_demo_prints_plots_and_keeps_the_run(tmp_path, capsys):
    options = ["--steps", "3", "--out", str(tmp_path / "run"), "--plot", str(tmp_path / "plots" / "demo.png")]
    assert main(["demo", *options]) == 0
    first = capsys.readouterr().out
    for row in ("data x", "x + σz", "f(g(x) + σz)", "f(g(x))"):
        assert re.search(re.escape(row) + r"\s+│ \d\.\d\de[+-]\d\d", first)
    assert imread(tmp_path / "plots" / "demo.png").std() > 0.05  # not a blank page
    assert MirrorMap.load(tmp_path / "run" / "map" / "training" / "mirror").g.config["layers"] == 2
    assert main(["demo", *options]) == 0
    again = capsys.readouterr().out
    assert "map      done before" in again
    assert again[again.index("mean ℓ over") :] == first[first.index("mean ℓ over") :]


def test_demo_shows_what_it_measured(tmp_path):
    result = demo(tmp_path, steps=2, tell=lambda line: None)
    assert result.figures["distance_data"] == result.distances["x"].mean() == 0
    expected = 3 * result.sigma * 2 / torch.pi**0.5  # each tile against three others, E|N(0, 2σ²)| = 2σ/√π
    assert result.distances["x + σz"].mean().item() == pytest.approx(expected, rel=0.02)
    assert result.distances["f(g(x) + σz)"].mean().item() == pytest.approx(result.figures["distance_map"], rel=0.02)
    noise = result.images["x + σz"] - result.images["x"]
    assert noise.std().item() == pytest.approx(result.sigma, rel=0.01)
