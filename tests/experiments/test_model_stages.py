"""The stages that train and sample models: equal compute, the same model on both sides, finetuning, interruptions."""

import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

from namm.datasets import load
from namm.errors import UsageError
from namm.experiments.engine import build_models
from namm.experiments.engine.folder import Record, read_record, write_record
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts, untrained
from namm.experiments.engine.settings import DiffusionSettings, NetworkSettings
from namm.experiments.engine.stages import STAGES, stage_keys, stages_until
from namm.experiments.engine.stages.model import equal_compute, load_milestone, milestones
from namm.generative import VPSDE, Diffusion, Epsilon, Flow, LogitNormalTimes, Straight, UniformTimes, Velocity
from namm.maps import IdentityMap
from namm.training.settings import TrainSettings
from namm.training.train_model import train_model


def go(chosen, folder, until):
    return run(chosen, folder, until=until, log=lambda line: None, progress=False, force=True)


def trained_for(run_folder, stage):
    """Steps and compute seconds that the training itself wrote down."""
    result = json.loads((run_folder / stage / "training" / "result.json").read_text())
    return result["steps"], result["compute_seconds"]


def sampled_for(path):
    with h5py.File(path) as file:
        return file["seconds"][:].astype(float).sum()


# Equal compute


def test_the_baseline_gets_the_compute_of_map_model_samples_and_finetuning(whole_run):
    steps, seconds = trained_for(whole_run, "mdm")
    ours = seconds + sum(trained_for(whole_run, stage)[1] for stage in ("map", "finetune"))
    ours += sum(sampled_for(whole_run / "samples" / name) for name in ("train.h5", "held_out.h5"))
    found = read_record(whole_run / "dm").results["steps"]
    assert found == trained_for(whole_run, "dm")[0]
    assert abs(found - ours / (seconds / steps)) <= 1
    assert found > steps


def test_the_plain_autoencoder_gets_the_compute_of_map_and_mirrored_one(whole_run):
    steps, seconds = trained_for(whole_run, "mvae")
    ours = seconds + trained_for(whole_run, "map")[1]
    assert abs(trained_for(whole_run, "vae")[0] - ours / (seconds / steps)) <= 1


@pytest.fixture
def records(tmp_path):
    """Records of two stages: 100 steps in 50 seconds, and 30 seconds."""
    for name, results, seconds in (("mdm", {"steps": 100}, 50.0), ("map", {}, 30.0)):
        write_record(tmp_path / name, Record(name, "", {}, {}, compute_seconds=seconds, results=results))
    return [tmp_path / "mdm", tmp_path / "map"]


def test_equal_compute_by_hand(records):
    settings = TrainSettings(batch_size=8)
    assert equal_compute(settings, settings, records[0], records).budget == "160 steps"
    assert equal_compute(settings, settings, records[0], records[1:]).budget == "60 steps"


@pytest.mark.parametrize(
    "change", [{"batch_size": 4}, {"precision": "fp32"}, {"compile": True}, {"optimiser": "muon"}, {"averages": (0.5,)}]
)
def test_where_steps_cost_something_else_the_budget_is_time(records, change):
    settings = TrainSettings(batch_size=8)
    amount, unit = equal_compute(replace(settings, **change), settings, records[0], records).budget.split()
    assert unit == "minutes"
    assert float(amount) == pytest.approx(80 / 60, abs=1e-6)


def test_a_baseline_with_a_budget_of_its_own_needs_the_data_alone(tiny_preset, tmp_path):
    train = replace(tiny_preset.settings.dm.train, budget="3 steps")
    settings = replace(tiny_preset.settings, dm=replace(tiny_preset.settings.dm, equal_compute=False, train=train))
    assert [stage.name for stage in stages_until("dm", settings)] == ["data", "dm"]
    found = go(replace(tiny_preset, settings=settings), tmp_path / "run", "dm")
    assert found["dm"].results["steps"] == 3
    assert not (tmp_path / "run" / "map").exists()
    other = replace(settings, map=replace(settings.map, sigma_max=0.3))
    assert stage_keys(other)["dm"] == stage_keys(settings)["dm"]
    equal = [replace(s, dm=replace(s.dm, equal_compute=True)) for s in (settings, other)]
    assert stage_keys(equal[0])["dm"] != stage_keys(equal[1])["dm"]


# Repair at equal compute


