"""All five experiments at a size of seconds, from their data to their maps."""

from dataclasses import replace

import pytest

from namm.constraints import Counter
from namm.datasets import open_store
from namm.experiments import build
from namm.experiments.data_stage import images_file
from namm.experiments.map_stage import mirror_folder
from namm.experiments.presets import EXPERIMENTS, preset
from namm.experiments.run import run
from namm.experiments.settings import ForwardSettings
from namm.maps import MirrorMap
from namm.training.counter import train_counter
from namm.training.settings import TrainSettings

SIZES = {
    "flux": {"size": 12},
    "burgers": {"size": 16},
    "divergence": {"size": 16, "rows": 1, "columns": 2, "inner_steps": 2, "start": 0.1},
    "periodic": {"size": 16},
    "count": {"size": 48},
}


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    path = tmp_path_factory.mktemp("counter") / "counter.safetensors"
    quick = TrainSettings(budget="2 steps", batch_size=4)
    train_counter(path, size=48, labels=(7, 8, 9), n_train=64, n_val=16, settings=quick, progress=False)
    return path


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_map_of_every_experiment(experiment, counter, tmp_path):
    base = preset(experiment)
    s = base.settings
    own = SIZES[experiment] | ({"counter": str(counter)} if experiment == "count" else {})
    data = replace(s.data, n_train=24, n_val=8, n_test=4, **own)
    f = replace(s.map.f, filters=4, blocks=1, downsamplings=1)
    train = replace(s.map.train, budget="6 steps", batch_size=4)
    map_ = replace(s.map, g=ForwardSettings(layers=1, filters=4), f=f, train=train)
    chosen = replace(base, settings=replace(s, data=data, map=map_))
    records = run(chosen, tmp_path / "run", until="map", tell=lambda line: None, progress=False)
    results = records["map"].results
    with open_store(images_file(tmp_path / "run" / "data")) as store:
        x = store["val"][:]
    mirror, rule = MirrorMap.load(mirror_folder(tmp_path / "run" / "map")), build.constraint(data.rule)
    assert results["distance_data"] == pytest.approx(float(rule(x).mean()), rel=1e-4, abs=1e-7)
    there_and_back = mirror.to_data(mirror.to_mirror(x)).detach()
    assert results["distance_cycle"] == pytest.approx(float(rule(there_and_back).mean()), rel=1e-3)
    # Nothing but the counter, which errs on its own data, is far from zero there.
    assert results["distance_data"] < (2 if experiment == "count" else 1e-3)
    assert isinstance(rule.counter, Counter) if experiment == "count" else results["distance_noise"] > 1e-3
