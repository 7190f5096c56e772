"""The benchmark of the fast path against the plain one, at a size of seconds; nothing is compiled."""

import json
import math
import runpy
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from namm.errors import RunFolderError
from namm.experiments.engine import build, build_models
from namm.experiments.engine.run_parts import untrained
from namm.experiments.engine.stages.map import measure
from namm.maps import MirrorMap
from namm.numerics import generator
from namm.training.checkpoint import read, weights_digest
from namm.training.log import read_metrics
from namm.training.train_model import load_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "precision.py"
SEEDS, MAP_STEPS, SCORE_STEPS = (0, 1), 6, 5
TRAININGS = {"map": MAP_STEPS, "score": SCORE_STEPS}


@pytest.fixture(scope="module")
def precision():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def call(precision, tiny_preset, tmp_path_factory):
    """Runs the script; gives its exit code, what it wrote as JSON, and its folder."""
    out = tmp_path_factory.mktemp("precision")
    steps = ["--map-steps", str(MAP_STEPS), "--score-steps", str(SCORE_STEPS)]
    written = ["--out", str(out / "runs"), "--json", str(out / "found.json"), "--figure", str(out / "curves.png")]

    def run():
        code = precision["main"](["--seeds", *map(str, SEEDS), *steps, *written, "--no-compile"], tiny_preset)
        return code, json.loads((out / "found.json").read_text()), out

    return run


@pytest.fixture(scope="module")
def first(call):
    return call()


def test_it_says_where_and_when_it_ran(first):
    assert first[1]["torch"] == torch.__version__
    assert {"machine", "date"} <= first[1].keys()


def trainings(out):
    """The folder of every training, with its number of steps."""
    return {
        (path, seed, name): (out / "runs" / f"{path}-{seed}" / name, steps)
        for path in ("plain", "fast")
        for seed in SEEDS
        for name, steps in TRAININGS.items()
    }


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())["settings"]


def test_every_path_and_seed_has_every_figure(precision, first):
    code, found, out = first
    assert [(row["path"], row["seed"]) for row in found["rows"]] == [(p, s) for s in SEEDS for p in ("plain", "fast")]
    for row in found["rows"]:
        assert row["figures"].keys() == precision["FIGURES"].keys()
        assert all(0 < value < math.inf for value in row["figures"].values())
    assert [each["figure"] for each in found["summaries"]] == list(precision["FIGURES"])
    assert code == (0 if all(each["agrees"] for each in found["summaries"]) else 1)
    assert (out / "curves.png").stat().st_size > 10_000


def test_the_paths_differ_in_precision_alone(first):
    folders = trainings(first[2])
    for (path, seed, name), (folder, steps) in folders.items():
        own, plain = settings_of(folder), settings_of(folders["plain", seed, name][0])
        assert own["precision"] == {"plain": "fp32", "fast": "bf16"}[path]
        assert own | {"precision": "fp32"} == plain
        assert own["seed"] == seed
        assert [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "val/loss" in line][-1] == steps


def test_both_start_from_the_same_weights_and_end_apart(first):
    folders = trainings(first[2])
    for seed in SEEDS:
        starts = {(row["map_start"], row["score_start"]) for row in first[1]["rows"] if row["seed"] == seed}
        assert len(starts) == 1
        for name, steps in TRAININGS.items():
            ours, plain = (folders[path, seed, name][0] / "checkpoints" for path in ("fast", "plain"))
            same = [
                all(torch.equal(value, b[key]) for key, value in a.items())
                for step in (0, steps)
                for a, b in [[read(folder / f"step-{step:09d}.safetensors").tensors for folder in (ours, plain)]]
            ]
            assert same == [True, False]
    assert len({row["map_start"] for row in first[1]["rows"]}) == len(SEEDS)
    assert len({row["score_start"] for row in first[1]["rows"]}) == len(SEEDS)


def test_both_score_networks_learn_the_images_of_the_plain_map(first):
    folders = trainings(first[2])
    for seed in SEEDS:
        plain = weights_digest(MirrorMap.load(folders["plain", seed, "map"][0] / "mirror"))
        for path in ("plain", "fast"):
            described = json.loads((folders[path, seed, "score"][0] / "settings.json").read_text())
            assert described["mirror"]["weights"] == plain


@pytest.fixture(scope="module")
def held_out(tiny_preset):
    """The validation images, drawn again, in float64."""
    data = tiny_preset.settings.data
    return next(iter(build.dataset(data).blocks(data.seed, "val", [0])))[: data.n_val].double()


def test_distances_are_those_of_the_saved_maps(precision, first, tiny_preset, held_out):
    """Measured again in float64, which bf16 would be far from."""
    rule, chosen = build.constraint(tiny_preset.settings.data.rule), tiny_preset.settings.map
    noise = build_models.noise(chosen.noise, chosen.sigma_max)
    for row in first[1]["rows"]:
        mirror = MirrorMap.load(trainings(first[2])[row["path"], row["seed"], "map"][0] / "mirror").double()
        exact = measure(mirror, rule, held_out.float(), noise, precision["MEASURED"])
        assert row["figures"]["distance_noisy"] == pytest.approx(exact["distance_map"], rel=1e-4)
        assert row["figures"]["distance_clean"] == pytest.approx(exact["distance_cycle"], rel=1e-4)


