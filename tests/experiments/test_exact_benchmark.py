"""benchmarks/exact.py: what it asks of polished samples, and its whole way at a tiny size."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "exact.py")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(SCRIPT).parent))
        yield runpy.run_path(SCRIPT)
        sys.modules.pop("every_rule", None)


def row(mmd=0.10, variation=1.1, spread=0.95):
    return {"mmd": [mmd, 0.01], "total_variation": variation, "spread": spread}


def certificate(after):
    figures = {"before_mean": 0.1, "after_mean": after, "floor": 1e-6, "rounding": 1e-7}
    return figures | {"reached": 9, "images": 10}


def judge(script, before, after, left=1e-6):
    return script["judge_row"](before, after, row(0.04, 1.0, 1.0), certificate(left))[1]


def test_three_times_floor_and_rounding_are_allowed(script):
    assert judge(script, row(), row(), left=3.2e-6) == []
    assert judge(script, row(), row(), left=3.4e-6) == ["ℓ above three times floor and rounding"]


@pytest.mark.parametrize(
    ("after", "missed"),
    [
        (row(mmd=0.105), "√MMD²"),
        (row(variation=1.13), "total variation"),
        (row(variation=0.87), "total variation"),
        (row(spread=0.92), "spread"),
    ],
)
def test_figures_may_end_two_percent_further_from_the_data(script, after, missed):
    assert judge(script, row(), after) == [f"{missed} further from the data's"]
    assert judge(script, row(), row(mmd=0.02, variation=0.95, spread=1.04)) == []


def test_polishing_is_as_near_to_the_truth_as_scipys_fit(script, capsys):
    assert script["main"](["--only", "truth", "--quick"]) == 0
    assert "everything is as asked" in capsys.readouterr().out


def test_a_tiny_run_is_polished_timed_and_shown(script, tmp_path, capsys):
    code = script["main"](["--quick", "--only", "flux", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "ℓ above" not in shown  # after three steps of training anything else may be missed
    assert code == ("missed: " in shown)
    certificates = json.loads((tmp_path / "flux-demo-0" / "evaluate" / "metrics.json").read_text())["certificates"]
    assert [each["reached"] for each in certificates.values()] == [32, 32, 32]
