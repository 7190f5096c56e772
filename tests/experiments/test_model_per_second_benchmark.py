"""benchmarks/model_per_second.py: one thing changes at a time, and its figures are those of the samples it kept."""

import json
from dataclasses import asdict

import h5py
import numpy as np
import pytest

import model_per_second
from model_per_second import CHANGES, PASSES, PRESET, Model, Options
from namm.experiments.presets import preset


@pytest.mark.parametrize("name", [name for name in CHANGES if name != PRESET])
def test_a_change_touches_one_part_of_the_model(name):
    before = asdict(preset("burgers", "gpu").settings.mdm)
    after = asdict(CHANGES[name](preset("burgers", "gpu").settings.mdm))
    assert [part for part in before if before[part] != after[part]] in (["network"], ["diffusion"], ["train"])


def test_share_of_the_peak_counts_forward_and_backward():
    scores = {"distance": {"mean": 0.5}, "mmd": [0.1, 0.0], "mmd_error": 0.0, "total_variation": 1.0, "spread": 1.0}
    model = Model(scores, [], 2_000_000, 7, images_per_second=1000.0, flops=1e9, sampling_seconds=1.0)
    row = model_per_second.row_of("dit", model, peak=PASSES * 1e12 * 1e-12 * 4)
    assert row[:5] == ("dit", "2.0", "7", "1,000", "25%")


def test_everything_runs_at_a_tiny_size(tmp_path, capsys):
    asked = ["--quick", "--only", PRESET, "dit", "--experiment", "periodic", "--out", str(tmp_path)]
    assert model_per_second.main(asked) == 0
    (folder,) = tmp_path.iterdir()
    found = Model(**json.loads((folder / "dit.json").read_text()))
    with h5py.File(sorted((folder / "dit").glob("step-*.h5"))[-1]) as file:
        images = np.asarray(file["images"])
    tiles = images.reshape(len(images), 2, 32, 2, 32).swapaxes(2, 3).reshape(len(images), 4, 32, 32)
    distance = sum(np.abs(tiles[:, [k]] - tiles).mean((1, 2, 3)) for k in range(4)).mean()
    assert found.scores["distance"]["mean"] == pytest.approx(distance, rel=1e-4)
    assert len(found.curve) == model_per_second.QUARTERS
    assert found.curve[-1][1] == found.scores["distance"]["mean"]
    assert (folder / "quality.png").stat().st_size > 1000
    assert "best ℓ" in capsys.readouterr().out


def test_both_sides_have_the_change(tmp_path, capsys, monkeypatch):
    row = {"distance": {"mean": 0.5}, "mmd": [0.1, 0.0], "mmd_error": 0.0, "total_variation": 1.0, "spread": 1.0}
    names = ("data", "mdm", "finetuned", "dm", "repaired")
    ran = []

    def run(chosen, folder, **_):
        ran.append(chosen.settings)
        (folder / "evaluate").mkdir(parents=True)
        metrics = {"rows": dict.fromkeys(names, row), "verdicts": {"finetuned": "works"}}
        (folder / "evaluate" / "metrics.json").write_text(json.dumps(metrics))

    monkeypatch.setattr(model_per_second, "run", run)
    model_per_second.main(["--both-sides", "--only", "batch-64", "--minutes", "2", "--out", str(tmp_path)])
    (s,) = ran
    assert s.mdm.train == s.dm.train
    assert (s.mdm.train.batch_size, s.mdm.train.budget, s.dm.equal_compute) == (64, "2 minutes", True)
    assert "works" in capsys.readouterr().out


def test_unknown_changes_are_refused(capsys):
    assert model_per_second.main(["--only", "bigger"]) == 2
    assert "no such change: bigger" in capsys.readouterr().err


def test_a_budget_is_minutes_of_compute():
    assert Options(minutes=0.5).budget == "0.5 minutes"
