"""How long until the first step, in miniature."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "warm_up.py"


@pytest.fixture(scope="module")
def benchmark():
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_every_stage_makes_its_first_step_in_a_process_of_its_own(benchmark, tmp_path, capsys):
    file = tmp_path / "warm.json"
    benchmark.main(["--quick", "--stages", "score", "map", "sampling", "--json", str(file)])
    found = json.loads(file.read_text())
    assert list(found) == ["score", "map", "sampling"]
    for stage in found.values():
        assert list(stage) == ["cold", "warm"]
        for seconds in stage.values():
            assert 0 < seconds["torch"] < seconds["imports"] < seconds["first_step"]
    assert capsys.readouterr().out.count(" first step ") == 6


def judged(benchmark, monkeypatch, seconds):
    """What is made of stages that take so many seconds."""

    def measured(stage, caches, quick):
        return benchmark.Moments(1.0, 2.0, seconds[stage])

    monkeypatch.setitem(benchmark.main.__globals__, "measured", measured)
    return benchmark.main(["--stages", *seconds])


def test_a_stage_that_takes_long_is_told(benchmark, monkeypatch, capsys):
    assert judged(benchmark, monkeypatch, {"score": 14.0, "score-compiled": 140.0}) == 0
    told = capsys.readouterr().out
    assert "score-compiled / score, warm: 10.00" in told
    assert "every stage is in time" in told
    assert judged(benchmark, monkeypatch, {"map": 16.0}) == 1
    told = capsys.readouterr().out
    assert "missed: map, warm: 16.0 s, 15 asked" in told
    assert "map, cold: 16.0 s, 60" not in told
