"""Budgets, rates and settings out of range."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from namm.errors import UsageError
from namm.training.settings import LATER, Budget, TrainSettings, evenly, learning_rate


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("100 steps", 100),
        ("1e3 steps", 1000),
        ("1 step", 1),
        ("3 epochs", 19),
        ("0.5 epochs", 4),
        ("2.5 minutes", None),
    ],
)
def test_budget(text, steps):
    assert Budget.parse(text).steps(images=100, batch_size=16) == steps


@pytest.mark.parametrize("text", ["", "100", "steps", "-3 steps", "0 steps", "1.2.3 steps", "5 hours", "1e999 steps"])
def test_bad_budgets_are_refused(text):
    with pytest.raises(UsageError, match="N steps"):
        TrainSettings(budget=text)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("batch_size", 0),
        ("learning_rate", 0.0),
        ("ema_decay", 1.0),
        ("clip", -1.0),
        ("schedule", "linear"),
        ("keep", 0),
        ("warmup_steps", -5),
        ("betas", (1.5, 0.9)),
        ("validations", -1),
        ("optimiser", "sgd"),
        ("averages", (0.9, 1.0)),
        ("averages", (0.9, 0.9)),
        ("averages", (0.999,)),  # that of ema_decay
        ("weight_decay", 0.1),  # Adam has none
    ],
)
def test_settings_out_of_range_are_named(setting, value):
    with pytest.raises(UsageError, match=setting):
        TrainSettings(**{setting: value})


def test_warm_up_then_cosine():
    settings = TrainSettings(learning_rate=2.0, schedule="cosine", warmup_steps=10)
    rates = [learning_rate(settings, step, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(1.0)
    assert rates[35] == pytest.approx(1 + math.cos(math.pi / 4))
    assert rates[110] == pytest.approx(0.0, abs=1e-12)


def test_constant_rate():
    settings = TrainSettings(learning_rate=2.0, warmup_steps=4)
    assert [learning_rate(settings, step, 6) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@given(count=st.integers(1, 30), total=st.integers(1, 1000))
def test_evenly_spaced_steps_end_at_the_last(count, total):
    steps = evenly(count, total)
    assert max(steps) == total
    assert min(steps) >= 1
    assert len(steps) == min(count, total)


def test_no_milestones():
    assert evenly(0, 10) == frozenset()


LATER_CHANGES = [{"optimiser": "muon"}, {"averages": (0.5,)}]


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"precision": "fp32"}, {"compile": True}, *LATER_CHANGES])
def test_a_step_costs_the_same_unless_its_work_differs(change):
    settings = TrainSettings()
    assert settings.same_step(replace(settings, budget="9 steps", learning_rate=1.0, seed=5))
    assert not settings.same_step(replace(settings, **change))


def test_settings_that_came_later_are_told_only_where_they_differ():
    """The records of earlier trainings, and the keys of runs, know none of them."""
    assert {name: getattr(TrainSettings(), name) for name in LATER} == LATER
    assert not TrainSettings().identity().keys() & LATER.keys()
    changed = TrainSettings(optimiser="muon", weight_decay=0.1, averages=(0.5,)).identity()
    assert {name: changed[name] for name in LATER} == {"optimiser": "muon", "weight_decay": 0.1, "averages": (0.5,)}