def test_repair_draws_from_what_a_training_as_long_as_its_counterpart_gives(whole_run, tiny_preset):
    parts, steps = RunParts.load(whole_run), trained_for(whole_run, "mdm")[0]
    (path,) = (path for path in milestones(whole_run / "dm") if path.stem == f"step-{steps:09d}")
    found = parts.model("dm")
    load_milestone(found, path)
    settings, images = tiny_preset.settings, whole_run / "data" / "images.h5"
    alone = untrained("dm", settings, parts.shape)
    train = replace(settings.dm.train, budget=f"{steps} steps")
    train_model(alone, load(images, "train"), IdentityMap(), settings=train, progress=False)
    for a, b in zip(found.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with h5py.File(whole_run / "repair" / "train.h5") as file, torch.no_grad():
        n, sampler = len(file["images"]), build_models.sampling(settings.samples.sampler)
        drawn = alone.sample(n, generator=settings.samples.seed, **sampler)
        assert torch.allclose(torch.from_numpy(file["images"][:]), drawn, atol=1e-5)


def test_repair_costs_what_ours_does(whole_run):
    costs = json.loads((whole_run / "evaluate" / "metrics.json").read_text())
    spent, record = costs["compute_seconds"], read_record(whole_run / "repair")
    drawn = sum(sampled_for(whole_run / "repair" / name) for name in ("train.h5", "held_out.h5"))
    assert record.compute_seconds == pytest.approx(drawn + trained_for(whole_run, "repair")[1])
    assert 0 < record.results["model_seconds"] < spent["dm"]
    expected = spent["map"] + record.results["model_seconds"] + spent["repair"]
    assert costs["compute_seconds_repair"] == pytest.approx(expected)


@pytest.mark.parametrize("change", [{"schedule": "cosine"}, {"batch_size": 2}])
def test_nothing_is_repaired_where_the_shorter_training_is_no_part_of_the_baselines(tiny_preset, change):
    s = tiny_preset.settings
    other = replace(s, dm=replace(s.dm, train=replace(s.dm.train, **change)))
    assert "repair" in [stage.name for stage in stages_until(None, s)]
    assert "repair" not in [stage.name for stage in stages_until(None, other)]


def test_without_repair_the_stages_and_their_keys_are_those_of_runs_that_never_knew_it(tiny_preset):
    s = tiny_preset.settings
    without = replace(s, dm=replace(s.dm, repair=False))
    assert "repair" not in [stage.name for stage in stages_until(None, without)]
    assert stage_keys(without)["finetune"] == stage_keys(s)["finetune"]
    assert stage_keys(without)["evaluate"] != stage_keys(s)["evaluate"]
    assert "repair" not in STAGES["dm"].part(without)


# The same model on both sides


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (VPSDE(), Epsilon(), UniformTimes())),
        ({"beta_max": 15.0, "prediction": "v"}, (VPSDE(0.1, 15.0), Velocity(), UniformTimes())),
        (
            {"schedule": "straight", "prediction": "flow", "times": "logit-normal"},
            (Straight(), Flow(), LogitNormalTimes()),
        ),
    ],
    ids=str,
)
def test_settings_choose_schedule_prediction_and_times(options, expected):
    network = NetworkSettings(filters=4, multipliers=(1,), blocks=1, attention=())
    model = build_models.diffusion(network, DiffusionSettings(**options), (1, 8, 8), seed=0)
    assert (model.sde, model.prediction, model.times) == expected
    assert model.loss(torch.randn(2, 1, 8, 8)).isfinite()


@pytest.mark.parametrize("pair", [("mdm", "dm"), ("mvae", "vae")])
def test_both_sides_have_the_same_model_and_other_weights(whole_run, pair):
    ours, baseline = (RunParts.load(whole_run).model(stage) for stage in pair)
    assert ours.extra_repr() == baseline.extra_repr()
    shapes = [{name: t.shape for name, t in m.state_dict().items()} for m in (ours, baseline)]
    assert shapes[0] == shapes[1]
    assert not any(torch.equal(a, b) for a, b in zip(ours.parameters(), baseline.parameters(), strict=True) if a.any())
    if isinstance(ours, Diffusion):
        assert (ours.t_min, ours.sde, ours.prediction) == (baseline.t_min, baseline.sde, baseline.prediction)
        assert ours.network.config == baseline.network.config


def test_each_side_is_standardised_by_what_it_was_trained_on(whole_run):
    trained, x = RunParts.load(whole_run), load(whole_run / "data" / "images.h5", "train")
    with torch.no_grad():
        y = trained.mirror("map").to_mirror(x)
    for stage, images in (("dm", x), ("mdm", y), ("vae", x), ("mvae", y)):
        assert float(trained.model(stage).mean) == pytest.approx(float(images.mean()), abs=1e-5)


