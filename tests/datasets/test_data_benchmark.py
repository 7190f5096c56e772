"""The benchmark runs, and its ratio is the one of the figures it prints."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from namm.datasets import DATASETS, BlackHoles, BurgersTrajectories, Galaxies, KolmogorovFlow, UnitCells

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


TINY = {
    "burgers": lambda: BurgersTrajectories(size=4),
    "unit-cells": lambda: UnitCells(size=8),
    "kolmogorov": lambda: KolmogorovFlow(size=8, rows=1, columns=1, start=0.0),
    "galaxies": lambda: Galaxies(size=8, count=1),
    "black-holes": lambda: BlackHoles(size=4),
}


@pytest.mark.parametrize(
    ("arguments", "limit", "code", "verdict"),
    [
        (["--scale", "0.001"], 360.0, 0, "not judged by a part of the images"),
        (["--scale", "0.001"], 0.0, 1, "missed"),
        (["unit-cells", "--scale", "1"], 360.0, 0, "not judged by a part of the images"),
    ],
)
def test_the_paper_s_training_sets_are_timed_one_after_the_other(capsys, arguments, limit, code, verdict):
    script = runpy.run_path(str(SCRIPT))
    script["main"].__globals__.update(DATASETS=TINY, MAX_SECONDS_PAPER=limit)
    assert script["main"](["--paper", *arguments]) == code
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[2:-1]]
    images = {"burgers": 10, "unit-cells": 30, "kolmogorov": 10, "galaxies": 10, "black-holes": 100}
    expected = images if "0.001" in arguments else {"unit-cells": 30_000}
    assert {row[0]: int(row[1]) for row in rows} == expected
    assert all(float(row[3]) == pytest.approx(1000 * float(row[2]) / int(row[1]), abs=0.6) for row in rows)
    assert lines[-1].startswith("total ")
    assert float(lines[-1].split()[1]) == pytest.approx(sum(float(row[2]) for row in rows), abs=0.1)
    assert lines[-1].endswith(f"target {limit:.0f} s for all five: {verdict}")


def test_all_of_the_paper_s_images_in_time_meet_the_target(capsys):
    script = runpy.run_path(str(SCRIPT))
    written = []
    script["main"].__globals__["store_seconds"] = lambda dataset, n: written.append((dataset, n)) or 10.0
    assert script["main"](["--paper"]) == 0
    assert written == [(recipe(), recipe.sizes["train"]) for recipe in DATASETS.values()]
    assert capsys.readouterr().out.splitlines()[-1] == "total 50.0 s; target 360 s for all five: met"
