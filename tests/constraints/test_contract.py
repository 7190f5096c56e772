"""`check`: what it measures, and one refusal for each way to break the contract."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from namm.constraints import Constraint, TotalFlux, constraint, contract
from namm.constraints.contract import ConstraintReport, check_at, unusual
from namm.datasets.readers import LazyImages
from namm.errors import ConstraintError, DataError, UsageError

TOTAL = 10.0


def data(n: int = 20) -> torch.Tensor:
    """Images whose pixels add up to 10, in float64."""
    x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x * (TOTAL / x.sum((1, 2, 3), keepdim=True))


def excess(x: torch.Tensor) -> torch.Tensor:
    return x.sum((1, 2, 3)) - TOTAL


def refused(fn, match: str, x: torch.Tensor | None = None) -> None:
    with pytest.raises(ConstraintError, match=rf"^rule {match}"):
        constraint(fn, name="rule").check(data() if x is None else x)


def test_floor_is_measured_over_all_batches():
    x = data(23)
    x[17] += 1e-4  # less than the noise: the worst image is the worst of the data
    distance = abs(x.numpy().sum((1, 2, 3)) - TOTAL)
    report = TotalFlux(TOTAL).check(x, batch_size=5)
    assert (report.name, report.n, report.worst, report.noise) == ("TotalFlux", 23, 17, 0.1)
    measured = [report.mean, report.std, report.max]
    assert measured == pytest.approx([distance.mean(), distance.std(), 0.0064], rel=1e-9)


def test_noise_has_the_asked_size():
    """Noise of std s on n pixels moves their sum by N(0, n s²), whose mean absolute value is s √(2n/π)."""
    x = data(2000)
    for noise in (0.1, 0.3):
        report = TotalFlux(TOTAL).check(x, noise=noise)
        assert report.noisy_mean == pytest.approx(noise * x.numpy().std() * np.sqrt(2 * 64 / np.pi), rel=0.05)
        assert report.gradient_norm == pytest.approx(8.0)  # the gradient is ±1 on each of 64 pixels
        assert report.floor_ratio == report.mean / report.noisy_mean < 1e-12


def test_noise_is_measured_by_the_spread_between_images_too():
    x = torch.linspace(0, 10, 2000).reshape(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    balance = constraint(lambda x: (x[..., :4] - x[..., 4:]).sum((1, 2, 3)).abs())
    expected = 0.1 * x.numpy().std() * np.sqrt(2 * 64 / np.pi)
    assert balance.check(x).noisy_mean == pytest.approx(expected, rel=0.05)


def test_report_is_the_same_whatever_the_batches():
    reports = [TotalFlux(TOTAL).check(data(), batch_size=size) for size in (256, 7, 7, 1)]
    first = dataclasses.astuple(reports[0])[1:]
    assert all(dataclasses.astuple(report)[1:] == pytest.approx(first, rel=1e-12) for report in reports)
    assert reports[1] == reports[2]


def test_check_works_where_gradients_are_off():
    x = data()
    expected = TotalFlux(TOTAL).check(x)
    with torch.inference_mode():
        assert TotalFlux(TOTAL).check(x) == expected
    with torch.no_grad():
        assert TotalFlux(TOTAL).check(x) == expected


def test_check_leaves_the_data_alone_even_if_the_function_does_not():
    x = data()
    before = x.clone()
    constraint(lambda x: x.data.mul_(0.5).sum((1, 2, 3)) * 0 + excess(x).abs()).check(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("level", "std"), [(0.0, 1.0), (0.1, 0.1), (-1234.567, 1234.567)])
def test_constant_data_are_checked_with_noise_of_their_own_level(level, std):
    x = torch.full((500, 1, 8, 8), level)
    report = TotalFlux(float(x[0].double().sum())).check(x)
    assert report.noisy_mean == pytest.approx(0.1 * std * np.sqrt(128 / np.pi), rel=0.1)


def test_obedient_data_pass_and_others_are_reported_with_their_floor():
    x = data()
    report = TotalFlux(TOTAL).check(x)
    assert report.require_obeyed() is report
    with pytest.raises(DataError, match=r"data break the constraint TotalFlux: mean distance 20 .* image \d+"):
        TotalFlux(30.0).check(x).require_obeyed()
    ratio = TotalFlux(30.0).check(x).floor_ratio
    TotalFlux(30.0).check(x).require_obeyed(limit=ratio)


def test_the_report_reads_as_text():
    report = ConstraintReport("rule", 12, 0.25, 0.125, 0.75, 7, 0.1, 0.5, 3.0)
    text = str(report)
    for part in (
        "rule on 12 images",
        "mean 0.25, std 0.125, max 0.75 at image 7",
        "mean 0.5 with",
        "0.5 (floor",
    ):
        assert part in text
    assert "inactive" not in text
    assert "inactive" in str(dataclasses.replace(report, noisy_mean=0.0))


@pytest.mark.parametrize(("mean", "ratio"), [(0.0, 0.0), (1.0, float("inf"))])
def test_ratio_where_noise_changes_nothing(mean, ratio):
    assert ConstraintReport("rule", 1, mean, 0.0, mean, 0, 0.1, 0.0, 0.0).floor_ratio == ratio


def test_refuses_what_is_not_a_tensor():
    refused(lambda x: excess(x).abs().tolist(), "returned list, not a tensor")


def test_refuses_a_scalar():
    refused(lambda x: excess(x).abs().mean(), r"returned shape \(\) for 20 images, expected \(20,\)")


def test_refuses_a_column():
    refused(lambda x: excess(x).abs()[:, None], r"returned shape \(20, 1\) for 20 images")


def test_refuses_a_shape_that_fits_one_batch_by_chance():
    refused(lambda x: x.abs().mean((0, 1, 2)), r"returned shape \(8,\) for 1 images", data(8))


def test_refuses_integers():
    refused(lambda x: (excess(x).abs() > 1).long(), r"returned torch\.int64, not a floating-point distance")


def test_refuses_a_negative_value_at_its_worst_image():
    x = data()
    x[13] -= 0.01
    refused(excess, r"is negative, -0\.64 at image 13 of the data: .* absolute value", x)


def test_refuses_a_value_that_turns_negative_off_the_data():
    refused(lambda x: torch.where(excess(x).abs() < 1e-9, 0.0, excess(x)), "is negative, .* with noise of 0.1")


def test_refuses_nan_at_its_image():
    x = data()
    x[4] = 0
    refused(lambda x: (excess(x) / x.sum((1, 2, 3)).abs()).abs() * 0, "is nan at image 4 of the data", x)


def test_refuses_infinity():
    refused(lambda x: excess(x).abs().round(decimals=9).log().abs(), "is inf at image 0 of the data")


def test_refuses_a_detached_graph():
    refused(lambda x: excess(x.detach()).abs(), "gives no gradient: its value does not depend differentiably on x")


def test_refuses_a_graph_that_misses_x():
    weight = torch.nn.Parameter(torch.ones(()))
    refused(lambda x: weight * excess(x.detach()).abs(), "gives no gradient: its value does not depend")


def test_refuses_no_grad():
    refused(torch.no_grad()(lambda x: excess(x).abs()), "gives no gradient: its value does not depend")


def test_refuses_numpy():
    refused(
        lambda x: torch.from_numpy(abs(x.numpy().sum((1, 2, 3)) - TOTAL)),
        r"gives no gradient: it can be evaluated but not differentiated \(Can't call numpy",
    )


def test_refuses_changing_x_in_place():
    refused(lambda x: excess(x.clamp_(min=0)).abs(), r"gives no gradient: .*in-place operation")


def test_an_error_of_the_function_itself_stays_as_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        constraint(lambda x: x @ torch.ones(3, 3, dtype=x.dtype)).check(data())


def test_refuses_rounding():
    refused(lambda x: excess((100 * x).round() / 100).abs(), "has zero gradient on all noisy images")


def test_refuses_a_rule_that_is_zero_everywhere():
    refused(lambda x: 0.0 * excess(x), "is flat on the data, and even with noise of 10")


def test_accepts_an_inequality_that_is_inactive_at_this_noise():
    rule = constraint(lambda x: torch.relu(excess(x) - 2))
    report = rule.check(data())
    assert (report.noisy_mean, report.gradient_norm) == (0.0, 0.0)
    assert rule.check(data(), noise=3.0).gradient_norm > 0


def test_a_rule_that_does_not_notice_the_noise_is_refused_where_it_is_to_be_learned():
    rule = constraint(lambda x: torch.relu(excess(x) - 2), name="bounded")
    with pytest.raises(ConstraintError, match=r"bounded is inactive: .* 0 on the data and 0 with noise of 0\.1 data"):
        rule.check(data()).require_active()
    loud = rule.check(data(), noise=3.0)
    assert loud.require_active() is loud


def test_noise_in_the_units_of_the_images():
    x = data()
    std = float(x.std(correction=0))
    found, expected = (
        dataclasses.astuple(each)[1:]
        for each in (check_at(TotalFlux(TOTAL), x, 0.3 * std), TotalFlux(TOTAL).check(x, noise=0.3))
    )
    assert found == pytest.approx(expected, rel=1e-9)


@given(st.floats(-12, 12), st.floats(-9, 9), st.floats(-3, 3))
def test_unusual_noise_and_weights_are_named_and_only_those(cost, noise, std):
    """The weight is such that λ·ℓ is 10^cost times σ_max, which is 10^noise standard deviations."""
    std, noise, cost = 10**std, 10**noise, 10**cost
    assume(all(abs(math.log(cost / limit)) > 1e-6 for limit in (1e-4, 1e5)))
    assume(all(abs(math.log(noise / limit)) > 1e-6 for limit in (1e-4, 10)))
    sigma, distance = noise * std, 0.7
    report = ConstraintReport("rule", 5, 0.0, 0.0, 0.0, 0, noise, distance, 1.0)
    found = " ".join(unusual(report, sigma, cost * sigma / distance))
    assert ("σ_max =" in found and "(map.sigma_max)" in found) == (not 1e-4 < noise < 10)
    assert ("drowns" in found, "too little" in found) == (noise > 10, noise < 1e-4)
    assert ("will ignore the rule" in found, "all but the rule" in found) == (cost < 1e-4, cost > 1e5)
    assert unusual(report, sigma, 0.0) == unusual(report, sigma, 10 * sigma / distance)  # no rule, no word about it


def test_refuses_a_root_at_zero():
    refused(
        lambda x: excess(x).round(decimals=9).pow(2).sqrt() + (x[:, 0, 0, 0] - x[:, 0, 0, 0]).pow(2).sqrt(),
        "has a gradient that is not finite at image 0 of the data, where the distance is 0",
    )


def test_accepts_a_gradient_that_vanishes_on_the_set_only():
    rule = constraint(lambda x: (x[..., :4] - x[..., 4:]).abs().mean((1, 2, 3)))
    x = data()
    x[..., 4:] = x[..., :4]
    assert rule.check(x).mean == 0
    assert rule.check(x).gradient_norm > 0


def test_refuses_coupled_images():
    refused(lambda x: excess(x).abs() + excess(x).abs().mean(), r"mixes the images of a batch: .* in a batch of 8")


def test_refuses_coupling_even_when_there_is_one_image():
    refused(lambda x: (excess(x) - excess(x).mean()).abs() + excess(x).abs(), "mixes the images", data(1))


def test_refuses_dropout():
    torch.manual_seed(0)
    refused(lambda x: torch.nn.functional.dropout(x, 0.5).abs().mean((1, 2, 3)), "mixes .* dropout in eval mode")


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (data().numpy(), "needs a torch tensor .* got ndarray"),
        (data()[:, 0], r"needs images of shape \(B, C, H, W\), got shape \(20, 8, 8\)"),
        (data().long(), r"needs floating-point images, got torch\.int64"),
        (data()[:0], r"cannot be checked on an empty batch, got shape \(0, 1, 8, 8\)"),
    ],
)
def test_refuses_data_of_the_wrong_kind(x, match):
    with pytest.raises(DataError, match=f"TotalFlux {match}"):
        TotalFlux().check(x)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_refuses_data_that_are_not_finite(value):
    x = data()
    x[11, 0, 2, 5] = value
    with pytest.raises(DataError, match=rf"hold {value} at image 11, \(channel, row, column\) \(0, 2, 5\)"):
        TotalFlux().check(x, batch_size=4)


@pytest.mark.parametrize("setting", [{"batch_size": 0}, {"noise": 0.0}, {"noise": float("nan")}])
def test_refuses_settings_out_of_range(setting):
    with pytest.raises(UsageError, match="check needs batch_size ≥ 1 and a finite noise > 0"):
        TotalFlux().check(data(), **setting)


def test_check_brings_the_images_to_the_rule_and_leaves_it_there(monkeypatch):
    class Placed(Constraint):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.tensor(TOTAL, dtype=torch.float64, device="meta"))

        def distance(self, x):
            raise AssertionError

    x = data()
    assert contract._device(Placed(), x).type == "meta"
    assert contract._device(constraint(excess), x) == x.device
    # float64 stands for a device: whatever is done to bring images there is done to all that the rule sees.
    monkeypatch.setattr(contract, "_device", lambda rule, x: torch.float64)
    seen = set()
    rule = constraint(lambda x: seen.add(x.dtype) or excess(x).abs())
    assert rule.check(x.float(), batch_size=8).n == len(x)
    assert seen == {torch.float64}


def test_images_in_a_file_are_checked_slice_by_slice(tmp_path):
    x = data(23).float()
    x[17] += 1e-3
    np.save(tmp_path / "x.npy", x.numpy())
    read = []

    class Counting(LazyImages):
        def __getitem__(self, index):
            rows = super().__getitem__(index)
            read.append(len(rows))
            return rows

    lazily = Counting(np.load(tmp_path / "x.npy", mmap_mode="r"), "NCHW", tmp_path / "x.npy")
    assert TotalFlux(TOTAL).check(lazily, batch_size=8) == TotalFlux(TOTAL).check(x, batch_size=8)
    assert max(read) <= 8
    one = Counting(x[:1].numpy(), "NCHW", "one")
    assert TotalFlux(TOTAL).check(one) == TotalFlux(TOTAL).check(x[:1])
