"""Budgets in minutes on a machine that is busy now and then: the clock is moved by the steps themselves."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from namm.errors import Interrupted, NammWarning
from namm.training import checkpoint, trainer
from namm.training.log import read_metrics
from namm.training.objectives import Objective
from namm.training.settings import MARKS, MEASURED, TrainSettings, planned_steps, replan_steps
from namm.training.trainer import GROUP, WARM_UP, train

TRIAL = WARM_UP + MEASURED
"""Steps that are timed and undone before the first."""
DATA = (torch.rand(64, 1, 2, 2, generator=torch.Generator().manual_seed(0)),)
MINUTE = TrainSettings(
    budget="1 minutes", batch_size=8, learning_rate=0.05, ema_decay=0.9, log_every=10**6, checkpoint_seconds=1e9
)


class Machine(Objective):
    """Learns a mean; the k-th forward pass in training takes `seconds(k)`, the steps of the trial included."""

    def __init__(self, seconds) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1, 2, 2))
        self.seconds, self.passes, self.now = seconds, -1, 0.0  # the rehearsed step comes first

    def draw(self, batch, generator):
        return (torch.randn(batch[0].shape, generator=generator),)

    def forward(self, *tensors):
        x, z = tensors
        if self.training:
            self.now += self.seconds(self.passes)
            self.passes += 1
        else:
            self.now += 1000.0  # which no budget may count
        return {"loss": (x + 0.1 * z - self.mean).square().mean()}


@pytest.fixture
def fit(monkeypatch):
    def run(seconds, settings=MINUTE, **options):
        machine = seconds if isinstance(seconds, Machine) else Machine(seconds)
        monkeypatch.setattr(trainer, "clock", lambda device: machine.now)
        return machine, train(machine, DATA, settings, progress=False, **options)

    return run


def changed(**changes) -> TrainSettings:
    return TrainSettings(**{**MINUTE.__dict__, **changes})


def test_a_quiet_machine_makes_the_steps_that_fit(fit, tmp_path):
    machine, result = fit(lambda k: 100.0 if k < WARM_UP else 0.25, folder=tmp_path)
    assert result.steps == 240
    assert result.compute_seconds == pytest.approx(60.0)
    assert machine.passes == TRIAL + 240
    first = checkpoint.read(sorted((tmp_path / "checkpoints").glob("*"))[0])
    assert first.facts["total"] == 240


@pytest.mark.parametrize("slowness", [0.05, 0.2, 3.0, 20.0])
def test_a_trial_that_was_unlike_the_training_costs_nothing(fit, slowness):
    """The machine was busy during the trial, or had been quiet until it ended."""
    _, result = fit(lambda k: 0.1 * slowness if k < TRIAL else 0.1)
    assert result.compute_seconds == pytest.approx(60.0, rel=0.01)
    assert result.steps == pytest.approx(600, rel=0.01)


@pytest.mark.parametrize(("first", "last"), [(0, 30), (75, 150), (150, 300)])
def test_a_busy_while_is_made_up_for(fit, first, last):
    """Three times slower between these steps."""
    _, result = fit(lambda k: 0.3 if first <= k - TRIAL < last else 0.1)
    assert result.compute_seconds == pytest.approx(60.0, rel=0.05)
    assert result.steps == pytest.approx(600 - 2 * (last - first), rel=0.05)


def test_a_minute_that_holds_few_steps_is_kept_too(fit):
    _, result = fit(lambda k: 60.0 if k < TRIAL else 5.0)
    assert result.steps == 12


def test_a_machine_that_is_far_too_slow_makes_what_it_measures_and_no_more(fit):
    _, result = fit(lambda k: 0.1 if k < TRIAL else 40.0)
    assert result.steps == 600 / 32 + 0.25  # the first mark


@pytest.mark.parametrize("budget", ["300 steps", "40 epochs"])
def test_counted_budgets_never_change(fit, budget, tmp_path):
    _, result = fit(lambda k: 0.01 * (1 + k), changed(budget=budget, log_every=10), folder=tmp_path)
    assert result.steps == {"300 steps": 300, "40 epochs": 320}[budget]
    assert "planned_steps" not in read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert {checkpoint.read(path).facts["total"] for path in (tmp_path / "checkpoints").glob("*")} == {result.steps}


def test_weights_are_those_of_as_many_steps_counted(fit):
    timed, result = fit(lambda k: 0.5 if k < TRIAL + 20 else 0.1)
    counted, _ = fit(lambda k: 0.0, changed(budget=f"{result.steps} steps"))
    assert torch.equal(timed.mean, counted.mean)


def test_rates_validations_and_snapshots_follow_the_number_of_steps(fit, tmp_path):
    settings = changed(schedule="cosine", log_every=1, validations=4, milestones=2)
    _, result = fit(lambda k: 1.0 if k < TRIAL else 0.1, settings, folder=tmp_path, validation=DATA)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines]
    assert result.steps == len(rates) == 600
    assert rates[-1] < 1e-4 * rates[0]
    assert rates[300] == pytest.approx(0.5 * settings.learning_rate, rel=0.01)
    validated = [line["step"] for line in lines if "val/loss" in line]
    assert validated[-4:] == [150, 300, 450, 600]
    assert [path.stem for path in sorted((tmp_path / "milestones").glob("*"))][-2:] == [
        "step-000000300",
        "step-000000600",
    ]


def test_what_was_asked_and_what_was_used_are_reported(fit, tmp_path):
    _, result = fit(lambda k: 1.0 if k < TRIAL else 0.1, folder=tmp_path)
    assert result.budget == "1 minutes"
    assert (result.steps, result.compute_seconds) == (600, pytest.approx(60.0))
    assert json.loads((tmp_path / "result.json").read_text())["budget"] == "1 minutes"
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert {line["asked_seconds"] for line in lines} == {60.0}
    assert [(line["step"], line["planned_steps"]) for line in lines][:2] == [(8, 600), (19, 600)]
    assert (lines[-1]["step"], lines[-1]["seconds"]) == (600, pytest.approx(60.0))
    assert "1 minutes" in result._repr_html_()


class Stopped(Machine):
    """Is asked to stop in a given pass."""

    def __init__(self, seconds, stop_at: int) -> None:
        super().__init__(seconds)
        self.stop_at = stop_at

    def forward(self, *tensors):
        if self.passes == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(*tensors)


def test_a_resumed_training_keeps_the_number_and_ends_with_the_same_bits(fit, tmp_path):
    def seconds(k):
        return 0.4 if k < TRIAL + 30 else 0.1

    whole, result = fit(seconds)
    with pytest.raises(Interrupted, match=f"step 480 of {result.steps} "):  # past the last mark
        fit(Stopped(seconds, TRIAL + 479), folder=tmp_path)
    resumed, again = fit(lambda k: 7.0, folder=tmp_path)  # another machine by now
    assert again.steps == result.steps
    assert torch.equal(resumed.mean, whole.mean)
    assert again.compute_seconds > result.compute_seconds


def test_the_state_is_saved_at_every_mark(fit, tmp_path):
    """A training killed after a mark goes on with the number that it set there."""
    fit(lambda k: 0.1, changed(keep=100), folder=tmp_path)
    steps = {int(path.stem.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("*")}
    assert steps == {0, 600} | replan_steps(600)


def test_processes_agree_on_a_number(fit, monkeypatch):
    """Each measures for itself, and the mean over all decides."""
    monkeypatch.setattr("accelerate.Accelerator.reduce", lambda _, value, reduction: 2 * value)
    _, result = fit(lambda k: 0.1)
    assert result.steps == 300


def test_a_gpu_is_not_waited_for_after_each_step(fit, monkeypatch):
    waits = []
    machine = Machine(lambda k: 0.1)
    monkeypatch.setattr(trainer, "clock", lambda device: waits.append(machine.passes) or machine.now)
    accelerator, unused = trainer.Accelerator(cpu=True), {"after_step": None, "watch": None, "snapshots": frozenset()}
    loop = trainer.Trainer(machine, DATA, MINUTE, None, None, accelerator, **unused, title="map")
    loop.device, loop._mean_over_processes, machine.passes = torch.device("cuda"), lambda value: value, 0
    monkeypatch.setattr(loop, "_update", lambda step: machine(DATA[0], DATA[0]))
    assert loop._first_estimate() == 600
    assert waits == [GROUP * k for k in range(MEASURED + 1) for _ in range(2)][1:-1]


@given(total=st.integers(1, 10**6))
def test_marks_are_few_and_early(total):
    marks = replan_steps(total)
    assert len(marks) <= len(MARKS)
    assert all(min(total, MEASURED) <= mark <= max(MEASURED, 7 * total / 8 + 1) for mark in marks)


@given(asked=st.floats(0.1, 1e5), step=st.integers(1, 10**5), spent=st.floats(0.01, 1e5))
def test_the_plan_is_what_the_measured_speed_allows(asked, step, spent):
    total = planned_steps(asked, step, spent)
    assert total >= step
    if total > step:
        assert total * spent / step == pytest.approx(asked, abs=0.51 * spent / step)


def test_a_user_is_warned_where_minutes_of_compute_are_many_more(fit, monkeypatch):
    machine = Machine(lambda k: 1.0)
    slow = SimpleNamespace(perf_counter=lambda: 5 * machine.now, monotonic=time.monotonic)
    monkeypatch.setattr(trainer, "time", slow)
    with pytest.warns(NammWarning, match="training: 1 minutes of compute will take about 5.0 times as long here"):
        fit(machine)
