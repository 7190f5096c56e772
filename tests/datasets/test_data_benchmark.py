"""The benchmark runs, and its ratio is the one of the figures it prints."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data.py"


def test_every_dataset_is_measured_in_bounded_memory():
    command = [sys.executable, str(SCRIPT), "--n", "64", "--baseline-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [line.split() for line in done.stdout.splitlines()[2:5]]
    assert [row[0] for row in rows] == ["burgers", "unit-cells", "galaxies"]
    for _, seconds, baseline, ratio, peak in rows:
        assert float(ratio) == pytest.approx(float(baseline) / float(seconds), rel=0.3)
        assert 50 < float(peak) < 1024


def test_a_missed_target_is_said_and_returned(capsys):
    script = runpy.run_path(str(SCRIPT))
    script["main"].__globals__["MAX_BYTES"] = 1
    assert script["main"](["--n", "1", "--baseline-n", "1"]) == 1
    assert "1 GiB of memory: missed by burgers, unit-cells, galaxies" in capsys.readouterr().out
