"""The benchmark of choices for the map, at a size of seconds."""

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from namm.errors import UsageError
from namm.experiments import build
from namm.experiments.map_stage import measure
from namm.experiments.presets import preset
from namm.maps import MirrorMap

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "map_choices.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_a_choice_changes_what_it_says_and_nothing_else(script):
    base = preset("burgers", "gpu").settings
    assert script["changed"](base, "as-is") == base
    choice = (
        "batch=32,rate=1e-3,g-layers=1,g-filters=8,filters=32,blocks=9,boundary=zeros,activation=tanh,weight=10,"
        "sigma=0.05,tune-sigma=0.01,tune-weight=7"
    )
    own, tuning = base.map, base.finetune
    assert script["changed"](base, choice) == replace(
        base,
        map=replace(
            own,
            sigma_max=0.05,
            weights=replace(own.weights, constraint=10.0),
            g=replace(own.g, layers=1, filters=8),
            f=replace(own.f, filters=32, blocks=9, boundary="zeros", activation="tanh"),
            train=replace(own.train, batch_size=32, learning_rate=1e-3),
        ),
        finetune=replace(tuning, sigma_max=0.01, weights=replace(tuning.weights, constraint=7.0)),
    )
    assert script["map_of"]("tune-sigma=0.01,sigma=0.05,tune-weight=7") == "sigma=0.05"
    assert script["map_of"]("tune-sigma=0.01") == "as-is"


def test_choices_with_networks_of_their_own_are_compiled_apart(script):
    base = preset("burgers", "gpu").settings
    choices = ["as-is", "g-layers=1", "rate=1e-3", "activation=tanh", "tune-rate=1e-4"]
    assert set(script["unlike"](base, choices)) == {"as-is", "g-layers=1", "activation=tanh"}


@pytest.mark.parametrize("choice", ["batch", "depth=3", "batch=32;rate=1"])
def test_a_choice_that_is_none_is_refused(script, choice):
    with pytest.raises((UsageError, ValueError)):
        script["changed"](preset("burgers", "gpu").settings, choice)


def test_choices_are_trained_apart_and_measured_on_the_same_images(script, tiny_preset, tmp_path):
    s = tiny_preset.settings
    out, file = tmp_path / "runs", tmp_path / "rows.json"
    options = ["--steps", "4", "--out", str(out), "--json", str(file)]
    assert script["main"](["as-is", "batch=2,rate=3e-3", *options], s) == 0
    plain, other = json.loads(file.read_text())
    assert (plain["steps"], other["steps"]) == (4, 4)
    assert (plain["images"], other["images"]) == (4 * s.map.train.batch_size, 8)
    assert plain["distances"] != other["distances"]
    with script["open_store"](out / "images.h5") as store:
        mirror, rule = MirrorMap.load(out / "batch=2,rate=3e-3" / "mirror"), build.constraint(s.data.rule)
        found = [measure(mirror, rule, store["val"], sigma, 1000) for sigma in (0.0, 0.1)]
        x = torch.as_tensor(store["val"][:])
        with torch.no_grad():
            error = (mirror.f(mirror.g(x)) - x)[..., :4].square().mean().sqrt()
    assert other["first_columns"] == pytest.approx(float(error), rel=1e-4)
    assert found[0]["distance_map"] == pytest.approx(other["distances"][0], rel=1e-5)
    assert found[1]["distance_map"] == pytest.approx(other["distances"][-1], rel=1e-5)
    assert found[0]["cycle_error"] == pytest.approx(other["cycle_error"], rel=1e-5)
    with torch.no_grad():
        stands_for_samples = rule(mirror.f(script["like_samples"](mirror, x, "val")))
    assert other["of_samples"] == pytest.approx(float(stands_for_samples.mean()), rel=1e-4)


@pytest.mark.parametrize("length", [2.0, 5.0])
def test_errors_like_a_models_are_as_large_and_smooth_as_said(script, monkeypatch, length):
    """White noise blurred by a Gaussian of width L has the autocorrelation exp(−d²/4L²)."""
    smooth = script["smooth"]
    shortest, longest = smooth.__globals__["LENGTHS"]
    assert shortest <= length <= longest
    monkeypatch.setitem(smooth.__globals__, "LENGTHS", (length, length))
    e = smooth((100, 2, 64, 48), torch.Generator().manual_seed(0))
    assert e.shape == (100, 2, 64, 48)
    assert e.square().mean((1, 2, 3)).tolist() == pytest.approx([1.0] * 100, rel=1e-5)
    for axis in (-2, -1):
        step = (e - e.roll(1, axis)).square().mean()
        assert float(step) == pytest.approx(2 * (1 - math.exp(-1 / (4 * length**2))), rel=0.05)


def test_errors_like_a_models_reach_the_mirror_image(script):
    x = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    mirror = MirrorMap(nn.Identity(), nn.Identity())
    moved, others = (script["like_samples"](mirror, x, split) - x for split in ("val", "train"))
    assert moved.square().mean().sqrt() == pytest.approx(0.002, rel=1e-3)
    assert (moved * others).mean() < 0.5 * moved.square().mean()


def test_finetunings_share_a_map_and_change_f_alone(script, tiny_preset, tmp_path):
    out, file = tmp_path / "runs", tmp_path / "rows.json"
    options = ["--steps", "4", "--tune", "3", "--out", str(out), "--json", str(file)]
    assert script["main"](["as-is", "tune-weight=500", *options], tiny_preset.settings) == 0
    rows = {row["choice"]: row for row in json.loads(file.read_text())}
    assert set(rows) == {"as-is", "as-is, finetuned", "tune-weight=500, finetuned"}
    assert [row["steps"] for row in rows.values()].count(3) == 2
    assert len({row["distances"][0] for row in rows.values()}) == 3
    before, after = (MirrorMap.load(out / name / "mirror") for name in ("as-is", "tune-weight=500-finetuned"))
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name]) == name.startswith("g.")
