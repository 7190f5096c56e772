"""What a certificate measures and calls reached, its file, and how parts become one."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

import namm
from namm import Burgers, Certificate, Constraint, DivergenceFree, Periodic, TotalFlux, certify, constraint, polish
from namm.errors import CheckpointError, ConstraintError, DataError, UsageError
from namm.exact.certificate import ALLOWED


def on_the_rule(rule, shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rule.project(0.5 + 0.1 * x)


RULES = {
    "flux": (TotalFlux(32.0), (6, 1, 8, 8)),
    "periodic": (Periodic((2, 2)), (6, 1, 8, 8)),
    "divergence": (DivergenceFree(8), (6, 2, 8, 16)),
    "burgers": (Burgers(dt=0.05), (6, 1, 12, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_exact_data_reach_the_rule_and_data_with_errors_do_not(name, dtype):
    rule, shape = RULES[name]
    exact = on_the_rule(rule, shape)
    data = exact.to(dtype)
    assert certify(data, rule).reached.all(), certify(data, rule)
    eps = torch.finfo(dtype).eps
    wrong = data + 300 * eps * torch.randn(shape, dtype=dtype)
    assert not certify(wrong, rule).reached.any(), certify(wrong, rule)


def test_values_are_float64_of_the_stored_image():
    x = torch.rand(3, 1, 4, 4)
    certificate = certify(x, TotalFlux(5.0))
    np.testing.assert_allclose(certificate.after, np.abs(x.numpy().astype(np.float64).sum((1, 2, 3)) - 5), rtol=1e-14)
    np.testing.assert_array_equal(certificate.before, certificate.after)
    assert certificate.method == "none"
    assert (certificate.moved == 0).all()
    assert (certificate.iterations == 0).all()


def test_rounding_is_what_rounding_does():
    """Against images rounded to float32 for good: the mean ℓ of many is what the certificate expects of each."""
    rule = TotalFlux(32.0)
    exact = on_the_rule(rule, (400, 1, 8, 8))
    seen = rule(exact.float().double()).mean()
    expected = certify(exact.float(), rule).rounding
    assert 0.1 < expected.mean() / float(seen) < 10


def test_a_floor_of_the_data_is_reached_within_three_times():
    x = torch.zeros(4, 1, 2, 2)
    x[:, 0, 0, 0] = torch.tensor([0.0, 0.5, 0.999, 1.1])
    certificate = certify(x, TotalFlux(0.0), floor=1 / ALLOWED)
    assert list(certificate.reached) == [True, True, True, False]


def test_a_rule_that_is_not_finite_is_not_reached():
    rule = namm.constraint(lambda x: x.sum((1, 2, 3)).log().abs())
    x = torch.stack([torch.full((1, 2, 2), 0.25), torch.full((1, 2, 2), -1.0)])
    certificate = certify(x, rule)
    assert list(certificate.reached) == [True, False]
    assert "1 of 2" in str(certificate)


def some(n=3, **changes):
    values = {name: np.arange(n) + i for i, name in enumerate(("before", "after", "moved", "iterations", "rounding"))}
    values = {name: value.astype(np.float64) for name, value in values.items()}
    return Certificate(**{"rule": "r", "method": "Polyak", "floor": 0.1, **values, **changes})


def test_json_there_and_back(tmp_path):
    first = some(notes=("one", "two"), after=np.array([0.1, math.nan, 1 / 3]))
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(first.as_json(), allow_nan=False))
    for second in (Certificate.from_json(first.as_json()), Certificate.load(path)):
        for name in ("rule", "method", "floor", "notes"):
            assert getattr(second, name) == getattr(first, name)
        for name in ("before", "after", "moved", "iterations", "rounding", "reached"):
            np.testing.assert_array_equal(getattr(second, name), getattr(first, name))
    assert first.as_json()["reached"] == [True, False, True]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rule": 1}', None])
def test_a_file_that_is_no_certificate(text, tmp_path):
    path = tmp_path / "certificate.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CheckpointError, match=r"no certificate|no JSON object"):
        Certificate.load(path)


def test_parts_are_joined_in_order_and_a_note_is_kept_once():
    joined = Certificate.joined([some(2, notes=("a", "b")), some(3, notes=("b", "c"))])
    np.testing.assert_array_equal(joined.before, [0, 1, 0, 1, 2])
    assert joined.notes == ("a", "b", "c")
    assert (joined.rule, joined.method, joined.floor) == ("r", "Polyak", 0.1)


def test_lines_name_what_a_reader_asks_for():
    certificate = some(notes=("careful",))
    title, figures, moves, note = certificate.lines()
    assert title == "r: 3 of 3 images reach the rule, by Polyak"
    assert "largest 3.00 (image 2)" in figures
    assert "moved by 3.00 a pixel" in moves
    assert note == "  note: careful"
    assert str(certificate).count("\n") == 3
    assert "careful" in certificate._repr_html_()
    assert len(some(method="none").lines()) == 2


def test_summary_is_plain_values():
    summary = some().summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["reached"] == summary["images"] == 3
    assert (summary["after_mean"], summary["after_max"]) == (2.0, 3.0)


def test_images_that_cannot_be_measured_are_refused():
    with pytest.raises(DataError, match="NaN or inf"):
        certify(torch.full((1, 1, 2, 2), math.nan), TotalFlux())
    with pytest.raises(DataError, match="four axes"):
        certify(torch.zeros(2, 2), TotalFlux())


def test_a_certificate_of_float32_rules_has_a_note_once():
    convolution = torch.nn.Conv2d(1, 1, 1).requires_grad_(False)
    rule = namm.constraint(lambda x: convolution(x).square().mean((1, 2, 3)))
    certificate = certify(torch.rand(130, 1, 2, 2), rule)  # three chunks
    assert len(certificate.after) == 130
    (note,) = certificate.notes
    assert "float32 alone" in note


class Placed(Constraint):
    """Remembers in a buffer where it was called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor(1.0))

    def distance(self, x):
        return (x.sum((1, 2, 3)) - self.total).abs()


