"""A run stops after a map that is no good, says why, and goes on when it is forced to."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from namm.cli import main
from namm.errors import VerdictError
from namm.evaluation.verdict import Verdict
from namm.experiments.engine.folder import read_record, stage_digests, write_record
from namm.experiments.engine.run import run
from namm.experiments.engine.stages.evaluate import run_verdict
from namm.maps import MirrorMap
from namm.pipeline import NAMMPipeline


def go(chosen, folder, until, **options):
    lines = []
    records = run(chosen, folder, until=until, log=lines.append, progress=False, **options)
    return records, lines


@pytest.fixture(scope="module")
def learned(tiny_preset, tmp_path_factory):
    """A run up to its map, which six steps leave untrained."""
    folder = tmp_path_factory.mktemp("gate") / "run"
    return folder, *go(tiny_preset, folder, "map")


def test_the_verdict_on_a_map_is_told_and_kept(learned):
    folder, records, lines = learned
    verdict = Verdict.from_json(read_record(folder / "map").verdict)
    assert not verdict.works
    assert records["map"].results["verdict"] == verdict.outcome
    assert [line for line in lines if line in verdict.lines()] == verdict.lines()
    assert run_verdict(folder) == verdict


def test_a_run_does_not_build_on_a_bad_map_unless_it_is_forced(learned, tiny_preset, tmp_path):
    folder = shutil.copytree(learned[0], tmp_path / "run")
    with pytest.raises(VerdictError, match=r"stopped after the stage 'map', whose verdict is .*--force goes on"):
        go(tiny_preset, folder, "mdm")
    assert not (folder / "mdm").exists()
    go(tiny_preset, folder, "mdm", force=True)
    assert go(tiny_preset, folder, "mdm")[0]["mdm"].status == "complete"  # what is there is not refused
    assert read_record(folder / "map").attempts == 1


def test_the_command_stops_too(learned, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(learned[0], tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "--config", "run/settings.yaml", "--out", "run", "--until", "mdm"]
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert "verdict: " in said.out
    assert "Try: " in said.err
    assert main([*arguments, "--force"]) == 0
    assert read_record(folder / "mdm").status == "complete"


def test_a_good_map_lets_the_run_go_on(learned, tiny_preset, tmp_path):
    folder = shutil.copytree(learned[0], tmp_path / "run")
    record = read_record(folder / "map")
    write_record(folder / "map", replace(record, verdict=record.verdict | {"outcome": "works", "next_steps": []}))
    go(tiny_preset, folder, "mdm")


def test_a_collapse_is_told_wherever_samples_leave_the_run(whole_run, rewrite, tmp_path, monkeypatch, capsys):
    """An f that turns every sample white: report, sample, export and model card say so."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(whole_run, tmp_path / "run")
    metrics = json.loads((folder / "evaluate" / "metrics.json").read_text())
    metrics["rows"]["finetuned"] |= {"spread": 1e-3, "total_variation": 1e-3}
    metrics["rows"]["finetuned"]["distance"]["mean"] = 5e-6
    del metrics["verdict"]  # as version 0.1 left it
    rewrite(folder / "evaluate" / "metrics.json", metrics)
    mirror = MirrorMap.load(folder / "finetune" / "training" / "mirror")
    mirror.f.load_state_dict({name: torch.zeros_like(each) for name, each in mirror.f.state_dict().items()})
    mirror.save(folder / "finetune" / "training" / "mirror")
    digests = stage_digests(folder / "finetune")
    write_record(folder / "finetune", replace(read_record(folder / "finetune"), digests=digests))

    assert main(["sample", "run", "-n", "20"]) == 0
    said = capsys.readouterr().out
    assert "verdict: collapsed" in said
    assert "the images are lost" in said
    assert main(["export", "run", "-o", "pipe"]) == 0
    assert "verdict: collapsed" in capsys.readouterr().out
    assert "**Verdict: collapsed**" in (tmp_path / "pipe" / "README.md").read_text()
    assert NAMMPipeline.from_pretrained("pipe").verdict.outcome == "collapsed"
    assert main(["evaluate", "run"]) == 0
    assert "verdict: collapsed" in capsys.readouterr().out
    assert main(["report", "run"]) == 0
    assert "verdict collapsed" in (folder / "report" / "report.html").read_text()


def test_samples_are_compared_with_the_data(whole_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", str(whole_run), "-n", "20"]) == 0
    said = capsys.readouterr().out
    assert "total variation" in said
    assert "of the data's" in said
    assert f"verdict: {run_verdict(whole_run).outcome}" in said
    assert main(["sample", str(whole_run), "-n", "3", "-o", "few.h5"]) == 0
    assert "too few samples to tell their spread" in capsys.readouterr().out
