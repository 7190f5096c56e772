"""`namm run count` without a counter: the run trains its own, keeps it, and uses it as the rule."""

import json
from dataclasses import replace

import pytest
import torch

from namm.constraints import Counter
from namm.datasets import open_store
from namm.errors import Interrupted, UsageError
from namm.experiments.count import CountData, CounterTraining
from namm.experiments.engine import build
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.engine.settings import with_seed
from namm.experiments.engine.settings_file import from_yaml, to_yaml
from namm.experiments.engine.stages import stage_keys
from namm.experiments.presets import PRESETS, preset
from namm.experiments.sweeps.cell import Cell, share
from namm.training import counter as counting
from namm.training import trainer

QUICK = CounterTraining(n_train=16, n_val=4, budget="3 steps", batch_size=8, warmup_steps=1)


def quick(size=16, **changed):
    """Many galaxies: what a hasty counter may miss of them is a tenth."""
    base = preset("count")
    data = CountData(12, 4, 4, size=size, count=20, separation=2.0, counter_training=replace(QUICK, **changed))
    return replace(base, settings=replace(base.settings, data=data))


def draw(chosen, folder):
    return run(chosen, folder, until="data", log=lambda line: None, progress=False)["data"]


def test_a_run_trains_its_counter_keeps_it_and_is_judged_by_it(tmp_path):
    chosen, said = quick(), []
    record = draw(chosen, tmp_path / "run")
    counter = Counter.load(tmp_path / "run/data/counter.safetensors")
    assert counter.config["size"] == 16
    facts = counter.facts["training"]
    assert (facts["labels"], facts["n_train"], facts["n_val"]) == ([18, 19, 20, 21, 22], 16, 4)
    assert record.results["counter_error"] == counter.facts["error"]
    assert record.compute_seconds == 0  # the rule is given to both sides
    with open_store(tmp_path / "run/data/images.h5") as store:
        x = store["train"][:]
    expected = (counter(x) - 20).abs().mean().item()
    assert record.results["distance_mean"] == pytest.approx(expected, rel=1e-5)
    rule = RunParts.load(tmp_path / "run").rule()
    assert rule(x).mean().item() == pytest.approx(expected, rel=1e-5)
    run(chosen, tmp_path / "run", until="data", log=said.append, progress=False)
    assert "done before" in said[0]
    (tmp_path / "run/data/counter.safetensors").unlink()
    assert not read_record(tmp_path / "run/data").is_complete(tmp_path / "run/data")


def test_another_size_has_another_counter_and_the_first_comes_back(tmp_path):
    draw(quick(), tmp_path)
    first = (tmp_path / "data/counter.safetensors").read_bytes()
    draw(quick(size=20), tmp_path)
    assert Counter.load(tmp_path / "data/counter.safetensors").config["size"] == 20
    draw(quick(), tmp_path)
    assert (tmp_path / "data/counter.safetensors").read_bytes() == first


def test_an_interrupted_training_of_the_counter_goes_on(tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    draw(quick(), whole)
    update, steps = trainer.Trainer._update, []

    def stopped(self, step):
        if step == 2:
            raise Interrupted("stop")
        return update(self, step)

    often = replace(counting.COUNTER_SETTINGS, checkpoint_seconds=0.0)
    monkeypatch.setattr(counting, "COUNTER_SETTINGS", often)
    monkeypatch.setattr(trainer.Trainer, "_update", stopped)
    with pytest.raises(Interrupted):
        draw(quick(), cut)
    assert not (cut / "data/counter.safetensors").exists()
    monkeypatch.setattr(trainer.Trainer, "_update", lambda self, step: (steps.append(step), update(self, step))[1])
    draw(quick(), cut)
    assert steps == [2]
    a, b = (Counter.load(each / "data/counter.safetensors").state_dict() for each in (whole, cut))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_cells_of_a_sweep_share_the_counter_with_the_data(tmp_path):
    draw(quick(), tmp_path / "one")
    other = replace(quick(), settings=replace(quick().settings, map=replace(quick().settings.map, sigma_max=0.2)))
    share([Cell("two", other, "map")], tmp_path)
    given = tmp_path / "two/data/counter.safetensors"
    assert given.read_bytes() == (tmp_path / "one/data/counter.safetensors").read_bytes()
    assert json.loads((tmp_path / "two/data/stage.json").read_text())["status"] == "complete"


def test_a_counter_that_is_given_has_the_keys_of_version_0_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counter.safetensors").write_bytes(b"one")
    s = preset("count", "paper").settings
    keys = stage_keys(replace(s, data=replace(s.data, counter="counter.safetensors")))
    assert (keys["data"][:16], keys["report"][:16]) == ("745cd2e40026ed6f", "0bce1453fe91e006")


def test_how_the_counter_is_trained_is_a_setting_of_its_own():
    chosen = quick()
    assert from_yaml(to_yaml(chosen)) == chosen
    assert stage_keys(quick(seed=1).settings)["data"] != stage_keys(chosen.settings)["data"]
    assert with_seed(chosen.settings, 3).data.counter_training == chosen.settings.data.counter_training
    assert "counter_training" not in chosen.settings.data.recipe
    sizes = {name: preset("count", name).settings.data.counter_training.n_train for name in PRESETS}
    assert (sizes["gpu"], sizes["paper"]) == (10_000, 10_000)
    assert sizes["demo"] < sizes["gpu"]


@pytest.mark.parametrize(
    ("data", "message"),
    [(CountData(size=30), "multiple of 4, not 30"), (CountData(size=24, count=8), "10 sources .* need not fit")],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_drawn(data, message, tmp_path):
    chosen = replace(preset("count"), settings=replace(preset("count").settings, data=data))
    with pytest.raises(UsageError, match=message):
        run(chosen, tmp_path / "run", until="data", log=print, progress=False)
    assert not (tmp_path / "run").exists()


def test_few_galaxies_have_fewer_labels():
    assert CountData(count=2).labels == (1, 2, 3, 4)
    assert CountData(count=8).labels == (6, 7, 8, 9, 10)


def test_the_counter_is_trained_on_galaxies_like_the_datas(tmp_path):
    base = quick()
    blurred = replace(base, settings=replace(base.settings, data=replace(base.settings.data, blur=3.0)))
    draw(blurred, tmp_path)
    facts = Counter.load(tmp_path / "data/counter.safetensors").facts["training"]
    assert facts["galaxies"] == {"blur": 3.0, "separation": 2.0}
    with pytest.raises(UsageError, match=r"namm run count.*namm train counter"):
        build.constraint(base.settings.data.rule)
