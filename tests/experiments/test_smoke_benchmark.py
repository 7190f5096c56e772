"""benchmarks/smoke.py: its smallest part, and what it says when something fails."""

import json

import pytest

import smoke
from namm.experiments.engine.folder import read_record


def test_one_experiment_to_its_map(tmp_path, capsys):
    out = tmp_path / "out"
    assert smoke.main(["--only", "periodic", "--until", "map", "--out", str(out)]) == 0
    assert read_record(out / "periodic/run/map").results["steps"] == 6
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-2]] == [["periodic", "data"], ["periodic", "map"]]
    assert lines[-1] == "2 passed, 0 failed"


def test_a_failure_is_told_counted_and_ends_the_experiment(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(smoke, "EXTRA", ["--data.tiles", "3"])
    assert smoke.main(["--only", "periodic", "--until", "map", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "FAILED  Failed: namm run ended with exit code" in said
    assert "0 passed, 1 failed" in said


def test_what_is_done_again_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = tmp_path / "run/map/stage.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"status": "complete", "attempts": 1}))
    before = smoke.records()
    assert list(before) == ["map"]
    smoke.kept(before)
    record.write_text(json.dumps({"status": "complete", "attempts": 2}))
    with pytest.raises(smoke.Failed, match="before the kill: map"):
        smoke.kept(before)
