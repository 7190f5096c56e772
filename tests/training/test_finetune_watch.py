"""Finetuning keeps the best f by ℓ, cycle error, total variation and spread, and gives a collapse up."""

import json
import math

import pytest
import torch

from namm.constraints import constraint
from namm.maps import ICNN, MirrorMap, ResNet
from namm.training.objectives import UniformNoise, Weights
from namm.training.settings import TrainSettings
from namm.training.train_map import FinetuneWatch, finetune_map


@constraint
def white(x):
    """Every pixel is 1: satisfied by losing the images."""
    return (x - 1).abs().flatten(1).mean(1)


@constraint
def balanced(x):
    """The two channels are equal."""
    return (x[:, 0] - x[:, 1]).abs().flatten(1).mean(1)


def images(n, seed):
    x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return torch.cat([x, x], 1)


def mirror():
    torch.manual_seed(0)
    f = ResNet(2, filters=4, blocks=1, downsamplings=1, normalisation="none", dropout=0.0, activation="none")
    return MirrorMap(ICNN(2, layers=1, filters=4, strong_convexity=0.999), f)


def settings(**changes):
    how = {"budget": "40 steps", "learning_rate": 1e-2, "batch_size": 16, "validations": 4, "ema_decay": 0.5}
    return TrainSettings(**how | changes)


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def finetune(pair, rule, constraint_weight, folder=None, **changes):
    y = images(32, 2) + 0.05 * torch.randn(32, 2, 8, 8, generator=torch.Generator().manual_seed(3))
    return finetune_map(
        pair,
        images(64, 0),
        y,
        rule,
        noise=UniformNoise(0.05),
        weights=Weights(constraint=constraint_weight),
        settings=settings(**changes),
        validation=(images(32, 1), y),
        folder=folder,
        floor_limit=None,
        progress=False,
    )


def test_a_collapse_ends_the_training_and_the_first_f_stands(tmp_path):
    pair = mirror()
    before = weights(pair)
    found = finetune(pair, white, 1e6, tmp_path / "a")
    assert found.collapsed
    assert found.kept_step == 0
    assert found.steps < 40
    after = weights(pair)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    saved = weights(MirrorMap.load(tmp_path / "a" / "mirror"))
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "a" / "result.json").read_text())["collapsed"]
    again = finetune(mirror(), white, 1e6, tmp_path / "a")  # read back, not trained on
    assert (again.steps, again.kept_step, again.collapsed) == (found.steps, 0, True)


def test_the_best_f_is_kept_where_nothing_is_lost(tmp_path):
    pair = mirror()
    found = finetune(pair, balanced, 1.0, budget="150 steps", learning_rate=3e-3)
    assert not found.collapsed
    y = images(32, 2) + 0.05 * torch.randn(32, 2, 8, 8, generator=torch.Generator().manual_seed(3))
    start = FinetuneWatch(mirror(), balanced, images(32, 1), y).measure()
    kept = FinetuneWatch(pair, balanced, images(32, 1), y).measure()
    assert found.kept_step > 0
    assert kept["distance"] < start["distance"]
    assert kept["cycle_error"] <= max(0.1, start["cycle_error"])
    assert abs(kept["total_variation"] - 1) <= max(0.15, abs(start["total_variation"] - 1))


def test_figures_are_what_they_are_called():
    pair, x, y = mirror(), images(32, 1), 0.5 * images(32, 2)
    found = FinetuneWatch(pair, balanced, x, y).measure()
    with torch.no_grad():
        made = pair.to_data(y).double().numpy()
        back = pair.to_data(pair.to_mirror(x))
    assert found["distance"] == pytest.approx(abs(made[:, 0] - made[:, 1]).mean(), rel=1e-5)
    assert found["cycle_error"] == pytest.approx(float((x - back).abs().mean() / x.abs().mean()), rel=1e-5)
    assert found["spread"] == pytest.approx(made.std(0, ddof=1).mean() / x.double().std(0).mean().item(), rel=1e-5)


def test_an_f_that_overflows_has_collapsed():
    pair = mirror()
    with torch.no_grad():
        for parameter in pair.f.parameters():
            parameter.fill_(math.nan)
    watch = FinetuneWatch(pair, balanced, images(8, 1), images(8, 2))
    good = FinetuneWatch(mirror(), balanced, images(8, 1), images(8, 2)).measure()
    assert watch.has_collapsed(watch.measure(), good)
    assert not watch.improves(watch.measure(), good, good)


def test_a_killed_finetuning_ends_with_the_same_f(tmp_path):
    """A checkpoint carries the best weights: resumed from half-way, the same f is kept, bit for bit."""
    whole = mirror()
    first = finetune(whole, balanced, 1.0, tmp_path / "whole", checkpoint_seconds=0.0, keep=100)
    (tmp_path / "cut" / "checkpoints").mkdir(parents=True)
    source = tmp_path / "whole"
    (tmp_path / "cut" / "settings.json").write_text((source / "settings.json").read_text())
    name = "step-000000025.safetensors"
    (tmp_path / "cut" / "checkpoints" / name).write_bytes((source / "checkpoints" / name).read_bytes())
    resumed = mirror()
    second = finetune(resumed, balanced, 1.0, tmp_path / "cut", checkpoint_seconds=0.0, keep=100)
    assert (second.steps, second.kept_step) == (first.steps, first.kept_step)
    left, right = weights(whole), weights(resumed)
    assert all(torch.equal(left[each], right[each]) for each in left)
