"""The real stages at a tiny size: what they compute, and that they read images larger than memory."""

import json
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from namm.constraints import TotalFlux
from namm.datasets import batches, load
from namm.errors import DataError, UsageError
from namm.experiments.engine import build, build_models
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import ForwardSettings
from namm.experiments.engine.stages.map import choose_numbers, measure, mirror_folder
from namm.experiments.presets import preset
from namm.maps import MirrorMap
from namm.numerics import generator
from namm.training.objectives import ModelErrors, UniformNoise
from namm.training.train_map import train_map


def tiny(**changes):
    """Settings that train in a second."""
    base = preset("periodic")
    s = base.settings
    data = replace(s.data, size=8, n_train=200, n_val=70, n_test=3)
    f = replace(s.map.f, filters=4, blocks=1, downsamplings=1)
    train = replace(s.map.train, budget="12 steps", batch_size=4)
    chosen = replace(s.map, g=ForwardSettings(layers=1, filters=4), f=f, train=train)
    return replace(base, settings=replace(s, data=data, map=replace(chosen, **changes)))


def go(chosen, folder):
    return run(chosen, folder, until="map", log=lambda line: None, progress=False)


def weight_bytes(folder):
    return {p.parent.name: p.read_bytes() for p in mirror_folder(folder / "map").rglob("*.safetensors")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "periodic"
    return folder, go(tiny(), folder)


def test_the_data_are_the_recipes(done):
    folder, records = done
    with h5py.File(folder / "data" / "images.h5") as file:
        assert [len(file[split]) for split in ("train", "val", "test")] == [200, 70, 3]
        expected = build.dataset(tiny().settings.data).images(0, "val", 0, 70)
        np.testing.assert_array_equal(file["val"][:], expected)
    assert records["data"].results["distance_max"] == 0
    assert records["data"].results["images"] == 273


def test_the_map_is_what_train_map_makes_of_the_same_settings(done):
    folder, records = done
    chosen = tiny().settings
    images = load(folder / "data" / "images.h5", "train")
    mirror, rule = build_models.mirror(chosen.map, images), build.constraint(chosen.data.rule)
    numbers = choose_numbers(chosen.map, mirror, images, rule)
    trained = train_map(
        images,
        rule,
        mirror,
        noise=ModelErrors(chosen.map.sigma_max),
        weights=build_models.weights(chosen.map.weights, numbers.unit),
        regulariser=build_models.regulariser(chosen.map),
        settings=chosen.map.train,
        progress=False,
    )
    saved = MirrorMap.load(mirror_folder(folder / "map"))
    for name, tensor in mirror.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name
    results = records["map"].results
    assert (results["steps"], results["images"]) == (trained.steps, trained.images) == (12, 48)
    assert records["map"].compute_seconds > 0
    held_out = load(folder / "data" / "images.h5", "val")
    again = measure(saved, build.constraint(chosen.data.rule), held_out, ModelErrors(chosen.map.sigma_max), 0)
    assert {name: results[name] for name in again} == again


def test_the_record_says_what_was_run(done):
    folder, records = done
    written = json.loads((folder / "map" / "stage.json").read_text())
    assert written["settings"]["f"]["filters"] == 4
    assert written["settings"]["rule"] == {"tiles": 2, "across": None}
    assert written["needs"]["data"] == records["data"].key
    assert written["started"] <= written["finished"]


def test_images_larger_than_memory_are_streamed_to_the_same_weights(done, tmp_path, monkeypatch):
    kinds = []

    class Streaming(batches.StreamingBatches):
        def __init__(self, *arguments):
            kinds.append("streaming")
            super().__init__(*arguments)

    monkeypatch.setattr(batches, "StreamingBatches", Streaming)
    monkeypatch.setattr(batches.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    go(tiny(), tmp_path)
    assert kinds == ["streaming"]
    assert len(weight_bytes(tmp_path)) == 2
    assert weight_bytes(tmp_path) == weight_bytes(done[0])


def test_a_changed_map_leaves_the_data_alone(done):
    folder, records = done
    images, record = folder / "data" / "images.h5", folder / "data" / "stage.json"
    before = (images.stat().st_mtime_ns, images.stat().st_ino, record.read_bytes(), weight_bytes(folder))
    changed = go(tiny(sigma_max=0.9), folder)
    assert changed["map"].key != records["map"].key
    assert changed["map"].results["distance_noise"] > 2 * records["map"].results["distance_noise"]
    assert weight_bytes(folder) != before[-1]
    assert go(tiny(), folder) == records
    assert (images.stat().st_mtime_ns, images.stat().st_ino, record.read_bytes(), weight_bytes(folder)) == before


def test_lost_images_are_drawn_again(done, tmp_path):
    go(tiny(), tmp_path)
    path = tmp_path / "data" / "images.h5"
    before, when = load(path, "train"), (tmp_path / "map" / "stage.json").read_bytes()
    path.unlink()
    go(tiny(), tmp_path)
    assert torch.equal(load(path, "train"), before)
    assert (tmp_path / "map" / "stage.json").read_bytes() == when


def test_settings_that_do_not_fit_together_are_refused_before_anything_is_made(tmp_path):
    base = tiny()
    too_deep = replace(base.settings.map, f=replace(base.settings.map.f, kind="resnet", downsamplings=4))
    odd = replace(base.settings.data, size=9)
    for settings, error in (
        (replace(base.settings, map=too_deep), DataError),
        (replace(base.settings, data=odd), UsageError),
    ):
        with pytest.raises(error):
            go(replace(base, settings=settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# What is measured


class Half(nn.Module):
    """x / 2, with a parameter to say where it lives."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.factor * x


def test_measured_figures_against_numpy():
    x = torch.rand(100, 1, 6, 5, generator=generator(3))
    sigma, total = 0.2, 15.0
    got = measure(MirrorMap(Half(2.0), Half(0.25)), TotalFlux(total), x, UniformNoise(sigma), seed=7)
    z = torch.cat([torch.randn(n, 1, 6, 5, generator=generator(7, "measure", k)) for k, n in enumerate((64, 36))])
    x, z = x.double().numpy(), z.double().numpy()
    mapped = 0.25 * (2 * x + sigma * z)

    def distance(images):
        return np.abs(images.sum((1, 2, 3)) - total).mean()

    def variation(images):
        return np.abs(np.diff(images, axis=-1)).mean() + np.abs(np.diff(images, axis=-2)).mean()

    def spread(images):
        return images.reshape(len(images), -1).std(1, ddof=1).mean()

    assert got == pytest.approx(
        {
            "distance_data": distance(x),
            "distance_noise": distance(x + sigma * z),
            "distance_map": distance(mapped),
            "distance_cycle": distance(x / 2),
            "cycle_error": 0.5,
            "total_variation": variation(mapped) / variation(x),
            "spread": spread(mapped) / spread(x),
            "measured_on": 100,
        },
        rel=1e-5,
    )


def test_images_without_content_give_finite_figures():
    got = measure(MirrorMap(Half(1.0), Half(1.0)), TotalFlux(0.0), torch.zeros(2, 1, 4, 4), UniformNoise(0.1), seed=0)
    assert all(np.isfinite(value) for value in got.values())
