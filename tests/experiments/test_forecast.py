"""A dry run: what would run, for how long by what is known, and that it leaves no trace."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from namm.errors import UsageError
from namm.experiments.engine import forecast as forecast_module
from namm.experiments.engine.folder import Record, read_record, write_record
from namm.experiments.engine.forecast import Rehearsal, _counting_saved, forecast
from namm.experiments.engine.run import run
from namm.experiments.engine.stages import stage_keys
from namm.weights_file import write_weights


def listing(folder):
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.fixture
def data_run(tiny_preset, tmp_path):
    run(tiny_preset, tmp_path / "runs" / "one", until="data", log=lambda line: None, progress=False)
    return tmp_path / "runs" / "one"


def test_what_is_done_is_known_and_what_is_not_is_rehearsed(tiny_preset, data_run, capsys):
    before = listing(data_run.parent)
    found = forecast(tiny_preset, data_run)
    assert listing(data_run.parent) == before
    stages = {each.stage: each for each in found.stages}
    assert stages["data"].state == "done"
    assert stages["data"].seconds == read_record(data_run / "data").seconds
    assert all(stages[name].state == "to do" for name in ("map", "mdm", "samples", "finetune", "dm", "evaluate"))
    equal = sum(stages[name].seconds for name in ("map", "mdm", "samples", "finetune"))
    assert stages["dm"].seconds == pytest.approx(equal)
    assert "6 steps" in stages["map"].basis
    found.show()
    said = capsys.readouterr().out
    assert "what was rehearsed is rough" in said
    assert "memory: about" in said


def test_a_run_of_the_same_settings_beside_it_knows_better(tiny_preset, data_run):
    record = replace(read_record(data_run / "data"), seconds=4321.0)
    write_record(data_run / "data", record)
    data, *_ = forecast(tiny_preset, data_run.with_name("two"), "map").stages
    assert (data.state, data.seconds) == ("to do", 4321.0)
    assert str(data_run) in data.basis
    assert not data_run.with_name("two").exists()
    other = replace(tiny_preset.settings, data=replace(tiny_preset.settings.data, seed=9))
    data, *_ = forecast(replace(tiny_preset, settings=other), data_run.with_name("two"), "data").stages
    assert "rehearsed" in data.basis


def test_equal_compute_goes_by_whole_costs(tiny_preset, data_run):
    """Of a training at step 900 of 1000, 10 of 100 seconds are left; the others are done, here or beside it."""
    keys = stage_keys(tiny_preset.settings)

    def keep(run, stage, **facts):
        (data_run.with_name(run) / stage).mkdir(parents=True)
        write_record(data_run.with_name(run) / stage, Record(stage, keys[stage], {}, {}, **facts))

    keep("one", "map", status="complete", seconds=70.0, compute_seconds=50.0)
    keep("one", "samples", status="complete", seconds=9.0, compute_seconds=5.0)
    keep("other", "finetune", status="complete", seconds=400.0, compute_seconds=100.0)
    keep("one", "mdm")
    training = data_run / "mdm" / "training"
    (training / "checkpoints").mkdir(parents=True)
    facts = {"step": 900, "total": 1000}
    write_weights(training / "checkpoints" / "step-000000900.safetensors", {}, {"facts": facts})
    (training / "metrics.jsonl").write_text('{"step": 900, "seconds": 90.0}\n')
    stages = {each.stage: each for each in forecast(tiny_preset, data_run, "dm").stages}
    assert (stages["mdm"].state, stages["mdm"].seconds) == ("goes on at step 900 of 1000", pytest.approx(10))
    assert stages["finetune"].seconds == 400
    assert stages["dm"].seconds == pytest.approx(50 + 100 + 5 + 100)


@pytest.mark.parametrize("stage", ["map", "mdm", "finetune", "dm", "few", "mvae", "vae"])
def test_every_training_is_rehearsed(tiny_preset, stage):
    train = replace(tiny_preset.settings.mdm.train, budget="6 steps")
    seconds, basis = Rehearsal(tiny_preset.settings).seconds(stage, train)
    assert seconds is not None
    assert basis.startswith("rehearsed: 6 steps")


def test_budgets_in_minutes_are_what_they_say(tiny_preset, tmp_path):
    train = replace(tiny_preset.settings.map.train, budget="2.5 minutes")
    settings = replace(tiny_preset.settings, map=replace(tiny_preset.settings.map, train=train))
    found = forecast(replace(tiny_preset, settings=settings), tmp_path / "run", "map")
    assert found.stages[1].seconds == 150


def test_what_the_run_would_refuse_is_refused(tiny_preset, tmp_path):
    settings = replace(tiny_preset.settings, evaluate=replace(tiny_preset.settings.evaluate, subset=1000, n=2000))
    with pytest.raises(UsageError, match="smaller subsets"):
        forecast(replace(tiny_preset, settings=settings), tmp_path / "run")


def test_time_in_proportion_where_a_batch_takes_long(tiny_preset, monkeypatch):
    """By a clock that the attempts set: one image takes a second, and later ones 0.3 each."""
    now, sizes = [0.0], []
    monkeypatch.setattr(forecast_module, "clock", lambda device: now[0])
    monkeypatch.setattr(forecast_module, "REHEARSAL", 100.0)
    rehearsal = Rehearsal(tiny_preset.settings)

    def attempt(size):
        sizes.append(size)
        now[0] += 1.0 if len(sizes) == 1 else 0.3 * size

    assert rehearsal._timed(attempt, 100) == pytest.approx(30)
    assert sizes == [1, 2]
    assert rehearsal._timed(attempt, 3) == pytest.approx(0.9)  # few enough to be tried whole
    assert sizes == [1, 2, 1, 2, 3]
    rehearsal._compute = forecast_module.REHEARSAL
    assert rehearsal._timed(attempt, 3) is None


def test_bytes_kept_for_gradients_are_those_of_autograd():
    layer, x = nn.Linear(32, 16), torch.rand(10, 32)
    with _counting_saved() as storages:
        layer(x).square().sum()
    inputs, outputs, weights = 10 * 32, 10 * 16, 32 * 16
    assert sum(storages.values()) in (4 * (inputs + outputs), 4 * (inputs + outputs + weights))
