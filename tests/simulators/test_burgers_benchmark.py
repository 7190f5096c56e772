"""The benchmark of the implicit step runs and prints the ratio of the figures it prints."""

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "burgers.py"


def test_ratio_is_that_of_the_figures(capsys):
    runpy.run_path(str(SCRIPT))["main"](["--batch", "4", "--size", "32", "--repeats", "3"])
    figures = re.findall(r"(\d+\.\d+) ms.* (\d+\.\d+) ms, ratio (\d+\.\d)", capsys.readouterr().out)
    ours, baseline, ratio = map(float, figures[0])
    assert ratio == pytest.approx(ours / baseline, rel=0.3)
