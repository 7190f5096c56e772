"""benchmarks/head_to_head.py: what tuning prefers, what is on the front, and its whole way at a tiny size."""

import json
import math

import pytest

import head_to_head
from namm.rivals import ProjectedSteps


def tried(distance, mmd):
    return {"distance": distance, "mmd": mmd}


def test_tuning_takes_the_smallest_distance_among_samples_like_the_baselines():
    baseline = tried(1.0, 0.10)
    assert head_to_head.best([tried(0.5, 0.11), tried(0.2, 0.12), tried(0.1, 0.13)], baseline) == 1
    assert head_to_head.best([tried(0.1, 0.3), tried(0.5, 0.2)], baseline) == 1
    assert head_to_head.best([tried(1e-9, 0.12), tried(1e-6, 0.11)], baseline) == 1  # both exact
    assert head_to_head.best([{"not_finite": 9}, tried(0.9, 0.1)], baseline) == 1


def row(distance, mmd, reached=0.0):
    return {"distance": distance, "mmd": mmd, "reached": reached}


def test_the_front_is_what_nothing_beats():
    rows = {
        "data": row(0.0, 0.01, 1.0),
        "DM": row(1.0, 0.10),
        "guidance": row(0.5, 0.11),
        "rejection": row(0.6, 0.12),  # beaten by guidance
        "projection": row(3e-7, 0.13, 1.0),
        "projected steps": row(1e-7, 0.14, 0.995),  # as exact, and less like the data
        "residual loss": "it is not trained here",
    }
    assert head_to_head.front(rows) == {"DM", "guidance", "projection"}


def test_rows_are_means_over_seeds():
    def record(distance, samples=10, lost=0):
        figures = {"distance": distance, "mmd": 0.1, "not_finite": lost, "samples": samples}
        return {"training_seconds": 4.0, "tuning_seconds": 0.0, "rows": {"": figures}}

    diverged = record(1.0, lost=7)
    del diverged["rows"][""]["mmd"]
    refused = {"refused": "X cannot be used with Y: it needs a residual. Give it one."}
    rows = head_to_head.rows_of({"DM": [record(1.0), record(3.0)], "guidance": [diverged], "projection": [refused]})
    assert rows["DM"]["distance"] == 2.0
    assert rows["DM"]["training"] == 4.0
    assert rows["guidance"] == "7 of 10 samples diverged"
    assert rows["projection"] == refused["refused"]


def test_a_record_stands_for_the_same_work_only(tmp_path):
    made = iter(({"value": 1}, {"value": 2}))
    path, about = tmp_path / "one.json", {"method": repr(ProjectedSteps(math.inf))}
    values = [
        head_to_head.kept(path, each, lambda: next(made))["value"] for each in (about, about, {"method": "other"})
    ]
    assert values == [1, 1, 2]


def test_a_tiny_run_is_compared_and_not_measured_again(tmp_path, capsys, monkeypatch):
    methods = ("DM", "guidance", "projected estimate", "residual loss", "finetuned", "repaired")
    numbers = {"n": 32, "tune-n": 32, "tune-seed": 0, "informed": "periodic", "only": "periodic"}
    arguments = [
        "--quick",
        "--out",
        str(tmp_path / "runs"),
        "--records",
        str(tmp_path / "records"),
        "--methods",
        *methods,
    ]
    arguments += [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
    assert head_to_head.main(arguments) == 0
    first = capsys.readouterr().out
    assert all(f" {name} " in first for name in (*methods, "finetuned + polish"))
    records = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "records").glob("*.json")}
    exact, plain = (records[f"periodic-demo-0-{name}"]["rows"][""] for name in ("projected-estimate", "DM"))
    assert exact["reached"] == 1
    assert exact["distance"] < 1e-6 < plain["distance"]
    assert records["periodic-demo-0-residual-loss"]["training_seconds"] > 0
    assert len(records["periodic-demo-0-guidance-tuning"]["tried"]) == 4
    assert (tmp_path / "records" / "head_to_head.png").stat().st_size > 0

    monkeypatch.setattr(head_to_head, "measured", lambda *arguments: pytest.fail("measured again"))
    assert head_to_head.main(arguments) == 0
    again = capsys.readouterr().out
    assert again[again.index("┏") :] == first[first.index("┏") :]
