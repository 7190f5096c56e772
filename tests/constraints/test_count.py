"""The counting network and its rule, against NumPy and SciPy and against networks whose count is known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from scipy import signal

from namm import Count
from namm.constraints import Counter
from namm.constraints.description import describe, rebuild
from namm.datasets import galaxies
from namm.errors import CheckpointError, ConstraintError, DataError, UsageError
from namm.experiments.count import CountData, CountRule
from namm.experiments.engine import build, build_models


class TopRow(torch.nn.Module):
    """Counts by adding up the top row."""

    def __init__(self):
        super().__init__()
        self.unit = torch.nn.Parameter(torch.ones(()))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x[:, 0, 0].sum(1) * self.unit)


def images_of(*counts: int, size: int = 16) -> torch.Tensor:
    x = torch.rand(len(counts), 1, size, size, generator=torch.Generator().manual_seed(0))
    for image, count in zip(x, counts, strict=True):
        image[0, 0] = 0
        image[0, 0, :count] = 1
    return x


# The network


def test_the_papers_network_has_its_layers():
    counter = Counter(128)
    shapes = [tuple(p.shape) for p in counter.parameters() if p.ndim > 1]
    assert shapes == [(32, 1, 3, 3), (64, 32, 3, 3), (256, 65_536), (1, 256)]
    assert counter(torch.rand(2, 1, 128, 128)).shape == (2,)


def test_the_network_is_the_one_written_down():
    """conv → ReLU → mean of 2×2 → conv → ReLU → mean of 2×2 → dense on features / pixels → ReLU → dense, in float64."""
    counter = Counter(8, filters=(3, 4), width=5)
    x = torch.rand(2, 1, 8, 8)
    w = {name: p.detach().double().numpy() for name, p in counter.named_parameters()}

    def layer(maps, kernel, bias):
        out = [
            sum(signal.correlate2d(m, k, mode="same") for m, k in zip(maps, kernels, strict=True)) + b
            for kernels, b in zip(kernel, bias, strict=True)
        ]
        out = np.maximum(np.stack(out), 0)
        return out.reshape(len(out), out.shape[1] // 2, 2, out.shape[2] // 2, 2).mean((2, 4))

    for image, got in zip(x, counter(x), strict=True):
        maps = layer(image.double().numpy(), w["first.weight"], w["first.bias"])
        maps = layer(maps, w["second.weight"], w["second.bias"])
        hidden = np.maximum(w["hidden.weight"] @ maps.reshape(-1) / 4 + w["hidden.bias"], 0)
        expected = w["number.weight"] @ hidden + w["number.bias"]
        assert got.item() == pytest.approx(expected.item(), rel=1e-5)


@given(
    size=st.sampled_from([4, 12, 32]),
    channels=st.integers(1, 2),
    filters=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    width=st.integers(1, 6),
)
def test_a_file_gives_the_counter_back_with_its_sizes_and_facts(tmp_path_factory, size, channels, filters, width):
    path = tmp_path_factory.mktemp("counter") / "counter.safetensors"
    counter = Counter(size, channels, filters, width)
    counter.facts = {"error": 0.25, "labels": [6, 7]}
    counter.save(path)
    back = Counter.load(path)
    x = torch.rand(3, channels, size, size)
    assert torch.equal(back(x), counter(x))
    assert back.config == counter.config
    assert back.facts == counter.facts
    assert not back.training
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["namm"])["facts"]["error"] == 0.25


def test_what_is_no_counter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no counter .*none.safetensors: train one with `namm train counter"):
        Counter.load(tmp_path / "none.safetensors")
    Counter(8).save(tmp_path / "good.safetensors")
    content = (tmp_path / "good.safetensors").read_bytes()
    for name, bad in (("short", content[:-100]), ("empty", b""), ("text", b"no tensors, just words " * 10)):
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(CheckpointError, match=f"{name} is truncated or not one of ours"):
            Counter.load(tmp_path / name)
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="not a counter that namm saved"):
        Counter.load(tmp_path / "foreign")
    header = {"counter": Counter(8).config, "facts": {}}
    save_file({"x": torch.zeros(1)}, tmp_path / "other", metadata={"namm": json.dumps(header)})
    with pytest.raises(CheckpointError, match="not a counter that namm saved"):
        Counter.load(tmp_path / "other")


def test_images_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="multiple of 4, not 30"):
        Counter(30)
    with pytest.raises(DataError, match=r"made for images \(B, 1, 16, 16\), not \(2, 1, 32, 32\)"):
        Counter(16)(torch.rand(2, 1, 32, 32))


# The rule


@given(st.lists(st.integers(0, 16), min_size=1, max_size=6), st.integers(0, 16))
def test_the_distance_is_the_miscount(counts, count):
    rule = Count(TopRow(), count)
    x = images_of(*counts)
    expected = torch.tensor([float(c - count) for c in counts])
    torch.testing.assert_close(rule(x), expected.abs())
    torch.testing.assert_close(rule.residual(x), expected.reshape(-1, 1, 1, 1))


def test_the_counter_is_frozen_and_stays_in_evaluation_mode():
    network = TopRow()
    rule = Count(network, 8)
    holder = torch.nn.Sequential(rule).train()
    assert holder.training
    assert not network.dropout.training
    assert not any(p.requires_grad for p in rule.parameters())
    x = images_of(5).requires_grad_()
    rule(x).sum().backward()
    assert torch.equal(x.grad[0, 0, 0], -torch.ones(16))  # one more in the top row is one miscount less
    assert x.grad[0, 0, 1:].abs().max() == 0
    assert network.unit.grad is None


def test_precision_and_autocast():
    rule = Count(Counter(16))
    x = torch.rand(2, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = rule(x)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, rule(x))
    torch.testing.assert_close(rule(x.double()).float(), rule(x))
    with torch.autocast("cpu", torch.bfloat16):
        inside = rule.residual(x)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, rule.residual(x))


def test_the_rule_names_itself_and_its_numbers():
    rule = Count(Counter(16), 5)
    assert repr(rule) == "Count(count=5)"
    assert rule.extra_repr() == "count=5"
    assert describe(rule) == {"own": "Count"}
    with pytest.raises(UsageError, match=r"'Count' is one of your own or holds a network.*constraint=rule"):
        rebuild(describe(rule))
    for counter, count in ((None, 8), (Counter(16), -1), (Counter(16), float("nan")), (Counter(16), "8")):
        with pytest.raises(UsageError, match="Count needs a network and a number"):
            Count(counter, count)


def test_data_are_judged_by_the_mean_miscount_over_the_count():
    rule = Count(TopRow(), 8)
    report = rule.check(images_of(8, 8, 9, 8))
    assert report.mean == pytest.approx(0.25)
    assert report.floor_ratio == pytest.approx(0.25 / 8)
    assert report.require_obeyed() is report
    assert "0.0312 (floor / count" in str(report)
    assert len(str(report).splitlines()) == 5
    other = rule.check(images_of(9, 9, 9, 9))
    with pytest.raises(DataError, match=r"off 8 by 1 on average over 4 images.*0\.8 is allowed"):
        other.require_obeyed()
    assert other.require_obeyed(0.2) is other
    none = replace(report, count=0.0)
    assert none.floor_ratio == pytest.approx(0.25)
    with pytest.raises(DataError, match=r"off 0 by 0\.25 on average.*; 0\.1 is allowed"):
        none.require_obeyed()


def test_a_counter_may_notice_little_of_the_noise_but_not_nothing():
    report = Count(TopRow(), 8).check(images_of(8, 8, 9, 8))
    assert replace(report, noisy_mean=0.01 * report.mean).require_active()
    with pytest.raises(ConstraintError, match="Count is inactive"):
        replace(report, mean=0.0, noisy_mean=0.0).require_active()


# From settings


def test_settings_name_the_counters_file(tmp_path):
    path = tmp_path / "counter.safetensors"
    counter = Counter(16)
    counter.save(path)
    data = CountData(size=16, count=3, counter=str(path))
    assert data.rule == CountRule(3, str(path))
    rule = build.constraint(data.rule)
    x = build.dataset(data).draw(2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rule(x), (counter(x) - 3).abs().detach())
    with pytest.raises(UsageError, match=r"namm train counter -o counter.safetensors.*--data.counter"):
        build.constraint(CountData().rule)
    with pytest.raises(CheckpointError, match="no counter"):
        build.constraint(CountRule(counter=str(tmp_path / "moved.safetensors")))


def test_a_counter_of_another_size_is_refused_before_training(tmp_path):
    from namm.experiments.presets import preset

    Counter(16).save(tmp_path / "small.safetensors")
    chosen = preset("count").settings
    data = replace(chosen.data, counter=str(tmp_path / "small.safetensors"))
    with pytest.raises(DataError, match=r"made for images \(B, 1, 16, 16\)"):
        build_models.check(replace(chosen, data=data))
    assert galaxies(1, size=chosen.data.size).shape == (1, 1, 32, 32)
