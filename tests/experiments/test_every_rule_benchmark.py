"""benchmarks/every_rule.py: its images obey their rules, and it judges means over seeds as it says."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytest.importorskip("sklearn", reason="scikit-learn, whose digits are used, is not installed")


@pytest.fixture(scope="module")
def rules():
    return runpy.run_path(str(BENCHMARKS / "user_rules.py"))


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield runpy.run_path(str(BENCHMARKS / "every_rule.py"))
    for name in ("user_rules", "every_rule"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["ink", "norm", "variance", "part", "colour", "poisson", "own_total"])
def test_images_obey_their_rule_and_noise_does_not(rules, name):
    x = rules["IMAGES"][name](3)[:64]
    report = rules[name].check(x)
    report.require_obeyed(1e-3)
    report.require_active()
    assert x.std() > 0.1


def test_other_seeds_give_other_images(rules):
    assert not np.array_equal(rules["IMAGES"]["ink"](0), rules["IMAGES"]["ink"](1))


def row(distance, mmd, variation=1.0, spread=1.0):
    return {
        "distance": {"mean": distance, "std": 0.0, "n": 100},
        "mmd": [mmd, 0.01],
        "mmd_error": 0.01,
        "total_variation": variation,
        "spread": spread,
    }


def seeds(*ours):
    return [{"rows": {"finetuned": each, "dm": row(1.1, 0.1), "data": row(0.1, 0.05)}} for each in ours]


def test_means_over_seeds_are_judged(script):
    found, outcome = script["judged"](seeds(row(0.2, 0.1), row(0.6, 0.1)))
    assert found["ratio"] == pytest.approx(0.3)
    assert found["ours"].mmd_error == pytest.approx(0.01 / np.sqrt(2))
    assert outcome == "works"
    assert script["judged"](seeds(row(0.2, 0.1), row(2.0, 0.1)))[1] == "no gain"
    assert script["judged"](seeds(row(0.2, 0.1, spread=0.3), row(0.2, 0.1, spread=0.4)))[1] == "collapsed"


def test_settings_are_those_of_a_users_run(script, tmp_path, monkeypatch):
    monkeypatch.setenv("NAMM_TRUST", str(tmp_path / "trusted.json"))
    options = script["Options"](only=("ink",), seeds=(2,), steps=(7, 8, 9), compile=False, out=tmp_path)
    s = script["settings_of"]("ink", 2, options).settings
    assert [part.train.budget for part in (s.map, s.mdm, s.finetune)] == ["7 steps", "8 steps", "9 steps"]
    assert s.map.tune
    assert s.data.shape == (1, 16, 16)
    assert (s.map.train.seed, s.data.seed) == (2, 2)
    assert script["settings_of"]("flux", 2, options).settings.data.seed == 2


def test_a_record_stands_for_its_run_while_settings_are_the_same(script, tmp_path):
    options = script["Options"](out=tmp_path, quick=True)
    key = script["stage_keys"](script["settings_of"]("flux", 3, options).settings)["evaluate"]
    kept = {"key": key, "rows": {"dm": row(1.0, 0.1)}, "seconds": [1.0, 1.0], "second": None}
    (tmp_path / "flux-demo-3.json").write_text(json.dumps(kept))
    assert script["rows_of"]("flux", 3, options) == kept
    assert not (tmp_path / "flux-demo-3").exists()