def test_losses_are_those_of_the_saved_networks(precision, first, tiny_preset, held_out):
    """Equation by equation in float64, with the draws of every path and seed."""
    s, folders = tiny_preset.settings, trainings(first[2])
    rule, noise = build.constraint(s.data.rule), build_models.noise(s.map.noise, s.map.sigma_max)
    for row in first[1]["rows"]:
        mirror = MirrorMap.load(folders[row["path"], row["seed"], "map"][0] / "mirror").double()
        plain = MirrorMap.load(folders["plain", row["seed"], "map"][0] / "mirror").double()
        model = untrained("mdm", s, tuple(held_out.shape[1:]))
        load_model(model, folders[row["path"], row["seed"], "score"][0])
        model.double()
        found = {"cycle": [], "constraint": [], "score": []}
        for seed in range(precision["MEASURED"], precision["MEASURED"] + precision["DRAWS"]):
            for k, x in enumerate(held_out.split(s.map.train.batch_size)):
                rng = generator(seed, "validation", k)
                z, gain = (each.double() for each in noise.errors(x.float(), rng))
                sigma = noise(x.float(), rng).double()
                with torch.no_grad():
                    u, draws = mirror.standardise(x), model.draw(x.float(), generator(seed, "validation", k))
                    gx = mirror.g(u)
                    y = gx + sigma * (z + gain * gx)
                    noisy = mirror.f(y)
                    cycle = (u - mirror.f(gx)).abs().mean() + (y - mirror.g(noisy)).abs().mean()
                    found["cycle"].append(float(cycle))
                    found["constraint"].append(float(rule(mirror.unstandardise(noisy)).mean()))
                    found["score"].append(float(model.loss(plain.to_mirror(x), *draws)))
        for name, values in found.items():
            assert row["figures"][name] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_a_second_call_trains_nothing(call, first):
    kept = [
        path
        for folder, _ in trainings(first[2]).values()
        for path in (folder / "metrics.jsonl", *(folder / "checkpoints").glob("step-*"))
    ]
    before = [path.stat().st_mtime_ns for path in kept]
    code, found, _ = call()
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert (code, found) == first[:2]


def test_another_number_of_steps_is_refused(precision, first, tiny_preset):
    again = ["--seeds", "0", "--map-steps", "7", "--score-steps", "5", "--no-compile", "--out", str(first[2] / "runs")]
    with pytest.raises(RunFolderError, match="7 steps"):
        precision["main"](again, tiny_preset)


def test_the_summary_of_made_up_numbers(precision):
    """log ratios 0.1, 0.2, 0.3: mean 0.2, standard deviation 0.1."""
    plain = [1.0, math.e, math.e**2]
    fast = [math.exp(0.1), math.exp(1.2), math.exp(2.3)]
    found = precision["summarise"]("cycle", fast, plain)
    assert found.log_ratio == pytest.approx(0.2)
    assert found.ratio == pytest.approx(math.exp(0.2))
    assert found.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert found.limit == pytest.approx(1 + 0.2 / math.sqrt(3))
    assert found.spread == pytest.approx(1.0)
    assert found.ratio_of_means == pytest.approx(sum(fast) / sum(plain))
    assert not found.agrees


@pytest.mark.parametrize(
    ("fast", "plain", "agrees"),
    [
        ([1.04, 1.04], [1.0, 1.0], True),  # within 5 %
        ([1.06, 1.06], [1.0, 1.0], False),  # beyond, and no scatter to excuse it
        ([1.0, 1.25], [1.0, 1.0], True),  # beyond 5 %, within two standard errors
        ([1.2, 1.25], [1.0, 1.0], False),  # beyond both
        ([0.5, 0.5], [1.0, 1.0], True),  # better is no fault
        ([1.06], [1.0], False),  # one seed has no standard error
        ([1.04], [1.0], True),
        ([math.nan, 1.0], [1.0, 1.0], False),
        ([math.inf, 1.0], [1.0, 1.0], False),
    ],
)
def test_the_verdict_follows_its_rule(precision, fast, plain, agrees):
    assert precision["summarise"]("cycle", fast, plain).agrees is agrees


def test_one_figure_that_falls_short_decides(precision):
    names, row = list(precision["FIGURES"]), precision["Row"]
    for worse in (None, *names):
        fast = {name: 2.0 if name == worse else 1.0 for name in names}
        rows = [row("plain", 0, "", "", dict.fromkeys(names, 1.0)), row("fast", 0, "", "", fast)]
        assert [s.figure for s in precision["summaries"](rows) if not s.agrees] == ([worse] if worse else [])


def test_compiled_is_the_default_of_the_fast_path(precision, tiny_preset):
    options = Namespace(compile=True, map_steps=3, score_steps=4)
    for path, expected in {"plain": ("fp32", False), "fast": ("bf16", True)}.items():
        made = precision["settings_of"](tiny_preset.settings, path, 2, options)
        for part, budget in ((made.map, "3 steps"), (made.mdm, "4 steps")):
            assert (part.train.precision, part.train.compile) == expected
            assert (part.train.budget, part.train.seed) == (budget, 2)
    assert replace(made, map=tiny_preset.settings.map, mdm=tiny_preset.settings.mdm) == tiny_preset.settings
