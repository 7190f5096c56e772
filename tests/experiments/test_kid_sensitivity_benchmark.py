"""The benchmark that says what KID sees."""

import json
import math
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

from namm import Burgers
from namm.datasets import burgers_trajectories

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kid_sensitivity.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_changes_are_what_they_are_called(script):
    x, rule = burgers_trajectories(20, split="test"), Burgers()
    made = {name: change() for name, change in script["changes"](x, rule).items()}
    for name in ("fine × 0.9", "fine × 1.1", "start + 0.002"):  # solved on: the rule is kept
        assert rule(made[name]).max() < 1e-6
        assert not torch.equal(made[name], x)
    before, after = (torch.fft.rfft(images[..., 0]) for images in (x, made["fine × 0.9"]))
    torch.testing.assert_close(after[..., :16], before[..., :16], rtol=0, atol=1e-4)
    torch.testing.assert_close(after[..., 16:], 0.9 * before[..., 16:], rtol=0, atol=1e-4)
    start = made["start + 0.002"][..., 0] - x[..., 0]
    assert start.square().mean().sqrt() == pytest.approx(0.002, rel=0.1)
    assert made["contrast × 1.003"].std() == pytest.approx(1.003 * float(x.std()), rel=1e-5)
    for kind, errors in script["ERRORS"].items():
        for rms in errors:
            change = made[f"{kind} {rms:g}"] - x
            assert change.square().mean().sqrt() == pytest.approx(rms, rel=0.05)
            steps = change.diff(dim=-1).square().mean().sqrt() / rms  # √2 of white noise
            assert steps == pytest.approx(2**0.5, rel=0.05) if kind == "noise" else steps < 0.7


def test_the_power_of_a_power_law(script):
    found = {1.0: 7.0, 3.0: 5 * 3**2.5, 2.0: 5 * 2**2.5}
    assert script["growth"](found) == pytest.approx(2.5)
    assert math.isnan(script["growth"](found | {2.0: -1e-9}))


def test_the_command_compares_with_the_same_images(script, monkeypatch, tmp_path, capsys):
    """By a network whose one feature is the picture's contrast."""

    class Contrast(torch.nn.Module):
        def forward(self, pictures):
            return pictures.std((1, 2, 3))[:, None].expand(-1, 8)

    names = script["main"].__globals__
    monkeypatch.setitem(names, "Extractor", partial(names["Extractor"], network=Contrast()))
    file = tmp_path / "kid.json"
    assert script["main"](["--n", "6", "--json", str(file)]) == 0
    assert "KID grows as the power" in capsys.readouterr().out
    found = json.loads(file.read_text())
    x, rule = burgers_trajectories(6, split="test"), Burgers()
    noisy = script["changes"](x, rule)["noise 0.002"]()
    assert found["images"] == 6
    assert found["distance"]["noise 0.002"] == pytest.approx(float(rule(noisy).mean()), rel=1e-5)
    before, after = (each.clamp(0, 1).std((1, 2, 3))[:, None].expand(-1, 8).double() for each in (x, noisy))
    assert found["kid"]["noise 0.002"] == pytest.approx(names["moved"](before, after), rel=1e-3, abs=1e-12)


def test_one_image_is_not_enough(script, capsys):
    with pytest.raises(SystemExit):
        script["main"](["--n", "1"])
    assert "two images" in capsys.readouterr().err
