"""Training a counter: labels that travel with their images, what is learned, what is kept and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.constraints import Count, Counter
from namm.datasets import Galaxies
from namm.datasets.batches import Order, batches
from namm.errors import Interrupted, RunFolderError, UsageError
from namm.numerics import fold
from namm.training import trainer
from namm.training.counter import (
    COUNTER_SETTINGS,
    RIDGE,
    CountObjective,
    mean_errors,
    numbered_images,
    separate,
    set_first_weights,
    train_counter,
    turn,
)

TINY = replace(COUNTER_SETTINGS, budget="6 steps", batch_size=8, warmup_steps=2, validations=2)
SMALL = {"size": 16, "labels": (1, 2, 3), "n_train": 12, "n_val": 4, "progress": False}


# Labels


def test_numbered_images_are_those_of_their_recipes_and_stay_together_when_shuffled():
    recipes = [Galaxies(size=16, count=k) for k in (1, 2, 3)]
    numbered = numbered_images(recipes, 5, "val", 70)
    images, numbers = separate(numbered)
    assert numbered.shape == (210, 1, 17, 16)
    assert numbers.tolist() == [1.0] * 70 + [2.0] * 70 + [3.0] * 70
    for k, recipe in enumerate(recipes):
        own = recipe.images(fold(5, recipe.count), "val", 0, 70)
        assert torch.equal(images[70 * k : 70 * k + 70], own)
    known = {image.numpy().tobytes(): number for image, number in zip(images, numbers.tolist(), strict=True)}
    source = batches(numbered, Order(210, 50, seed=3), torch.device("cpu"))
    seen = []
    for step in range(5):
        x, k = separate(source.batch(step))
        assert [known[image.contiguous().numpy().tobytes()] for image in x] == k.tolist()
        seen += k.tolist()
    assert seen != sorted(seen)


def test_images_of_different_numbers_have_skies_of_their_own():
    """Galaxies too faint to see leave the skies: those of one number must not be those of another."""
    recipes = [Galaxies(size=32, count=k, signal_to_noise=-60.0, peak=0.01) for k in (1, 2, 9)]
    skies = separate(numbered_images(recipes, 0, "train", 70))[0].double().flatten(1)
    assert (torch.corrcoef(skies) - torch.eye(210)).abs().max() < 0.9


@given(st.lists(st.tuples(*[st.integers(0, 1)] * 3), min_size=1, max_size=8))
def test_images_are_turned_one_by_one(orientations):
    images = torch.rand(len(orientations), 2, 4, 4)
    turned = turn(images, torch.tensor(orientations))
    for before, after, (rows, columns, exchange) in zip(images.numpy(), turned.numpy(), orientations, strict=True):
        expected = before[:, ::-1] if rows else before
        expected = expected[:, :, ::-1] if columns else expected
        np.testing.assert_array_equal(after, expected.transpose(0, 2, 1) if exchange else expected)


def test_the_loss_is_the_squared_miscount():
    class Sum(torch.nn.Module):
        def forward(self, x):
            return x.sum((1, 2, 3))

    numbered = torch.zeros(4, 1, 5, 4)
    numbered[:, 0, 0, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    numbered[:, 0, -1] = torch.tensor([1.0, 1.0, 1.0, 6.0])[:, None]
    objective = CountObjective(Sum())
    (orientations,) = objective.draw((numbered,), torch.Generator().manual_seed(0))
    assert orientations.shape == (4, 3)
    losses = objective(numbered, orientations)
    assert losses["loss"].item() == pytest.approx((0 + 1 + 4 + 4) / 4)
    assert losses["error"].item() == pytest.approx((0 + 1 + 2 + 2) / 4)
    assert mean_errors(Known(), numbered) == {1: 1.0, 6: 2.0}


def test_the_counter_sees_images_in_the_orientation_that_was_drawn():
    class Corner(torch.nn.Module):
        def forward(self, x):
            return x[:, 0, 0, 1]

    numbered = torch.zeros(1, 1, 5, 4)
    numbered[0, 0, :4] = torch.arange(16.0).reshape(4, 4)
    for orientation, seen in (((0, 0, 0), 1), ((1, 0, 0), 13), ((0, 1, 0), 2), ((0, 0, 1), 4), ((1, 1, 1), 11)):
        assert CountObjective(Corner())(numbered, torch.tensor([orientation]))["error"].item() == seen
    draws = [
        CountObjective(Corner()).draw((numbered.expand(64, 1, 5, 4),), torch.Generator().manual_seed(seed))[0]
        for seed in range(2)
    ]
    assert not torch.equal(*draws)
    assert len({tuple(bits) for bits in torch.cat(draws).tolist()}) == 8


class Known(Counter):
    """Counts what it is shown."""

    def __init__(self):
        super().__init__(4)

    def forward(self, x):
        return x.sum((1, 2, 3))


def test_the_first_weights_are_a_least_squares_fit_and_depend_on_the_seed_alone():
    numbered = numbered_images([Galaxies(size=32, count=k) for k in (1, 11)], 0, "train", 128)
    counters = [Counter(32) for _ in range(3)]
    before = torch.random.get_rng_state()
    for counter, seed in zip(counters, (0, 0, 1), strict=True):
        set_first_weights(counter, numbered, seed)
    assert torch.equal(before, torch.random.get_rng_state())
    a, b, c = (torch.cat([p.detach().flatten() for p in counter.parameters()]) for counter in counters)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)

    images, numbers = separate(numbered)
    counter = counters[0].requires_grad_(False)
    response = counter.first(images)
    torch.testing.assert_close(response.std((0, 2, 3)), torch.ones(32), atol=0.1, rtol=0)
    means = response.mean((0, 2, 3))
    assert -2.1 < means.min() < means.max() < 0.1
    assert means.std() > 0.3
    assert counter.first.weight[::2].sum((1, 2, 3)).abs().max() < 1e-4
    # Every weight of the hidden layer is that of its feature, wherever it looks.
    assert torch.equal(counter.hidden.weight[:, :64], counter.hidden.weight[:, :1].expand(256, 64))
    # The normal equations of ridge regression: the rest is orthogonal to what enters, but for the penalty.
    inner = counter.hidden(counter.features(images).flatten(1) / 64).relu().double()
    inner -= inner.mean(0)
    rest = (numbers - counter(images)).double()
    assert rest.mean().abs() < 1e-3
    weights = counter.number.weight[0].double()
    torch.testing.assert_close(inner.T @ rest, RIDGE * 256 * weights, atol=1e-2, rtol=1e-2)
    assert mean_errors(counter, numbered)[11] < 2.5  # a constant would err by 5


# Training


def test_a_counter_learns_to_tell_few_from_many(tmp_path):
    """Two counts far apart on small images: far better than the best constant, which errs by 5."""
    settings = replace(COUNTER_SETTINGS, budget="100 steps", batch_size=16, ema_decay=0.9, warmup_steps=10)
    path = tmp_path / "counter.safetensors"
    counter = train_counter(path, size=32, labels=(1, 11), n_train=300, n_val=64, settings=settings, progress=False)
    assert counter.facts["error"] < 3.0
    assert not counter.training
    # What the file says is what can be measured again, on images that were not trained on.
    recipes = [Galaxies(size=32, count=k) for k in (1, 11)]
    errors = mean_errors(Counter.load(path), numbered_images(recipes, fold(0, "counter"), "val", 64))
    assert counter.facts["errors"] == {str(k): pytest.approx(error) for k, error in errors.items()}
    assert counter.facts["error"] == pytest.approx(sum(errors.values()) / 2)
    # As a rule: its own number of galaxies is nearer than the other.
    few, many = (Galaxies(size=32, count=k).images(9, "test", 0, 64) for k in (1, 11))
    rule = Count(counter, 11)
    assert rule(many).mean() < 0.5 * rule(few).mean()


def test_a_finished_counter_is_read_back_and_another_refused(tmp_path):
    path = tmp_path / "counter.safetensors"
    first = train_counter(path, settings=TINY, **SMALL)
    written = path.read_bytes()
    again = train_counter(path, settings=replace(TINY, log_every=1, keep=2), **SMALL)  # what only watches may change
    assert again.facts == first.facts
    assert torch.equal(again.hidden.weight, first.hidden.weight)
    with pytest.raises(RunFolderError, match=r"other settings \(n_train: 12 -> 13\) and is not overwritten"):
        train_counter(path, settings=TINY, **SMALL | {"n_train": 13})
    with pytest.raises(RunFolderError, match=r"settings.learning_rate"):
        train_counter(path, settings=replace(TINY, learning_rate=0.1), **SMALL)
    assert path.read_bytes() == written
    log = [json.loads(line) for line in (tmp_path / "counter.training" / "metrics.jsonl").read_text().splitlines()]
    assert "val/error" in log[-1]


def test_an_interrupted_training_goes_on_to_the_same_counter(tmp_path, monkeypatch):
    whole = train_counter(tmp_path / "whole.safetensors", settings=TINY, **SMALL)
    path = tmp_path / "cut.safetensors"
    update = trainer.Trainer._update

    def stopped(self, step):
        if step == 4:
            raise Interrupted("stop")
        return update(self, step)

    monkeypatch.setattr(trainer.Trainer, "_update", stopped)
    often = replace(TINY, checkpoint_seconds=0.0)
    with pytest.raises(Interrupted):
        train_counter(path, settings=often, **SMALL)
    assert not path.exists()
    steps = []
    monkeypatch.setattr(trainer.Trainer, "_update", lambda self, step: (steps.append(step), update(self, step))[1])
    resumed = train_counter(path, settings=often, **SMALL)
    assert steps == [4, 5]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


@pytest.mark.parametrize(
    ("path", "changed", "message"),
    [
        ("counter.pt", {}, "ends in .safetensors"),
        ("counter.safetensors", {"labels": ()}, "there must be some of each"),
        ("counter.safetensors", {"n_val": 0}, "there must be some of each"),
        ("counter.safetensors", {"size": 30}, "multiple of 4, not 30"),
        ("counter.safetensors", {"labels": (1, 20)}, "20 sources at least 5 px apart need not fit"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path, path, changed, message):
    with pytest.raises(UsageError, match=message):
        train_counter(tmp_path / path, settings=TINY, **SMALL | changed)
    assert not list(tmp_path.iterdir())
