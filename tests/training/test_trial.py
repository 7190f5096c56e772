"""Steps per minute, on a machine that has other things to do."""

import pytest
import torch

from namm.training import trial
from namm.training.trial import TIMED, WARM_UP, seconds_per_step


class Machine:
    """A clock that steps move; its processes measure the same."""

    def __init__(self, seconds, device: str = "cpu") -> None:
        self.seconds, self.now, self.steps = seconds, 0.0, []
        self.device = torch.device(device)

    def update(self, step: int) -> None:
        self.now += self.seconds(step)
        self.steps.append(step)

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "mean"
        return value


@pytest.fixture
def measure(monkeypatch):
    def run(machine: Machine, seconds: float = 0.0) -> float:
        monkeypatch.setattr(trial, "clock", lambda device: machine.now)
        return seconds_per_step(machine.update, machine, seconds)

    return run


def test_steps_are_timed_after_a_warm_up(measure):
    machine = Machine(lambda step: 100.0 if step < WARM_UP else 0.5)
    assert measure(machine) == pytest.approx(0.5)
    assert machine.steps == list(range(WARM_UP + TIMED))


def test_a_busy_moment_costs_nothing(measure):
    """Half of the steps slowed down by something else, the first ones among them."""
    machine = Machine(lambda step: 3.0 if step % 4 < 2 or step < 6 else 1.0)
    assert measure(machine, seconds=1000.0) == pytest.approx(1.0)


def test_a_long_training_has_a_longer_trial(measure):
    short, long = Machine(lambda step: 0.1), Machine(lambda step: 0.1)
    measure(short, seconds=20.0)
    measure(long, seconds=200.0)
    assert len(short.steps) == WARM_UP + TIMED
    assert len(long.steps) == pytest.approx(trial.SHARE * 200.0 / 0.1, abs=3)


def test_a_gpu_is_not_waited_for_after_each_step(measure, monkeypatch):
    monkeypatch.setattr(torch, "tensor", lambda values, device: torch.as_tensor(values))
    machine = Machine(lambda step: 0.01, device="cuda")
    assert measure(machine) == pytest.approx(0.01)
    assert len(machine.steps) == WARM_UP + TIMED * trial.GROUP


def test_the_clock_of_a_cpu_runs():
    first = trial.clock(torch.device("cpu"))
    assert trial.clock(torch.device("cpu")) >= first > 0
