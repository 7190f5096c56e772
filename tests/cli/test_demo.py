"""`namm demo`, with few steps: all its parts, not its quality."""

import re

import pytest
import torch
from matplotlib.image import imread

from namm.cli import main
from namm.constraints import Periodic
from namm.experiments.demo import SIGMA_MAX, measure
from namm.maps import MirrorMap


def test_demo_prints_plots_and_keeps_the_map(tmp_path, capsys):
    options = ["--steps", "3", "--out", str(tmp_path / "run"), "--plot", str(tmp_path / "plots" / "demo.png")]
    assert main(["demo", *options]) == 0
    first = capsys.readouterr().out
    for row in ("data x", "x + σz", "f(g(x) + σz)", "f(g(x))"):
        assert re.search(re.escape(row) + r"\s+│ \d\.\d\de[+-]\d\d", first)
    assert imread(tmp_path / "plots" / "demo.png").std() > 0.05  # not a blank page
    assert (tmp_path / "run" / "result.json").exists()
    assert MirrorMap.load(tmp_path / "run" / "mirror").g.config["layers"] == 2
    assert main(["demo", *options]) == 0
    assert capsys.readouterr().out == first  # read back, to the digit


def test_measure_against_a_map_with_known_answers():
    """g doubles and f halves: the noise that comes back is half of what was added."""

    class Scale(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(factor))

        def forward(self, x):
            return self.factor * x

    x = torch.rand(64, 1, 8, 8).repeat(1, 1, 2, 2)
    result = measure(MirrorMap(Scale(2.0), Scale(0.5)), Periodic(), x, 1.0, seed=0)
    assert result.data == result.inverted == result.error == 0
    assert result.restored == pytest.approx(result.noisy / 2, rel=1e-5)
    expected = 3 * SIGMA_MAX * 2 / torch.pi**0.5  # each tile against three others, E|N(0, 2σ²)| = 2σ/√π
    assert result.noisy == pytest.approx(expected, rel=0.02)
