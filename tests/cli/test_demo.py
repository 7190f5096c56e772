"""`namm demo --quick`: all its parts and its words, not its quality."""

import json
import re

import pytest

from namm.cli import main
from namm.evaluation.scores import Milestone, half_way
from namm.experiments.demo import ABOUT
from namm.experiments.engine.folder import SETTINGS, read_record
from namm.experiments.engine.settings_file import read_yaml
from namm.experiments.presets import preset
from namm.formatting import format_number


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the demonstration printed, called twice, and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "my demo"
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("namm.cli.demo.log", printed.append)
        for _ in range(2):
            assert main(["demo", "--quick", "--seed", "3", "--out", str(folder)]) == 0
    half = len(printed) // 2
    return "\n".join(printed[:half]), "\n".join(printed[half:]), folder


def test_every_stage_is_explained_before_it_is_run_and_the_report_comes_last(told):
    first, _, folder = told
    text = " ".join(first.split())
    places = [text.index(f"{k} of 9, {stage}") for k, stage in enumerate(ABOUT, 1)]
    assert places == sorted(places)
    for stage, about in ABOUT.items():
        assert about in text
        assert read_record(folder / stage).is_complete(folder / stage)
    assert "map (6 steps)" in text
    results = read_record(folder / "finetune").results
    before, after = (format_number(results[name], ".2g") for name in ("distance_samples_before", "distance_samples"))
    assert f"went from {before} to {after}" in text
    assert first.splitlines()[-1] == f"The report, with pictures: {folder / 'report' / 'report.html'}"
    assert (folder / "report" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert f"namm evaluate '{folder}'" in first
    assert max(map(len, first.splitlines())) <= 100 + len(str(folder))


def test_its_last_words_are_what_was_measured(told):
    first, _, folder = told
    metrics = json.loads((folder / "evaluate" / "metrics.json").read_text())
    text = " ".join(first.split())
    ours, base, data = (metrics["rows"][name]["distance"]["mean"] for name in ("finetuned", "dm", "data"))
    (found,) = re.findall(r"([-\d.]+) ± [\d.]+ of the baseline's excess", text)
    assert float(found) == pytest.approx((ours - data) / (base - data), abs=0.006)
    assert f"verdict: {metrics['verdict']['outcome']}" in text
    assert f"total variation is {metrics['rows']['finetuned']['total_variation']:.2f} and spread" in text
    half = half_way([Milestone(**each) for each in metrics["milestones"]["dm"]]).mean
    assert f"Half-way through its training the baseline's mean ℓ was {format_number(half)}." in text
    seconds = read_record(folder / "dm").compute_seconds
    assert f"and baseline {seconds:.1f} s" in text


def test_a_second_call_tells_the_same_and_computes_nothing(told):
    first, again, folder = told
    assert again.count("done before") == len(ABOUT)
    assert again[again.index("verdict:") :] == first[first.index("verdict:") :]
    assert all(read_record(folder / stage).attempts == 1 for stage in ABOUT)


def test_quick_is_the_same_with_smaller_numbers(told):
    quick, whole = read_yaml(told[2] / SETTINGS).settings, preset("burgers", "demo").settings
    assert (quick.data.seed, quick.dm.train.seed, quick.evaluate.seed) == (3, 3, 8)
    assert quick.data.rule.dt == whole.data.rule.dt
    assert quick.map.weights == whole.map.weights
    assert quick.dm.equal_compute
    assert quick.data.n_train < whole.data.n_train
