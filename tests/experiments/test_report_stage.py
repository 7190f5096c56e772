"""The report of a real run, tiny but whole: its numbers, its record, and what a damaged or partial run gives."""

import json
import re
import shutil
from dataclasses import asdict
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import yaml

from namm import constraint
from namm.constraints import DivergenceFree, Periodic
from namm.constraints.burgers import Burgers
from namm.datasets import open_store
from namm.errors import RunFolderError
from namm.evaluation.scores import Milestone, half_way
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.mirror_space import FILE as MIRROR_SPACE
from namm.experiments.engine.mirror_space import read_mirror_space, write_mirror_space
from namm.experiments.engine.run import run
from namm.experiments.engine.stages import Work
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.evaluate import OURS
from namm.experiments.engine.stages.map import mirror_folder
from namm.experiments.engine.stages.report import (
    FILE,
    PARTIAL,
    _rule_in_words,
    collect,
    make_report,
    view_of,
    write_report,
)
from namm.experiments.presets import EXPERIMENTS, preset
from namm.files import owned
from namm.generative.sample_file import SampleFile
from namm.maps import MirrorMap


@pytest.fixture(scope="module")
def whole(whole_run, tiny_preset, tmp_path_factory):
    """The whole run under a name with markup in it, and its report."""
    folder = shutil.copytree(whole_run, tmp_path_factory.mktemp("runs") / "tiny <run>")
    run(tiny_preset, folder, progress=False, force=True, log=lambda line: None)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.numbers, self.text, self.images = [], "", 0
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.images += tag == "img"
        if tag == "data":
            self.numbers.append(float(dict(attrs)["value"]))

    def handle_data(self, data):
        self.text += data


def test_a_whole_run_ends_with_a_page_of_its_own_numbers(whole):
    record = read_record(whole / "report")
    assert record.is_complete(whole / "report")
    assert record.files == (FILE,)
    page = Reader((whole / "report" / FILE).read_text())
    metrics = json.loads((whole / "evaluate" / "metrics.json").read_text())
    assert len(metrics["rows"]) >= 5
    for values in metrics["rows"].values():
        distance = values["distance"]
        wanted = [distance["mean"], distance["std"], distance["max"], *values["mmd"], 100 * distance["mean"]]
        assert {*wanted, values["total_variation"], values["spread"]} <= set(page.numbers)
    assert set(metrics["compute_seconds"].values()) <= set(page.numbers)
    assert {0.04, 0.1291, 0.09, 0.45} <= set(page.numbers)  # the paper's CD and √MMD²; CDs of the others
    middle = half_way([Milestone(**each) for each in metrics["milestones"]["dm"]])
    assert {middle.mean, middle.compute_seconds, metrics["milestones"]["dm"][-1]["mean"]} <= set(page.numbers)
    assert page.images == 7
    assert "burgers: tiny <run>" in page.text
    assert "data.n_train" in page.text
    assert "partial" not in page.text


