"""`namm demo --quick`: all its parts and its words, not its quality."""

import json
import re

import pytest

from namm.cli import main
from namm.experiments.demo import ABOUT, conclusion
from namm.experiments.folder import SETTINGS, read_record
from namm.experiments.plain import read_yaml
from namm.experiments.presets import preset
from namm.report import html


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the demonstration printed, called twice, and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "my demo"
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        draw = html.png
        patch.setattr(html, "png", lambda figure, theme: draw(figure, theme, dpi=20))  # nobody looks at these
        patch.setattr("namm.cli.demo.tell", printed.append)
        for _ in range(2):
            assert main(["demo", "--quick", "--seed", "3", "--out", str(folder)]) == 0
    half = len(printed) // 2
    return "\n".join(printed[:half]), "\n".join(printed[half:]), folder


def test_every_stage_is_explained_before_it_is_run_and_the_report_comes_last(told):
    first, _, folder = told
    text = " ".join(first.split())
    places = [text.index(f"{k} of 8, {stage}") for k, stage in enumerate(ABOUT, 1)]
    assert places == sorted(places)
    for stage, about in ABOUT.items():
        assert about in text
        assert read_record(folder / stage).is_complete(folder / stage)
    assert "map (6 steps)" in text
    results = read_record(folder / "finetune").results
    assert f"went from {results['distance_samples_before']:.2g} to {results['distance_samples']:.2g}" in text
    assert first.splitlines()[-1] == f"The report, with pictures: {folder / 'report' / 'report.html'}"
    assert (folder / "report" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert f"namm evaluate '{folder}'" in first
    assert max(map(len, first.splitlines())) <= 100 + len(str(folder))


def test_its_last_words_are_what_was_measured(told):
    first, _, folder = told
    rows = json.loads((folder / "evaluate" / "metrics.json").read_text())["rows"]
    text = " ".join(first.split())
    ours, base = rows["finetuned"], rows["dm"]
    ratios = [float(value) for value in re.findall(r"([\d.]+) times the baseline's", text)]
    expected = [ours["distance"]["mean"] / base["distance"]["mean"], ours["mmd"][0] / base["mmd"][0]]
    assert ratios == pytest.approx(expected, abs=0.006)
    half = json.loads((folder / "evaluate" / "metrics.json").read_text())["milestones"]["dm"][1]["mean"]
    assert f"Half-way through its training the baseline had {half:.3g}." in text
    assert f"Their total variation is {ours['total_variation']:.2f} of the data's" in text
    seconds = read_record(folder / "dm").compute_seconds
    assert f"and baseline {seconds:.1f} s" in text


def test_a_second_call_tells_the_same_and_computes_nothing(told):
    first, again, folder = told
    assert again.count("done before") == len(ABOUT)
    assert again[again.index("Our samples") :] == first[first.index("Our samples") :]
    assert all(read_record(folder / stage).attempts == 1 for stage in ABOUT)


def test_quick_is_the_same_with_smaller_numbers(told):
    quick, whole = read_yaml(told[2] / SETTINGS).settings, preset("burgers", "demo").settings
    assert (quick.data.seed, quick.dm.train.seed, quick.evaluate.seed) == (3, 3, 8)
    assert quick.data.rule.dt == whole.data.rule.dt
    assert quick.map.weights == whole.map.weights
    assert quick.dm.equal_compute
    assert quick.data.n_train < whole.data.n_train


def row(distance, mmd, variation=1.0):
    return {"distance": {"mean": distance}, "mmd": [mmd, 0.0], "total_variation": variation}


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (row(0.002, 0.05), "Our samples are closer to the equation than the baseline's: their mean ℓ is 0.002 against"),
        (row(0.005, 0.05), "Our samples are not closer"),
        (row(0.002, 0.05), "√MMD² to held-out images is 0.0500 against 0.0400, 1.25 times the baseline's"),
        (row(0.002, 0.05), "so the equation is not kept by blurring"),
        (row(0.002, 0.05, 0.8), "they are smoother than the data: look at them"),
        (row(0.002, 0.05, 1.3), "they are rougher than the data"),
    ],
)
def test_bad_news_are_told_too(ours, said):
    rows = {"finetuned": ours, "dm": row(0.004, 0.04), "data": row(1e-7, 0.03)}
    assert said in " ".join(conclusion({"rows": rows, "milestones": {}}))
