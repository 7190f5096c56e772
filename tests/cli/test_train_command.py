"""`namm train`: the same stages as `namm run --until`, and the counter."""

import pytest
import torch

from namm.cli import main
from namm.constraints import Counter
from namm.datasets import Galaxies

TINY = [
    *("--data.size", "8", "--data.n-train", "20", "--data.n-val", "8", "--data.n-test", "0"),
    *("--map.g.layers", "1", "--map.g.filters", "4"),
    *("--map.f.filters", "4", "--map.f.blocks", "1", "--map.f.downsamplings", "1"),
    *("--map.train.batch-size", "4", "--map.train.budget", "2 steps"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_training_a_map_is_running_an_experiment_until_its_map(capsys):
    assert main(["train", "map", "periodic", "--out", "runs/a", *TINY]) == 0
    assert "map      done in" in capsys.readouterr().out
    assert main(["run", "periodic", "--until", "map", "--out", "runs/a", *TINY]) == 0
    assert capsys.readouterr().out.count("done before") == 2
    assert main(["train", "map", "--config", "runs/a/settings.yaml", "--out", "runs/a"]) == 0
    assert capsys.readouterr().out.count("done before") == 2


def test_it_ends_where_it_is_told(tiny_preset, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("namm.experiments.engine.run.run", lambda chosen, folder, *, until, **_: asked.append(until))
    for what in ("map", "mdm", "finetune", "dm", "mvae", "vae"):
        assert main(["train", what, "burgers"]) == 0
    assert asked == ["map", "mdm", "finetune", "dm", "mvae", "vae"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mpa", "burgers"], "Did you mean 'map'?"),
        (["samples", "burgers"], "there is no thing to train called 'samples'"),
        (["map", "burgrs"], "Did you mean 'burgers'?"),
        (["map", "burgers", "--until", "data"], "there is no option --until"),
        (["map", "burgers", "--presett", "demo"], "Did you mean --preset?"),
        (["map", "--preset", "demo"], "namm train map flux|burgers"),
        (["--preset", "demo"], "what to train comes first"),
        (["counter", "-o", "counter.h5"], "ends in .safetensors"),
        (["counter", "--budget", "soon"], "'soon' is not"),
        ([], "usage: namm train"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, message):
    assert main(["train", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    assert not list(tmp_path.iterdir())


def test_a_counter(tmp_path, capsys):
    sizes = ["--size", "16", "--labels", "1", "3", "--n-train", "8", "--n-val", "4", "--batch-size", "4"]
    arguments = ["train", "counter", "-o", "deep/c.safetensors", *sizes, "--budget", "2 steps", "--seed", "7"]
    assert main(arguments) == 0
    assert "deep/c.safetensors counts to within" in capsys.readouterr().out
    counter = Counter.load(tmp_path / "deep" / "c.safetensors")
    training = counter.facts["training"]
    assert (training["size"], training["labels"], training["n_train"], training["n_val"]) == (16, [1, 3], 8, 4)
    assert {name: training["settings"][name] for name in ("budget", "batch_size", "seed", "learning_rate")} == {
        "budget": "2 steps",
        "batch_size": 4,
        "seed": 7,
        "learning_rate": 1e-3,
    }
    assert counter(Galaxies(size=16, count=1).images(0, "test", 0, 2)).shape == torch.Size([2])
    before = (tmp_path / "deep" / "c.safetensors").read_bytes()
    assert main(arguments) == 0
    assert main([*arguments, "--learning-rate", "0.1"]) == 1
    assert "is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "deep" / "c.safetensors").read_bytes() == before
