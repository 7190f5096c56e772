"""The benchmark of an update of all weights, on networks of seconds."""

import json
import runpy
from pathlib import Path

import pytest

from namm.experiments import build
from namm.experiments.presets import preset

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "update.py"


def test_both_ways_are_measured_and_their_ratio_is_printed(tmp_path, capsys):
    benchmark = runpy.run_path(str(SCRIPT))
    assert benchmark["main"](["--preset", "demo", "--json", str(tmp_path / "found.json")]) == 0
    score, maps = json.loads((tmp_path / "found.json").read_text())
    trained = [p for p in build.mirror(preset("burgers", "demo").settings.map, 1).parameters() if p.requires_grad]
    assert maps["weights"] == len(trained) < score["weights"]
    printed = capsys.readouterr().out
    for row in (score, maps):
        assert 0 < row["one_by_one_cpu"] <= row["one_by_one"]
        assert 0 < row["one_vector_cpu"] <= row["one_vector"]
        assert f"{row['one_by_one'] / row['one_vector']:.1f}" in printed


def test_an_unknown_preset_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT))["main"](["--preset", "large"])
    assert "invalid choice" in capsys.readouterr().err
