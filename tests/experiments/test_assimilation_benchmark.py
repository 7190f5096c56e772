"""The benchmark of posterior sampling at a size of seconds: what it prints is what was measured."""

import json
import re
import runpy
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from namm.experiments.assimilation.assimilate import Score, Setting
from namm.experiments.assimilation.posterior_file import read_score
from namm.experiments.assimilation.tuning import choose
from namm.experiments.engine.folder import read_record
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
    judged = found["found"]
    ratio = judged["dps"]["distance"] / judged["mirror-dps"]["distance"]
    line = next(line for line in printed.splitlines() if "ℓ of DPS / ours" in line)
    assert float(re.search(r"\d+\.\d{3}", line)[0]) == pytest.approx(ratio, abs=6e-4)
    assert len(found["errors"]["cg-dps"]) == 3
    tried = [read_score(row) for row in found["tried"]["dps"]]
    assert asdict(choose(tried, found["tried_chi2"]).setting) == judged["dps"]["setting"]
    assert code == (1 if "(short)" in printed else 0)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    shutil.rmtree(run)
    joined = ["--join", str(tmp_path / "a.json"), "--json", str(tmp_path / "b.json")]
    assert module["main"](["--seeds", "0", "--out", str(tmp_path / "none"), *joined], tiny_preset) == code
    assert capsys.readouterr().out.splitlines()[-20:] == printed.splitlines()[-20:]
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()
    assert not (tmp_path / "none").exists()


def test_the_maps_have_more_and_the_rest_is_the_demo(module):
    s = preset("burgers", "demo").settings
    more = module["with_more_map"](s)
    assert more.map.train == replace(s.map.train, budget="800 steps")
    assert more.finetune.weights.constraint == 10 * s.finetune.weights.constraint
    assert replace(more, map=s.map, finetune=s.finetune) == s
    assert more.dm.equal_compute  # the plain model is given these minutes too


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
        return all(met for _, met in module["verdict"](module["Study"]({}, 1.0, 1.0, found, errors)).values())

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
        "1600 steps",
        "3200 steps",
        "600 steps",
    ]
    assert longer.dm.equal_compute
    assert all(part.train.compile for part in (longer.map, longer.mdm, longer.finetune, longer.dm))
    assert replace(longer.map, train=s.map.train) == s.map
