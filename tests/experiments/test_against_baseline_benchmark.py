"""The method against its baseline at a size of seconds: what is written is what the runs measured, judged."""

import json
import re
import runpy
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from torch import Tensor, nn

from namm.datasets import load
from namm.errors import DataError, RunFolderError
from namm.experiments.engine.stages.report import collect
from namm.experiments.sweeps.cell import Cell, CellOutcome

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRAINED = ("map", "mdm", "samples", "finetune", "dm")


class Means(nn.Module):
    """In place of Inception: the means of the quarters of a picture."""

    def forward(self, pictures: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(pictures, 2).flatten(1)


def absent(*_) -> None:
    raise DataError("no Inception weights are here.")


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(BENCHMARKS / "against_baseline.py"))


@pytest.fixture(scope="module")
def call(benchmark, tiny_preset, tmp_path_factory):
    """Calls the benchmark with seeds of its own; returns the exit code and the folders."""
    root = tmp_path_factory.mktemp("full")

    def called(*options, name="both", seeds=("0", "1"), settings=None):
        out, results = root / name / "runs", root / name / "results"
        arguments = ["--preset", "gpu", "--seeds", *seeds, "--out", str(out), "--results", str(results), *options]
        return benchmark["main"](arguments, settings or tiny_preset.settings), out, results

    return called


@pytest.fixture(scope="module")
def written(call):
    """Two seeds, and what is written of them."""
    code, out, results = call("--until", "evaluate")
    return code, out, json.loads((results / "metrics.json").read_text()), (results / "tables.md").read_text(), results


