"""benchmarks/inverse_maps.py: what is left out stays out, an f that is shown the rule begins as the default does."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from namm import TotalFlux
from namm.maps import ICNN, MirrorMap, RuleNet

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytest.importorskip("sklearn", reason="scikit-learn, whose digits are used, is not installed")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield runpy.run_path(str(BENCHMARKS / "inverse_maps.py"))
    for name in ("user_rules", "every_rule"):
        sys.modules.pop(name, None)


def test_parts_that_are_left_out_are_zero_and_not_trained(script):
    f = RuleNet(1, 8, 8, filters=4, blocks=1)
    script["without"](f, spectral=True, whole=True)
    left_out = {name for name, parameter in f.named_parameters() if not parameter.requires_grad}
    assert left_out == {"body.0.spectrum", "whole.last.weight", "whole.last.bias"}
    assert not any(dict(f.named_parameters())[name].any() for name in left_out)


def test_an_f_that_is_shown_the_rule_begins_as_without_and_can_step_onto_a_sum(script):
    f, y = RuleNet(1, 8, 8, filters=4, blocks=1), torch.rand(3, 1, 8, 8)
    mirror, rule = MirrorMap(ICNN(1, layers=2, filters=4), f), TotalFlux(20.0)
    informed = script["Informed"](f, mirror, rule)
    torch.testing.assert_close(informed(y), f(y))
    with torch.no_grad():
        informed.step.fill_(1.0)
    assert rule(informed(y)).max() < 1e-4  # Polyak's step is exact for a sum


def test_a_tiny_map_is_measured_and_kept(script, tmp_path, capsys):
    arguments = ["--quick", "--only", "ink", "--variants", "local", "--out", str(tmp_path)]
    assert script["main"](arguments) == 0
    assert "local" in capsys.readouterr().out
    record = tmp_path / "ink-2-local.json"
    kept = record.stat().st_mtime_ns
    assert script["main"](arguments) == 0
    assert record.stat().st_mtime_ns == kept