def test_what_is_collected_is_what_the_files_hold(whole):
    contents = collect(whole)
    assert not contents.problems
    assert not contents.missing
    assert list(contents.grids) == ["data", "ours, not finetuned", "ours", "baseline"]
    assert set(contents.trainings) == {"map", "mdm", "finetune", "dm", "repair", "mvae", "vae"}
    assert contents.step_seconds == pytest.approx(contents.ours[1].seconds / 6)
    found = json.loads((whole / "evaluate" / "metrics.json").read_text())["milestones"]
    rows = {"mdm": "mdm", "finetune": "finetuned", "dm": "dm"}
    assert {stage: [asdict(each) for each in contents.milestones[row]] for stage, row in rows.items()} == found
    rule = Burgers(dt=0.05)
    for method, worst in zip(contents.methods, contents.worst, strict=True):
        x = torch.from_numpy(method.images)
        np.testing.assert_allclose(method.shown_distances, rule(x), rtol=1e-4)
        np.testing.assert_allclose(np.abs(method.residuals).mean(axis=(1, 2, 3)), rule(x), rtol=1e-4)
        assert worst.shown_distances[0] == method.distances.max()
        assert (np.diff(worst.shown_distances) <= 0).all()
    space = contents.mirror
    store = open_store(images_file(whole / "data"))
    with store, SampleFile(whole / "evaluate" / OURS) as samples:
        np.testing.assert_array_equal(space.data.images, store["test"][:4].numpy())
        np.testing.assert_array_equal(space.sampled.images, samples.mirror_images[:4].numpy())
    mirror = MirrorMap.load(mirror_folder(whole / "finetune"))
    with torch.no_grad():
        g = mirror.to_mirror(torch.from_numpy(space.data.images))
        f = mirror.to_data(torch.from_numpy(space.sampled.images))
    np.testing.assert_allclose(space.mirror.images, g, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(space.made.images, f, rtol=1e-4, atol=1e-5)
    for method in space.methods:
        x = torch.from_numpy(method.images)
        np.testing.assert_allclose(method.shown_distances, rule(x), rtol=1e-3, atol=1e-8)
        np.testing.assert_allclose(method.residuals, rule.residual(x), rtol=1e-3, atol=1e-6)
    changed = {name: (before, after) for name, before, after in contents.changed}
    assert changed["data.size"] == ("32", "8")
    assert changed["mdm.network.multipliers"] == ("[1, 2]", "[1]")
    assert "data.dt" not in changed


def test_kid_and_fid_are_reported_where_they_were_measured(copy, rewrite):
    path = copy / "evaluate" / "metrics.json"
    metrics = json.loads(path.read_text())
    for k, values in enumerate(metrics["rows"].values()):
        values |= {"kid": [0.01 * k, 0.003], "fid": 7.5 + k}
    rewrite(path, metrics)
    found = {row.name: (row.kid, row.fid) for row in collect(copy).rows}
    assert found == {name: (tuple(row["kid"]), row["fid"]) for name, row in metrics["rows"].items()}
    page = Reader(write_report(copy).read_text())
    assert {7.5, 0.02, 0.0022, 2.04} <= set(page.numbers)  # ours, and the paper's


def test_a_report_is_made_anew_without_touching_its_record(copy):
    record = (copy / "report" / "stage.json").read_bytes()
    (copy / "report" / FILE).write_text("old")
    assert write_report(copy) == copy / "report" / FILE
    assert (copy / "report" / FILE).read_text().startswith("<!DOCTYPE html>")
    assert (copy / "report" / "stage.json").read_bytes() == record
    assert not (copy / PARTIAL).exists()


def test_a_run_that_kept_nothing_of_mirror_space_has_a_report_without_it(copy, whole):
    assert 'id="mirror"' in (whole / "report" / FILE).read_text()
    (copy / "evaluate" / MIRROR_SPACE).unlink()  # as in runs of version 0.1
    contents = collect(copy)
    assert contents.mirror is None
    assert not contents.problems
    assert 'id="mirror"' not in write_report(copy).read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"mirror": np.zeros((4, 1, 8, 7), np.float32)},
        {"mirror": np.full((4, 1, 8, 8), np.nan, np.float32)},
        {"sampled_distances": np.zeros(3, np.float32)},
        {"data_residuals": np.zeros((4, 8), np.float32)},
        {"data": np.zeros((4, 1, 8, 8), np.int64)},
    ],
)
def test_a_file_of_mirror_space_that_nobody_wrote_is_a_problem(copy, change):
    path = copy / "evaluate" / MIRROR_SPACE
    with np.load(path) as kept:
        np.savez(path, **{**kept, **change})
    with pytest.raises(RunFolderError, match=r"mirror_space.npz cannot be read \(.*\): move it away"):
        read_mirror_space(copy / "evaluate")
    contents = collect(copy)
    assert contents.mirror is None
    assert any(problem.startswith("mirror space: ") for problem in contents.problems)


