"""All experiments at a size of seconds, from their data to their reports."""

import json
from dataclasses import replace

import pytest
import torch

from namm.constraints import Counter, constraint
from namm.datasets import open_store
from namm.errors import ConstraintError, DataError
from namm.experiments.count import CounterTraining
from namm.experiments.engine import build
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import ForwardSettings, NetworkSettings, SamplerSettings
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.map import mirror_folder
from namm.experiments.presets import EXPERIMENTS, preset
from namm.generative.sample_file import SampleFile
from namm.maps import MirrorMap
from namm.training.counter import train_counter
from namm.training.settings import TrainSettings

SIZES = {
    "flux": {"size": 12},
    "burgers": {"size": 16},
    "divergence": {"size": 16, "rows": 1, "columns": 2, "inner_steps": 2, "start": 0.1},
    "periodic": {"size": 16},
    "count": {"size": 48, "radius": 2.0},
    "darcy": {"size": 16},
}
FLOORS = {"count": 2, "darcy": 0.05}
"""Distances of data that their rule does not leave at zero: the counter errs, and coarse grids do in least squares."""


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    path = tmp_path_factory.mktemp("counter") / "counter.safetensors"
    quick = TrainSettings(budget="2 steps", batch_size=4)
    train_counter(path, size=48, labels=(7, 8, 9), n_train=64, n_val=16, settings=quick, progress=False)
    return path


def tiny(experiment, counter):
    """The experiment's own preset with images, networks and budgets of no size."""
    base = preset(experiment)
    s, sampler = base.settings, SamplerSettings("dpm-solver", 3)
    own = SIZES[experiment] | ({"counter": str(counter)} if experiment == "count" and counter else {})

    def short(part):
        return replace(part, train=replace(part.train, budget="6 steps", batch_size=4, milestones=2))

    network = NetworkSettings(filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0, unshuffle=2)
    f = replace(s.map.f, filters=4, blocks=1, downsamplings=1)
    settings = replace(
        s,
        data=replace(s.data, n_train=24, n_val=8, n_test=16, **own),
        map=short(replace(s.map, g=ForwardSettings(layers=1, filters=4), f=f)),
        mdm=short(replace(s.mdm, network=network)),
        samples=replace(s.samples, n=8, n_val=4, sampler=sampler),
        finetune=short(s.finetune),
        dm=short(s.dm),
        evaluate=replace(s.evaluate, n=16, subset=16, mmd_subsets=1, milestone_samples=4, sampler=sampler),
    )
    return replace(base, settings=settings)


def test_count_trains_the_counter_that_it_is_not_given(tmp_path):
    chosen = tiny("count", None)
    quick = CounterTraining(64, 16, "2 steps", 4, 1)
    data = replace(chosen.settings.data, size=16, count=20, separation=2.0, counter_training=quick)
    whole(replace(chosen, settings=replace(chosen.settings, data=data)), tmp_path / "run")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_stage_of_every_experiment(experiment, counter, tmp_path):
    whole(tiny(experiment, counter), tmp_path / "run")


def whole(chosen, folder):
    """Run all stages; what they measured is what the rule says of their files."""
    experiment = chosen.experiment
    records = run(chosen, folder, log=lambda line: None, progress=False, force=True)
    assert [name for name, record in records.items() if record.is_complete(folder / name)] == [
        *("data", "map", "mdm", "samples", "finetune", "dm", "repair", "evaluate", "report")
    ]
    rule = build.rule_of(chosen.settings.data, folder.joinpath)

    results = records["map"].results
    with open_store(images_file(folder / "data")) as store:
        x = store["val"][:]
    mirror = MirrorMap.load(mirror_folder(folder / "map"))
    assert results["distance_data"] == pytest.approx(float(rule(x).mean()), rel=1e-4, abs=1e-7)
    there_and_back = mirror.to_data(mirror.to_mirror(x)).detach()
    assert results["distance_cycle"] == pytest.approx(float(rule(there_and_back).mean()), rel=1e-3)
    assert results["distance_data"] < FLOORS.get(experiment, 1e-3)
    assert isinstance(rule.counter, Counter) if experiment == "count" else results["distance_noise"] > 1e-3

    rows = json.loads((folder / "evaluate" / "metrics.json").read_text())["rows"]
    page = (folder / "report" / "report.html").read_text()
    for row, file in (("finetuned", "mdm.h5"), ("dm", "dm.h5")):
        with SampleFile(folder / "evaluate" / file) as samples:
            distance = float(rule(torch.as_tensor(samples.images[:])).mean())
        assert rows[row]["distance"]["mean"] == pytest.approx(distance, rel=1e-4)
        assert f'<data value="{rows[row]["distance"]["mean"]}"' in page
    assert ("projected" in rows) == rule.has_project


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_rule_that_sigma_max_does_not_wake_and_constant_images_end_the_stage_data(
    experiment, counter, tmp_path, monkeypatch
):
    chosen = tiny(experiment, counter)
    recipe, sigma = build.dataset(chosen.settings.data), chosen.settings.map.sigma_max
    x = recipe.block(chosen.settings.data.seed, "train", 0)
    most = float(x.abs().max() + 6 * max(sigma, 0.1 * x.std()))
    bounded = constraint(lambda x: (x.abs() - most).clamp(min=0).mean((1, 2, 3)), name="bounded")
    monkeypatch.setattr("namm.experiments.engine.build.constraint", lambda rule: bounded)
    with pytest.raises(ConstraintError, match=r"bounded is inactive: .* or take more noise: map\.sigma_max"):
        run(chosen, tmp_path / "inactive", log=lambda line: None, progress=False)
    monkeypatch.setattr(type(recipe), "blocks", lambda self, seed, split, ks: (torch.full_like(x, 0.3) for _ in ks))
    with pytest.raises(DataError, match="the data are constant: in all 24 images"):
        run(chosen, tmp_path / "constant", log=lambda line: None, progress=False)
    assert not list(tmp_path.glob("*/map"))
