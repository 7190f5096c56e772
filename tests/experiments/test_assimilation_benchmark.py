"""The benchmark of posterior sampling at a size of seconds: what it prints is what was measured."""

import json
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from namm.experiments.assimilation import Score, Setting
from namm.experiments.folder import read_record
from namm.experiments.presets import preset

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "assimilation.py"


@pytest.fixture(scope="module")
def module():
    return runpy.run_path(str(SCRIPT))


def test_ratios_figure_and_exit_code(module, whole_run, tiny_preset, tmp_path, capsys):
    run = shutil.copytree(whole_run, tmp_path / "seeds" / "burgers-demo-1-0")
    few = ["--truths", "3", "--n", "2", "--tune-truths", "2", "--tune-n", "2", "--steps", "4"]
    where = ["--out", str(run.parent), "--json", str(tmp_path / "a.json"), "--figure", str(tmp_path / "a.png")]
    numbers = ["--zetas", "1e-5", "1e-4", "--weights", "50"]
    before = read_record(run / "dm")
    code = module["main"](["--seeds", "0", *few, *numbers, *where], tiny_preset)
    printed = capsys.readouterr().out
    assert read_record(run / "dm") == before  # what is complete is not trained again
    found = json.loads((tmp_path / "a.json").read_text())["0"]
    judged = found["found"][module["JUDGED"]]
    ratio = judged["dps"]["distance"] / judged["mirror-dps"]["distance"]
    first, second = printed.split("ratios, settings")[1:]
    line = next(line for line in first.splitlines() if "ℓ of DPS / ours" in line)
    assert float(re.search(r"\d+\.\d{3}", line)[0]) == pytest.approx(ratio, abs=6e-4)
    assert len(found["errors"]["smallest error"]["cg-dps"]) == 3
    tried = found["tried"]["dps"]
    by_error = found["found"]["smallest error"]["dps"]["setting"]
    (chosen,) = (row for row in tried if row["setting"] == by_error)
    assert chosen["error"] <= 1.05 * min(row["error"] for row in tried)
    assert code == (1 if "(short)" in first else 0)
    assert "for information" in second
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_verdict_is_that_of_its_limits(module):
    def judged(**changes):
        figures = {"dps": 3.1, "cg": 2.1, "chi2": 1.05, "others": 1.0, "error": 0.1, "failed": 0} | changes
        base = Score(Setting("dps"), 3, 2, 1.0, 0.0, 1.0, 0.1, 0.0, 0.1, None, 0, 0, 1.0)
        found = {
            "dps": replace(base, distance=figures["dps"], chi2=figures["others"]),
            "cg-dps": replace(base, distance=figures["cg"], chi2=figures["others"]),
            "mirror-dps": replace(base, chi2=figures["chi2"], error=figures["error"], failed=figures["failed"]),
        }
        errors = {name: [0.09, 0.10, 0.11] for name in ("dps", "cg-dps")}
        errors["mirror-dps"] = [figures["error"] + step for step in (-0.011, 0.001, 0.010)]
        return all(met for _, met in module["verdict"](found, errors, 1.0).values())

    assert judged()
    assert not judged(dps=2.9)
    assert not judged(cg=1.9)
    assert not judged(chi2=1.12)
    assert not judged(chi2=0.88)
    assert not judged(others=0.9)
    assert judged(error=0.1004)  # within one standard error
    assert not judged(error=0.102)
    assert not judged(failed=1)


def test_a_longer_run_is_longer_on_the_side_that_decides_the_other(module):
    s = preset("burgers", "demo").settings
    longer = module["lengthened"](s, 4, compile=True)
    assert [part.train.budget for part in (longer.map, longer.mdm, longer.finetune)] == [
        "3 minutes",
        "7 minutes",
        "0.8 minutes",
    ]
    assert longer.dm.equal_compute
    assert all(part.train.compile for part in (longer.map, longer.mdm, longer.finetune, longer.dm))
    assert replace(longer.map, train=s.map.train) == s.map
