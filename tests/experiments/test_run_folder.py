"""The run folder with stand-ins for the real stages: what runs when, what is kept, and a crash at every operation."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from namm.errors import RunFolderError, TrainingError, UsageError
from namm.experiments.engine import folder as run_folder
from namm.experiments.engine import stages as stages_module
from namm.experiments.engine.folder import describe_run, place_stage, read_record, stage_states
from namm.experiments.engine.run import run
from namm.experiments.engine.stages import STAGES, Outcome
from namm.experiments.presets import preset
from namm.files import owned
from namm.weights_file import write_weights


class Stages:
    """Stand-ins that write what they were asked for, and remember that they were asked."""

    def __init__(self):
        self.calls = []
        self.fail = None

    def data(self, work):
        self.calls.append("data")
        self.write(work.folder / "images", f"images of size {work.settings.data.size}")
        return Outcome({"images": work.settings.data.size}, ("images",))

    def map(self, work):
        self.calls.append("map")
        images = (work.needs["data"] / "images").read_text()
        self.write(work.folder / "weights", f"{images}, σ {work.settings.map.sigma_max}")
        return Outcome({"steps": 3}, ("weights",), compute_seconds=1.5)

    def write(self, path, text):
        """Write a part, then the whole; what is there from an earlier attempt must be of the same settings."""
        if path.exists():
            assert path.read_text() in (f"part of {text}", text)
        path.write_text(f"part of {text}")
        if self.fail and path.name == "weights":
            raise self.fail
        path.write_text(text)

    def take(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def stand_ins(monkeypatch):
    fakes = Stages()
    fake = {"data": fakes.data, "map": fakes.map}
    table = {name: replace(stage, function=fake.get(name)) for name, stage in STAGES.items()}
    monkeypatch.setattr(stages_module, "STAGES", table)
    monkeypatch.setattr("namm.experiments.engine.build_models.check", lambda settings: None)
    return fakes


def go(folder, *, sigma=0.3, size=16, until="map", **options):
    base = preset("periodic")
    settings = replace(base.settings, data=replace(base.settings.data, size=size))
    settings = replace(settings, map=replace(settings.map, sigma_max=sigma))
    return run(replace(base, settings=settings), folder, until=until, log=lambda line: None, **options)


def weights(folder):
    return (folder / "map" / "weights").read_text()


def test_a_complete_stage_is_not_run_again(tmp_path, stand_ins):
    records = go(tmp_path / "run")
    assert stand_ins.take() == ["data", "map"]
    assert records["map"].results == {"steps": 3}
    assert records["map"].compute_seconds == 1.5
    assert records["map"].needs == {"data": records["data"].key}
    before = (tmp_path / "run" / "map" / "stage.json").read_bytes()
    assert go(tmp_path / "run") == records
    assert stand_ins.take() == []
    assert (tmp_path / "run" / "map" / "stage.json").read_bytes() == before


def test_a_changed_setting_reruns_its_stage_and_what_depends_on_it(tmp_path, stand_ins):
    first = go(tmp_path)
    stand_ins.take()
    second = go(tmp_path, sigma=0.2)
    assert stand_ins.take() == ["map"]
    assert second["data"] == first["data"]
    assert second["map"].key != first["map"].key
    assert weights(tmp_path) == "images of size 16, σ 0.2"
    go(tmp_path, sigma=0.2, size=64)
    assert stand_ins.take() == ["data", "map"]
    assert weights(tmp_path) == "images of size 64, σ 0.2"


def test_a_setting_that_only_watches_reruns_nothing(tmp_path, stand_ins):
    base = preset("periodic")
    go(tmp_path)
    stand_ins.take()
    train = replace(base.settings.map.train, log_every=7, checkpoint_seconds=1.0, keep=9, validations=2)
    watched = replace(base.settings, map=replace(base.settings.map, train=train))
    run(replace(base, settings=watched), tmp_path, until="map", log=lambda line: None)
    assert stand_ins.take() == []
    faster = replace(watched, map=replace(watched.map, train=replace(train, learning_rate=0.5)))
    run(replace(base, settings=faster), tmp_path, until="map", log=lambda line: None)
    assert stand_ins.take() == ["map"]


def test_going_back_brings_back_what_was_set_aside(tmp_path, stand_ins):
    first = go(tmp_path)
    go(tmp_path, sigma=0.2)
    go(tmp_path, sigma=0.2, size=64)
    stand_ins.take()
    assert go(tmp_path) == first
    assert weights(tmp_path) == "images of size 16, σ 0.3"
    go(tmp_path, sigma=0.2, size=64)
    assert weights(tmp_path) == "images of size 64, σ 0.2"
    assert stand_ins.take() == []
    asides = sorted(p.name for p in tmp_path.iterdir() if p.is_dir() and "." in p.name)
    assert len(asides) == 3
    assert f"map.{first['map'].key[:8]}" in asides
    assert len(list(tmp_path.glob("settings.*.yaml"))) == 3


def test_a_stage_that_failed_goes_on_and_what_was_made_is_kept(tmp_path, stand_ins):
    stand_ins.fail = TrainingError("not finite")
    with pytest.raises(TrainingError):
        go(tmp_path)
    assert stand_ins.take() == ["data", "map"]
    record = read_record(tmp_path / "map")
    assert (record.status, record.attempts) == ("running", 1)
    go(tmp_path, sigma=0.2, until="data")  # a look at something else in between
    stand_ins.fail = None
    done = go(tmp_path)["map"]
    assert stand_ins.take() == ["map"]
    assert (done.status, done.attempts) == ("complete", 2)


def test_a_stage_whose_file_is_gone_is_made_again(tmp_path, stand_ins):
    go(tmp_path)
    assert stand_ins.take() == ["data", "map"]
    (tmp_path / "data" / "images").unlink()
    go(tmp_path)
    assert stand_ins.take() == ["data"]


def test_a_name_that_is_taken_is_not_overwritten(tmp_path):
    place_stage(tmp_path, "map", "a" * 64, {}, {})
    (tmp_path / "map.aaaaaaaa").mkdir()
    place_stage(tmp_path, "map", "b" * 64, {}, {})
    assert read_record(tmp_path / "map.aaaaaaaa.2").key == "a" * 64
    assert place_stage(tmp_path, "map", "a" * 64, {}, {}).key == "a" * 64


# Crashes


class Killed(BaseException):
    """The end of the process, as far as the code under test can tell."""


class Executioner:
    """Counts every operation that changes the disk; at the one it was told, and ever after, the process is dead."""

    def __init__(self, monkeypatch, at):
        self.left = at
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "mkdir"), (Path, "unlink"), (Path, "write_text")):
            monkeypatch.setattr(owner, name, self.guard(getattr(owner, name)))

    def guard(self, operation):
        def guarded(*arguments, **options):
            if self.left <= 0:
                raise Killed
            self.left -= 1
            return operation(*arguments, **options)

        return guarded


def crash(folder, at, **settings):
    """Run and die at operation `at`; whether it came to that."""
    with pytest.MonkeyPatch.context() as patch:
        Executioner(patch, at)
        patch.setattr(os, "getpid", lambda: 1)  # what it leaves is not overwritten by the next process
        try:
            go(folder, **settings)
        except Killed:
            return True
        return False


@pytest.mark.parametrize("then", ["same", "back first"])
def test_a_crash_at_any_operation_loses_nothing(tmp_path, stand_ins, then):
    at, crashed = 0, True
    while crashed:
        folder = tmp_path / str(at)
        first = go(folder)
        stand_ins.take()
        crashed = crash(folder, at, sigma=0.2, size=64)
        stand_ins.take()
        if then == "back first":
            assert go(folder) == first
            assert stand_ins.take() == []
        records = go(folder, sigma=0.2, size=64)
        assert weights(folder) == "images of size 64, σ 0.2"
        assert all(record.status == "complete" for record in records.values())
        stand_ins.take()
        assert go(folder) == first
        assert go(folder, sigma=0.2, size=64) == records
        assert stand_ins.take() == []
        assert not list(folder.rglob(".*.partial"))
        at += 1
    assert at > 25  # there is that much to interrupt


def test_a_crash_at_any_operation_of_a_first_run_is_gone_on_from(tmp_path, stand_ins):
    at, crashed = 0, True
    while crashed:
        crashed = crash(folder := tmp_path / str(at), at)
        go(folder)
        assert weights(folder) == "images of size 16, σ 0.3"
        at += 1
    assert at > 20


# Refusals


def test_a_folder_of_another_experiment_is_refused(tmp_path, stand_ins):
    go(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFolderError, match="experiment: periodic -> burgers"):
        run(preset("burgers"), tmp_path, until="map")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path, stand_ins):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunFolderError, match=r"not a run of namm \(it holds thesis.tex\)"):
        go(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunFolderError, match="is a file"):
        go(tmp_path / "thesis.tex")


def test_a_stage_folder_that_is_not_ours_is_refused(tmp_path, stand_ins):
    go(tmp_path, until="data")
    (tmp_path / "map").mkdir()
    (tmp_path / "map" / "notes").write_text("precious")
    with pytest.raises(RunFolderError, match=r"no stage.json\): move it away"):
        go(tmp_path)
    assert (tmp_path / "map" / "notes").read_text() == "precious"


@pytest.mark.parametrize("content", ["{", "[]", '{"key": 3}'])
def test_a_damaged_record_is_named(tmp_path, stand_ins, content):
    go(tmp_path)
    (tmp_path / "map" / "stage.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"map/stage\.json"):
        go(tmp_path)


def test_a_folder_in_use_is_refused(tmp_path, stand_ins):
    with owned(tmp_path), pytest.raises(RunFolderError, match="in use by process"):
        go(tmp_path)
    assert stand_ins.take() == []
    go(tmp_path)


def test_a_full_disk_is_a_sentence(tmp_path, stand_ins):
    stand_ins.fail = OSError(28, "No space left on device")
    with pytest.raises(RunFolderError, match=r"No space left on device.*the same command to resume"):
        go(tmp_path)


def test_nothing_is_written_for_what_cannot_be_run(tmp_path, stand_ins):
    with pytest.raises(UsageError, match="Did you mean 'map'"):
        go(tmp_path / "run", until="mpa")
    assert not (tmp_path / "run").exists()


# What people are shown


def states(folder):
    return {row.folder: row.state for row in stage_states(folder)}


def test_states_of_a_run(tmp_path, stand_ins):
    first = go(tmp_path)
    assert states(tmp_path) == dict.fromkeys(STAGES, "not there yet") | {"data": "complete", "map": "complete"}
    go(tmp_path, size=64, until="data")
    seen = states(tmp_path)
    assert (seen["data"], seen["map"], seen[f"data.{first['data'].key[:8]}"]) == ("complete", "stale", "aside")
    stand_ins.fail = TrainingError("no")
    with pytest.raises(TrainingError):
        go(tmp_path, size=64)
    assert states(tmp_path)["map"] == "partial"
    about = describe_run(tmp_path)
    assert (about.experiment, about.preset, about.changed, about.done) == ("periodic", "demo", True, ("data",))
    assert about.date >= json.loads((tmp_path / run_folder.RUN).read_text())["created"]
    stand_ins.fail = None
    go(tmp_path)
    assert not describe_run(tmp_path).changed
    assert describe_run(tmp_path).done == ("data", "map")


# How far a training has come


def cut_short(folder, *, checkpoint=None, log=None):
    """A run whose map was cut short, as a training leaves it."""
    training = folder / "map" / "training"
    (training / "checkpoints").mkdir(parents=True)
    if checkpoint is not None:
        facts = {"step": checkpoint[0], "total": checkpoint[1]}
        write_weights(training / "checkpoints" / f"step-{checkpoint[0]:09d}.safetensors", {}, {"facts": facts})
    if log is not None:
        (training / "metrics.jsonl").write_text(log)


def map_row(run):
    return next(row for row in stage_states(run) if row.folder == "map")


@pytest.mark.parametrize(
    ("checkpoint", "log", "shown"),
    [
        ((1500, 3593), None, "1500 of 3593 steps, 41 %"),
        ((1500, 3593), '{"step": 1525}\n{"step": 1550}\n', "1550 of 3593 steps, 43 %"),  # what was logged since
        ((1500, 3593), '{"step": 1525}\n{"step": 15', "1525 of 3593 steps, 42 %"),  # a line that is being written
        ((1500, 3593), '{"step": 1475}\n', "1500 of 3593 steps, 41 %"),
        ((0, 400), "", "0 of 400 steps, 0 %"),
        (None, '{"step": 25}\n', ""),
        ((5, 10), '{"stop": 1}\n', ""),
    ],
)
def test_a_stage_that_was_cut_short_shows_its_steps(tmp_path, stand_ins, checkpoint, log, shown):
    stand_ins.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run")
    cut_short(tmp_path / "run", checkpoint=checkpoint, log=log)
    assert (map_row(tmp_path / "run").state, map_row(tmp_path / "run").results) == ("partial", shown)


def test_a_damaged_checkpoint_does_not_keep_status_from_answering(tmp_path, stand_ins):
    stand_ins.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run")
    cut_short(tmp_path / "run", checkpoint=(3, 9))
    (file,) = (tmp_path / "run" / "map" / "training" / "checkpoints").iterdir()
    file.write_bytes(file.read_bytes()[:40])
    assert map_row(tmp_path / "run").results == ""