def test_both_are_sampled_alike(whole_run):
    attributes = []
    for name in ("mdm.h5", "dm.h5"):
        with h5py.File(whole_run / "evaluate" / name) as file:
            attributes.append({k: file.attrs[k] for k in ("seed", "sampler", "steps", "samples", "first")})
    assert attributes[0] == attributes[1]


# Samples and finetuning


def test_the_samples_are_the_models_and_the_two_files_do_not_overlap(whole_run, tiny_preset):
    trained, settings = RunParts.load(whole_run), tiny_preset.settings.samples
    y = trained.model("mdm").sample(
        80, generator=settings.seed, sampler=build_models.sampler(settings.sampler), progress=False
    )
    found = []
    for name in ("train.h5", "held_out.h5"):
        with h5py.File(whole_run / "samples" / name) as file:
            found.append(file["mirror_images"][:])
    assert [len(part) for part in found] == [70, 10]
    np.testing.assert_allclose(np.concatenate(found), y.numpy(), atol=1e-4)
    with torch.no_grad():
        x = trained.mirror("map").to_data(y)
    distance = read_record(whole_run / "samples").results["distance_mean"]
    assert float(trained.rule()(x).mean()) == pytest.approx(distance, rel=1e-3)


def test_finetuning_changes_f_and_leaves_g_alone(whole_run):
    trained = RunParts.load(whole_run)
    before, after = trained.mirror("map"), trained.mirror("finetune")
    for name, tensor in before.g.state_dict().items():
        assert torch.equal(tensor, after.g.state_dict()[name]), name
    assert any(not torch.equal(a, b) for a, b in zip(before.f.parameters(), after.f.parameters(), strict=True))


def test_finetuning_is_measured_on_held_out_samples(whole_run):
    trained, results = RunParts.load(whole_run), read_record(whole_run / "finetune").results
    with h5py.File(whole_run / "samples" / "held_out.h5") as file:
        y = torch.from_numpy(file["mirror_images"][:])
    for stage, name in (("map", "distance_samples_before"), ("finetune", "distance_samples")):
        with torch.no_grad():
            x = trained.mirror(stage).to_data(y)
        assert float(trained.rule()(x).mean()) == pytest.approx(results[name], rel=1e-4)
        variation = (x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()).item()
        assert variation == pytest.approx(results[name.replace("distance", "variation")], rel=1e-4)


def test_what_f_was_finetuned_on_is_not_what_it_is_judged_by(whole_run, tiny_preset):
    settings = tiny_preset.settings
    with pytest.raises(UsageError, match=r"samples\.seed and evaluate\.seed are both 2"):
        replace(settings, samples=replace(settings.samples, seed=2))
    rows = []
    for name in ("samples/train.h5", "samples/held_out.h5", "evaluate/mdm.h5"):
        with h5py.File(whole_run / name) as file:
            rows.append(file["mirror_images"][:].reshape(-1, 64))
    together = np.concatenate(rows)
    assert len(np.unique(together.round(4), axis=0)) == len(together) == 70 + 10 + 64


# Interruptions


def test_an_interrupted_baseline_keeps_its_number_of_steps(whole_run, tiny_preset, tmp_path, monkeypatch):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(folder / "dm")
    train = replace(tiny_preset.settings.dm.train, checkpoint_seconds=0.0)
    chosen = replace(
        tiny_preset, settings=replace(tiny_preset.settings, dm=replace(tiny_preset.settings.dm, train=train))
    )
    loss, calls = Diffusion.loss, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return loss(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Diffusion, "loss", failing)
        with pytest.raises(KeyboardInterrupt):
            go(chosen, folder, "dm")
    kept = [int(path.stem.removeprefix("step-")) for path in folder.glob("dm/training/checkpoints/step-*.safetensors")]
    assert 0 < max(kept) < 12
    record = go(chosen, folder, "dm")["dm"]
    assert record.attempts == 2
    assert record.results == read_record(whole_run / "dm").results
    weights = [path / "dm" / "training" / "model.safetensors" for path in (folder, whole_run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_an_evaluation_that_would_lack_images_is_refused_at_once(tiny_preset, tmp_path):
    settings = tiny_preset.settings
    for changed, message in (
        (replace(settings, data=replace(settings.data, n_test=31)), r"data\.n_test is 31"),
        (replace(settings, data=replace(settings.data, n_train=31)), r"data\.n_train is 31"),
        (replace(settings, evaluate=replace(settings.evaluate, n=31)), r"evaluate\.n is 31"),
    ):
        with pytest.raises(UsageError, match=message):
            go(replace(tiny_preset, settings=changed), tmp_path / "run", "evaluate")
        assert not (tmp_path / "run").exists()