def test_the_rule_itself_stays_as_it_is():
    rule = Placed()
    certify(torch.rand(2, 1, 2, 2), rule)
    polish(torch.rand(2, 1, 2, 2), rule)
    assert rule.total.dtype == torch.float32


def test_a_signed_function_is_no_distance():
    with pytest.raises(ConstraintError, match=r"returned ℓ = -.* < 0: a distance from a rule is 0 where it holds"):
        certify(-torch.ones(2, 1, 4, 4), lambda x: x.mean((1, 2, 3)))


@pytest.mark.parametrize("floor", [-1.0, float("inf"), float("nan"), "a", None])
def test_a_floor_is_a_distance(floor):
    with pytest.raises(UsageError, match="floor must be a finite ℓ ≥ 0"):
        certify(torch.ones(2, 1, 4, 4), TotalFlux(16.0), floor=floor)


def test_a_rule_that_draws_random_numbers():
    x, rule = torch.rand(2, 1, 8, 8), constraint(lambda x: dropout(x, 0.5).abs().mean((1, 2, 3)))
    with pytest.raises(ConstraintError, match="of the same image: it draws random numbers"):
        certify(x, rule)


def test_a_network_is_measured_in_evaluation_mode():
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 1), nn.Flatten(0), nn.ReLU()).train()
    x = torch.rand(4, 1, 4, 4)
    certificate = certify(x, constraint(network))
    assert network.training
    np.testing.assert_allclose(certificate.after, network.eval()(x).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_a_rule_that_overflows_is_not_reached():
    certificate = certify(1e200 * torch.ones(2, 1, 2, 2, dtype=torch.float64), lambda x: x.square().sum((1, 2, 3)))
    assert np.isinf(certificate.after).all()
    assert not certificate.reached.any()