def test_a_rule_that_cannot_be_asked_about_mirror_images_costs_its_part_alone(whole, tmp_path):
    calls = []

    @constraint
    def shy(x):
        calls.append(len(x))
        if len(calls) == 2:  # g(x) comes after x
            raise ValueError("this is no image")
        return x.mean((1, 2, 3)).abs()

    with open_store(images_file(whole / "data")) as store, SampleFile(whole / "evaluate" / OURS) as samples:
        mirror = MirrorMap.load(mirror_folder(whole / "finetune"))
        write_mirror_space(tmp_path, mirror, shy, store["test"], samples, torch.device("cpu"))
    kept = read_mirror_space(tmp_path)
    assert [len(method.shown_distances) for method in kept] == [4, 0, 4]
    assert all(method.residuals is None for method in kept)
    assert kept[1].name == "g(x)"


def test_a_run_that_lacks_nothing_but_its_report_gets_it_as_a_stage(copy):
    shutil.rmtree(copy / "report")
    path = write_report(copy)
    assert path == copy / "report" / FILE
    assert read_record(copy / "report").is_complete(copy / "report")


def test_a_partial_run_gives_a_partial_report_and_keeps_the_stages_folder_free(copy):
    for stage in ("report", "evaluate", "dm"):
        shutil.rmtree(copy / stage)
    (copy / "samples" / "train.h5").unlink()
    with (copy / "map" / "training" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 99, "lo')
    with owned(copy):  # by a run that goes on meanwhile
        assert write_report(copy) == copy / PARTIAL
    assert not (copy / "report").exists()
    page = Reader((copy / PARTIAL).read_text())
    assert "This report is partial. Not complete: samples, dm, evaluate." in page.text
    assert page.images == 2  # the data, and how the trainings went


def test_settings_that_changed_since_leave_nothing_to_report(copy):
    content = yaml.safe_load((copy / "settings.yaml").read_text())
    content["data"]["seed"] = 5
    (copy / "settings.yaml").write_text(yaml.safe_dump(content))
    page = Reader(write_report(copy).read_text())
    assert "Not complete: data, map, mdm, samples, finetune, dm, repair, evaluate." in page.text
    assert "stale" in page.text
    assert page.images == 0


@pytest.mark.parametrize("content", ["{", '{"rows": {"dm": {}}}', '{"rows": {"dm": {"distance": 3}}}'])
def test_a_damaged_file_is_a_problem_named_and_refused_by_the_stage(copy, tiny_preset, content):
    (copy / "evaluate" / "metrics.json").write_text(content)
    contents = collect(copy)
    assert [problem.split(":")[0] for problem in contents.problems] == ["evaluate"]
    assert contents.methods  # what can be read is there
    assert contents.trainings
    with pytest.raises(RunFolderError, match=r"the report cannot be made. evaluate: "):
        make_report(Work(tiny_preset.settings, copy / "report", {}, False))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_was_done_is_said_without_marks_of_code_and_digits_nobody_reads(name):
    words = _rule_in_words(preset(name, "demo").settings.data)
    assert "`" not in words
    assert not re.search(r"\d\.\d{5}|None|numbers: \.", words)
    assert name != "divergence" or words.endswith("Its numbers: extent 6.283, size 32.")


def test_flows_are_seen_by_their_vorticity():
    x = np.random.default_rng(0).normal(size=(3, 2, 8, 16)).astype(np.float32)
    view = view_of(DivergenceFree(8, extent=4.0))
    u, v = x[0, 0, :, 8:], x[0, 1, :, 8:]  # the second state of the first image
    expected = (np.roll(v, -1, 0) - v - np.roll(u, -1, 1) + u) / (4.0 / 8)
    shown = view.show(x)
    assert shown.shape == (3, 8, 16)
    np.testing.assert_allclose(shown[0, :, 8:], expected, rtol=1e-5, atol=1e-5)
    assert view.signed
    plain = view_of(Periodic((2, 2)))
    np.testing.assert_array_equal(plain.show(x), x[:, 0])
    assert not plain.signed