def table(text, *starts):
    """The cells of the only row of a Markdown table that starts with these."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    (found,) = [row for row in rows if row[: len(starts)] == list(starts)]
    return found[len(starts) :]


def numbers(cells):
    plain = [cell.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")).replace("·10", "e") for cell in cells]
    return [float(value) for cell in plain for value in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", cell)]


def test_the_figures_are_those_of_the_runs(written, tiny_preset):
    _, out, report, _, _ = written
    assert set(report["seeds"]) == {"0", "1"}
    for seed, found in report["seeds"].items():
        measured = json.loads((out / f"burgers-gpu-1-{seed}" / "evaluate" / "metrics.json").read_text())
        assert set(found["rows"]) == set(measured["rows"])
        for name, row in found["rows"].items():
            own = measured["rows"][name]
            assert row["distance"] == own["distance"]["mean"]
            assert row["cd"] == pytest.approx(100 * tiny_preset.reported.weight * own["distance"]["mean"])
            assert row["mmd"] == own["mmd"]
            assert (row["total_variation"], row["spread"]) == (own["total_variation"], own["spread"])
        for name in TRAINED:
            record = json.loads((out / f"burgers-gpu-1-{seed}" / name / "stage.json").read_text())
            images, seconds = record["results"].get("images", 80), record["compute_seconds"]
            assert found["stages"][name]["compute_seconds"] == seconds == measured["compute_seconds"][name]
            assert found["stages"][name]["steps"] == measured["steps"][name]
            assert found["stages"][name]["images_per_second"] == pytest.approx(images / seconds)
        ours = sum(measured["compute_seconds"][name] for name in TRAINED[:-1])
        assert found["compute_seconds_ours"] == pytest.approx(ours)
        last = measured["milestones"]["dm"][-1]
        assert found["dm_along"]["full"]["mean"] == last["mean"]
        assert found["machines"]
    assert report["paper"]["finetuned"]["cd"] == 0.04
    assert "--seeds 0 1" in report["command"]


def test_the_tables_are_those_of_the_figures(written):
    _, _, report, text, _ = written
    for seed, found in report["seeds"].items():
        for name, label in (("data", "data (floor)"), ("finetuned", "MDM + f finetuned"), ("dm", "DM")):
            row = found["rows"][name]
            shown = [row["distance"], row["cd"], *row["mmd"], row["total_variation"], row["spread"]]
            close = [pytest.approx(value, rel=6e-3, abs=6e-4) for value in shown]
            assert numbers(table(text, seed, label)) == close
        for name, each in found["stages"].items():
            cost = [each["steps"], each["images"], each["compute_seconds"], each["images_per_second"]]
            close = [pytest.approx(value, rel=1e-3, abs=6e-3) for value in cost if value is not None]
            assert numbers(table(text, seed, name)) == close
        together = numbers(table(text, seed, "ours together"))
        assert together == [pytest.approx(found["compute_seconds_ours"], abs=6e-3)]
        assert numbers(table(text, seed, "DM, full budget"))[0] == found["stages"]["dm"]["steps"]
    assert numbers(table(text, "paper", "MDM + f finetuned")) == [0.04, 0.1291, 22, 2.04]
    variations = [found["rows"]["finetuned"]["total_variation"] for found in report["seeds"].values()]
    ends = [min(variations), sum(variations) / 2, max(variations)]
    assert report["over_seeds"]["total variation / data's"] == {
        name: pytest.approx(value) for name, value in zip(("min", "mean", "max"), ends, strict=True)
    }
    assert numbers(table(text, "total variation / data's", "≥ 0.85")) == pytest.approx(variations, abs=6e-4)
    assert table(text, "10⁴ · KID of MDM + f finetuned − DM's") == ["< 0", "not computed", "not computed"]


def test_the_tables_can_be_made_again_from_the_file(written, benchmark):
    _, _, report, text, _ = written
    assert benchmark["page"](report) == text


def test_kid_is_shown_in_ten_thousandths(written, benchmark):
    """KID is not computed for the tiny runs: as if it had been."""
    report = deepcopy(written[2])
    for found in report["seeds"].values():
        found["rows"]["finetuned"]["kid"], found["rows"]["dm"]["kid"] = [2.5e-4, 1e-5], [3e-4, 2e-5]
    text = benchmark["page"](report)
    assert "2.50 ± 0.10" in table(text, "1", "MDM + f finetuned")
    judged, over = (table(text, "10⁴ · KID of MDM + f finetuned − DM's", *more) for more in (("< 0",), ("-0.5000",)))
    assert judged == ["-0.50, met"] * 2
    assert over == ["-0.5000"] * 2  # mean and largest


def test_the_exit_code_is_that_of_what_is_judged(written):
    code, _, report, _, _ = written
    lines = [line for found in report["seeds"].values() for line in found["judged"]]
    assert code == (1 if any(line["met"] is False and not line["stretch"] for line in lines) else 0)
    assert len(lines) == 2 * 8


def test_the_pictures(written):
    results = written[-1]
    for name in ("samples", "training"):
        picture = imread(results / f"{name}.png")[..., :3]
        assert picture.std() > 0.02
        assert picture.shape[1] > 600


def test_the_real_images_of_the_picture(written, benchmark, tiny_preset):
    folder = written[1] / "burgers-gpu-1-0"
    contents = collect(folder)
    real = benchmark["_real"](CellOutcome(Cell("x", tiny_preset), folder, None), contents, contents.methods[0])
    test = load(folder / "data" / "images.h5", "test")[: len(real.images)].numpy()
    assert np.array_equal(real.images, test)
    assert real.residuals.shape[0] == len(real.images) == 4
    assert real.shown_distances.max() < contents.methods[0].shown_distances.min()


def test_a_repeated_call_trains_nothing_again(written, call, capsys):
    _, out, report, _, _ = written
    before = {path: path.read_bytes() for path in out.glob("*/*/stage.json")}
    code, _, results = call("--until", "evaluate")
    told = capsys.readouterr().out
    assert code == written[0]
    assert len(before) == 2 * 8
    assert {path: path.read_bytes() for path in out.glob("*/*/stage.json")} == before
    assert told.count("done before") == 2 * 8
    assert "running" not in told
    assert json.loads((results / "metrics.json").read_text())["seeds"] == report["seeds"]


def test_other_seeds_stay_in_the_results_where_that_is_asked_for(written, call, benchmark, tiny_preset, tmp_path):
    _, _, report, text, results = written
    call("--until", "evaluate", "--keep", seeds=("1",))
    again = json.loads((results / "metrics.json").read_text())
    assert again["seeds"] == report["seeds"]
    assert again["over_seeds"] == report["over_seeds"]
    assert table((results / "tables.md").read_text(), "0", "DM") == table(text, "0", "DM")
    chosen = replace(tiny_preset, experiment="burgers", name="gpu")
    assert benchmark["written"](results, chosen) == report["seeds"]
    assert benchmark["written"](results, replace(chosen, name="paper")) == {}
    assert benchmark["written"](tmp_path, chosen) == {}
    (tmp_path / "metrics.json").write_text('{"seeds": ')
    with pytest.raises(RunFolderError, match=r"metrics\.json cannot be read"):
        benchmark["written"](tmp_path, chosen)


def test_until_stops_early_and_the_next_call_goes_on(call, capsys):
    code, out, results = call("--until", "map", name="early", seeds=("3",))
    run = out / "burgers-gpu-1-3"
    assert code == 0
    assert (run / "map" / "stage.json").exists()
    assert not (run / "mdm").exists()
    assert not results.exists()
    assert "stopped after map" in capsys.readouterr().out
    mapped = (run / "map" / "stage.json").read_bytes()
    call("--n", "40", name="early", seeds=("3",))
    report = json.loads((results / "metrics.json").read_text())
    assert (run / "map" / "stage.json").read_bytes() == mapped
    assert (run / "report" / "report.html").exists()
    assert report["seeds"]["3"]["rows"]["finetuned"]["n"] == 40
    assert "over_seeds" not in report
    assert ["evaluate.n", "10000", "40"] in report["seeds"]["3"]["changed"]


def test_kid_where_there_are_weights_and_without_them(written, call, capsys, monkeypatch):
    shutil.copytree(written[1], written[1].parents[1] / "kid" / "runs")
    asked = ("--kid-subsets", "3", "--n-fid", "66", "--until", "evaluate")
    with monkeypatch.context() as patch:
        patch.setattr("namm.evaluation.inception.find_weights", absent)
        _, _, results = call(*asked, name="kid", seeds=("0",))
    assert "KID and FID are left out" in capsys.readouterr().out
    assert json.loads((results / "metrics.json").read_text())["seeds"]["0"]["rows"]["dm"]["kid"] is None
    with monkeypatch.context() as patch:
        for module in ("inception", "features"):
            patch.setattr(f"namm.evaluation.{module}.load_inception", Means)
        patch.setattr("namm.evaluation.inception.find_weights", lambda: Path("here"))
        call(*asked, name="kid", seeds=("0",))
    monkeypatch.setattr("namm.evaluation.inception.find_weights", absent)
    (file := results.with_name("weights.pt")).touch()
    monkeypatch.setenv("NAMM_INCEPTION", "")  # which the call sets
    call(*asked, f"--inception={file}", name="kid", seeds=("0",))  # what is evaluated needs no weights any more
    report = json.loads((results / "metrics.json").read_text())
    assert "--inception=weights.pt" in report["command"]
    assert str(results.parent) not in report["command"]  # no folder of this machine
    rows = report["seeds"]["0"]["rows"]
    line = table((results / "tables.md").read_text(), "10⁴ · KID of MDM + f finetuned − DM's", "< 0")
    gain = rows["finetuned"]["kid"][0] - rows["dm"]["kid"][0]
    assert numbers(line) == [pytest.approx(1e4 * gain, abs=6e-3)]
    assert line[0].endswith("met" if gain < 0 else "short")
    assert rows["dm"]["fid"] > 0


def test_what_cannot_be_run_is_told(call, capsys, tiny_preset):
    few = replace(tiny_preset.settings, evaluate=replace(tiny_preset.settings.evaluate, subset=1000))
    assert call(name="few", settings=few)[0] == 2
    assert "evaluate.subset" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call("--inception", "nowhere.pt")


MADE_UP = {
    "rows": {
        "finetuned": {"cd": 0.08, "mmd": [0.12, 0.01], "kid": [0.002, 0.001], "total_variation": 0.9},
        "dm": {"cd": 1.0, "mmd": [0.1, 0.01], "kid": [0.2, 0.01], "total_variation": 1.0},
    },
    "stages": {"dm": {"steps": 1000}},
    "images_per_second_dm_over_mdm": 0.97,
    "compute_seconds_ours": 470.0,
    "compute_seconds_baseline": 475.0,
}


@pytest.mark.parametrize(
    ("place", "value", "short"),
    [
        (("rows", "finetuned", "cd"), 0.1, ["CD of MDM + f finetuned, below DM's by, stretch"]),
        (("rows", "finetuned", "cd"), 0.26, ["CD of MDM + f finetuned, below DM's by"] * 2),
        (("rows", "finetuned", "kid"), [0.21, 0.01], ["10⁴ · KID of MDM + f finetuned − DM's"]),
        (("rows", "finetuned", "mmd"), [0.126, 0.01], ["√MMD² of MDM + f finetuned / DM's"]),
        (("rows", "finetuned", "total_variation"), 0.84, ["total variation / data's"]),
        (("images_per_second_dm_over_mdm",), 0.94, ["images/s of DM / MDM's"]),
        (("images_per_second_dm_over_mdm",), 1.06, ["images/s of DM / MDM's"]),
        (("compute_seconds_ours",), 481.0, ["compute seconds of ours"]),
        (("compute_seconds_baseline",), 460.0, ["compute of DM / ours"]),
        (("compute_seconds_baseline",), 480.0, ["compute of DM / ours"]),
    ],
)
def test_every_limit_is_judged(benchmark, place, value, short):
    assert all(line.met for line in benchmark["judge"](MADE_UP, "gpu"))
    changed = deepcopy(MADE_UP)
    part = changed
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    lines = [line for line in benchmark["judge"](changed, "gpu") if not line.met]
    assert [line.name for line in lines] == [name.removesuffix(", stretch") for name in short]
    assert all(line.verdict.endswith("short") for line in lines)
    assert any(not line.stretch for line in lines) == (not short[0].endswith("stretch"))


def test_a_step_is_allowed_where_it_is_longer_than_two_percent(benchmark):
    line = benchmark["judge"](MADE_UP | {"compute_seconds_baseline": 500.0, "stages": {"dm": {"steps": 10}}}, "gpu")[-1]
    assert line.met
    assert line.figure == pytest.approx(500 / 470)


def test_kid_that_was_not_computed_is_not_judged(benchmark):
    rows = {name: row | {"kid": None} for name, row in MADE_UP["rows"].items()}
    lines = {line.name: line for line in benchmark["judge"](MADE_UP | {"rows": rows}, "gpu")}
    assert lines["10⁴ · KID of MDM + f finetuned − DM's"].met is None
    assert lines["10⁴ · KID of MDM + f finetuned − DM's"].verdict == "not computed"


# The demo


def test_the_demo_is_printed_and_judged(benchmark, tiny_preset, tmp_path, capsys):
    many = replace(tiny_preset.settings.evaluate, n=80)
    settings = replace(tiny_preset.settings, evaluate=many)
    code = benchmark["main"](["--seeds", "0", "1", "--out", str(tmp_path / "runs")], settings)
    printed = capsys.readouterr().out
    found = [tmp_path / "runs" / f"burgers-demo-1-{seed}" / "evaluate" / "metrics.json" for seed in (0, 1)]
    rows = [json.loads(path.read_text())["rows"] for path in found]
    gains = [1 - each["finetuned"]["distance"]["mean"] / each["dm"]["distance"]["mean"] for each in rows]
    shown = numbers(table(printed, "CD of MDM + f finetuned, below DM's by", "≥ 50 %"))
    assert shown == pytest.approx([100 * gain for gain in gains], abs=0.06)
    assert gains[0] != gains[1]
    assert code == (1 if ", short" in printed else 0)
    assert "DM + project" in printed
    assert "DM repaired" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}  # no results were asked for


def test_every_limit_of_the_demo_is_judged(benchmark):
    def judged(**changes):
        figures = {"ours": 0.4, "before": 0.45, "mmd": 0.12, "variation": 0.9, "steps": 100} | changes
        rows = {
            "mdm": {"cd": figures["before"]},
            "finetuned": {
                "cd": figures["ours"],
                "mmd": [figures["mmd"], 0.01],
                "total_variation": figures["variation"],
            },
            "dm": {"cd": 1.0, "mmd": [0.1, 0.01]},
        }
        stages = {"mdm": {"compute_seconds": 4.0, "steps": 40}, "dm": {"steps": figures["steps"]}}
        found = {"rows": rows, "stages": stages, "compute_seconds_ours": 10.0}
        return all(line.met for line in benchmark["judge"](found, "demo"))

    assert judged()
    assert not judged(before=0.51)
    assert not judged(ours=0.46)
    assert not judged(mmd=0.126)
    assert not judged(variation=0.84)
    assert not judged(steps=98)
