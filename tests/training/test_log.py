"""What a log line says of the steps since the last one."""

import json

import pytest
import torch

from namm.training.log import LossAverages


def losses(loss: float, part: float) -> dict[str, torch.Tensor]:
    return {"loss": torch.tensor(loss, requires_grad=True), "part": torch.tensor(part)}


def test_means_are_weighted_and_exact():
    averages = LossAverages()
    assert averages.means() == {}
    averages.add(losses(1.0, 16777216.0), weight=3)
    averages.add(losses(5.0, 1.0))
    means = averages.means()
    assert list(means) == ["loss", "part"]
    assert means["loss"].item() == pytest.approx(2.0)
    assert means["part"].item() == (3 * 16777216 + 1) / 4  # lost in float32
    assert not means["loss"].requires_grad


def test_the_first_loss_that_is_not_finite_is_remembered():
    averages = LossAverages()
    assert averages.first_not_finite() is None
    for step, value in enumerate([1.0, 2.0, float("nan"), 3.0, float("inf")]):
        averages.add(losses(value, float("nan")), step=step)
    assert averages.first_not_finite() == 2
    fine = LossAverages()
    fine.add(dict(reversed(losses(1.0, float("nan")).items())), step=7)  # known by its name, not by its place
    assert fine.first_not_finite() is None


def test_averages_go_on_from_json_to_the_bit():
    values = [(0.1 * k, 1e8 + k / 7) for k in range(9)]
    whole, first = LossAverages(), LossAverages()
    for value in values:
        whole.add(losses(*value))
    for value in values[:4]:
        first.add(losses(*value))
    rest = LossAverages.from_json(json.loads(json.dumps(first.as_json())), torch.device("cpu"))
    for value in values[4:]:
        rest.add(losses(*value))
    assert {name: float(mean) for name, mean in rest.means().items()} == {
        name: float(mean) for name, mean in whole.means().items()
    }
    assert LossAverages.from_json({}, torch.device("cpu")).means() == {}
    assert LossAverages.from_json(LossAverages().as_json(), torch.device("cpu")).means() == {}
