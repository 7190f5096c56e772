"""ℓ at the milestones of the trainings, against samples drawn here from the stored snapshots."""

import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from namm.evaluation.scores import Milestone, half_way
from namm.experiments.engine import build_models
from namm.experiments.engine.folder import read_record, stage_digests, write_record
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.presets import EXPERIMENTS, find, preset
from namm.formatting import format_number
from namm.training.checkpoint import Checkpoint, read, write
from namm.training.settings import evenly

STEPS = [2, 3, 4, 6]


@pytest.fixture(scope="module")
def found(whole_run):
    return json.loads((whole_run / "evaluate" / "metrics.json").read_text())["milestones"]


def snapshot(run, stage, step):
    return run / stage / "training" / "milestones" / f"step-{step:09d}.safetensors"


def assert_is(milestone, distances):
    distances = np.asarray(distances, np.float64)
    assert milestone["mean"] == pytest.approx(distances.mean(), rel=1e-5)  # six steps do not change much
    assert milestone["std"] == pytest.approx(distances.std(ddof=1), rel=1e-4)
    assert milestone["n"] == len(distances) == 64


def test_every_milestone_is_there_in_order_and_with_what_came_before_it(found, whole_run):
    seconds = {name: read_record(whole_run / name).compute_seconds for name in ("map", "mdm", "samples", "finetune")}
    before = {"mdm": seconds["map"], "finetune": seconds["map"] + seconds["mdm"] + seconds["samples"], "dm": 0.0}
    assert set(found) == set(before)
    for stage, offset in before.items():
        assert all(set(each) == {"step", "compute_seconds", "mean", "std", "n"} for each in found[stage])
        steps = [each["step"] for each in found[stage]]
        own = [read(snapshot(whole_run, stage, step)).facts["compute_seconds"] for step in steps]
        assert [each["compute_seconds"] for each in found[stage]] == pytest.approx([offset + each for each in own])
        assert own == sorted(own)
        assert own[-1] == pytest.approx(read_record(whole_run / stage).compute_seconds)
    assert [each["step"] for each in found["mdm"]] == [each["step"] for each in found["finetune"]] == STEPS
    assert found["dm"][-1]["step"] == read_record(whole_run / "dm").results["steps"]


@pytest.mark.parametrize("stage", ["mdm", "dm"])
def test_a_milestone_is_what_its_snapshot_samples(stage, found, whole_run, tiny_preset):
    trained, asked, chosen = RunParts.load(whole_run), tiny_preset.settings.evaluate, found[stage][1]
    model = trained.model(stage)
    final = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = load_file(snapshot(whole_run, stage, chosen["step"]))
    model.load_state_dict({name.split(".", 1)[1]: tensor for name, tensor in weights.items()})
    assert any(not torch.equal(tensor, final[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        y = model.sample(64, sampler=build_models.sampler(asked.sampler), generator=asked.seed, progress=False)
        x = trained.mirror("map").to_data(y) if stage == "mdm" else y
        assert_is(chosen, trained.rule()(x))


def test_the_last_milestone_is_of_the_samples_that_are_evaluated(found, whole_run):
    trained = RunParts.load(whole_run)
    with h5py.File(whole_run / "evaluate" / "mdm.h5") as ours, h5py.File(whole_run / "evaluate" / "dm.h5") as plain:
        assert_is(found["dm"][-1], plain["distances"][:64])
        assert_is(found["finetune"][-1], ours["distances"][:64])
        y = torch.from_numpy(ours["mirror_images"][:64])
    with torch.no_grad():
        assert_is(found["mdm"][-1], trained.rule()(trained.mirror("map").to_data(y)))


def test_finetuning_starts_where_the_map_ended(found):
    first, last, before = found["finetune"][0]["mean"], found["finetune"][-1]["mean"], found["mdm"][-1]["mean"]
    assert abs(first - before) < abs(last - before)


def test_half_way_is_shown_where_it_was_measured(found, whole_run):
    results = read_record(whole_run / "evaluate").results
    half = half_way([Milestone(**each) for each in found["dm"]])
    assert 2 * half.step == pytest.approx(found["dm"][-1]["step"], abs=1)
    assert results["distance_baseline_half_way"] == half.mean
    seconds = {name: read_record(whole_run / name).compute_seconds for name in ("map", "mdm", "samples", "finetune")}
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    assert results["compute"].startswith(f"ours {sum(seconds.values()):.1f} s ({parts}) and baseline ")


def test_the_lines_of_a_run_say_what_each_stage_cost(whole_run, tiny_preset, tmp_path):
    folder, lines = shutil.copytree(whole_run, tmp_path / "run"), []
    run(tiny_preset, folder, until="evaluate", log=lines.append, progress=False, force=True)
    said = {line.split()[0]: line for line in lines}
    for stage in ("map", "mdm", "samples", "finetune", "dm"):
        assert f"done before  compute {read_record(folder / stage).compute_seconds:.1f} s, " in said[stage]
    results = read_record(folder / "evaluate").results
    assert said["evaluate"].endswith(f"compute {results['compute']}, verdict {results['verdict']}")
    assert f"ℓ baseline half way {format_number(results['distance_baseline_half_way'])}" in said["evaluate"]


@pytest.mark.parametrize("total", [1, 100, 1687])
@pytest.mark.parametrize(("count", "there"), [(1, False), (2, True), (4, True), (5, False), (10, True)])
def test_an_even_number_of_milestones_has_one_half_way(total, count, there):
    steps = sorted(evenly(count, total))
    middle = half_way([Milestone(step, 1.0, 1.0, 0.0, 8) for step in steps])
    assert (middle is not None) == (there or total == 1)
    assert half_way([]) is None


@pytest.mark.parametrize(("experiment", "name"), [(each, name) for each in EXPERIMENTS for name in find(each).presets])
def test_presets_have_one_half_way(experiment, name):
    settings = preset(experiment, name).settings
    assert 0 < settings.evaluate.milestone_samples <= 128
    for part in (settings.mdm, settings.dm):
        assert 500 in evenly(part.train.milestones, 1000)
    assert settings.finetune.train.milestones


def evaluated(chosen, folder, **changes):
    evaluate = replace(chosen.settings.evaluate, **changes)
    run(
        replace(chosen, settings=replace(chosen.settings, evaluate=evaluate)),
        folder,
        until="evaluate",
        log=lambda line: None,
        progress=False,
        force=True,
    )
    return json.loads((folder / "evaluate" / "metrics.json").read_text())


def test_none_are_measured_where_none_are_asked_for(whole_run, tiny_preset, tmp_path):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    assert evaluated(tiny_preset, folder, milestone_samples=0)["milestones"] == {}
    assert "distance_baseline_half_way" not in read_record(folder / "evaluate").results


def test_a_model_that_is_not_ready_is_left_out_and_named(whole_run, tiny_preset, tmp_path, found):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    path = snapshot(folder, "mdm", 2)
    early = read(path)
    write(path, Checkpoint({name: tensor * torch.inf for name, tensor in early.tensors.items()}, early.facts))
    stage = folder / "mdm"
    write_record(stage, replace(read_record(stage), digests=stage_digests(stage)))  # as if the stage had written it
    with pytest.warns(UserWarning, match="milestone of mdm at step 2 is left out: sample 0 is not finite"):
        metrics = evaluated(tiny_preset, folder, milestone_samples=32)
    assert [each["step"] for each in metrics["milestones"]["mdm"]] == STEPS[1:]
    assert {each["n"] for each in metrics["milestones"]["dm"]} == {32}
    assert metrics["rows"]["dm"]["distance"]["n"] == 64
