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
    for _, seconds, target, baseline, ratio, peak in rows:
        assert target == "20"
        assert float(ratio) == pytest.approx(float(baseline) / float(seconds), rel=0.3)
        assert 50 < float(peak) < 1024


def test_a_missed_target_is_said_and_returned(capsys):
    script = runpy.run_path(str(SCRIPT))
    script["main"].__globals__["MAX_BYTES"] = 1
    assert script["main"](["--n", "1", "--baseline-n", "1"]) == 1
    assert "1 GiB of memory: missed by burgers, unit-cells, galaxies" in capsys.readouterr().out


@pytest.mark.parametrize(("n", "seconds", "code", "word"), [(1, 0.0, 1, "missed by unit-cells"), (1001, 1e9, 0, "met")])
def test_a_dataset_that_runs_for_minutes_has_its_own_target(capsys, n, seconds, code, word):
    script = runpy.run_path(str(SCRIPT))
    script["main"].__globals__.update(MINUTES={"unit-cells": seconds}, MAX_BYTES=2**60)
    assert script["main"](["unit-cells", "--n", str(n), "--baseline-n", "1"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[2].split()[2]) == pytest.approx(seconds * max(1, n / 1000))
    assert f"seconds: {word}" in lines


def test_a_dataset_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT))["main"](["unit-cell"])
    assert stopped.value.code == 2
    assert "no dataset is called unit-cell; there are" in capsys.readouterr().err
