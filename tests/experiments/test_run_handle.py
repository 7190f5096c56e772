"""`namm.Run`: what it hands out is what the run's folder holds."""

import json
import tarfile
from pathlib import Path

import h5py
import pytest
import torch

import namm
from namm.errors import UsageError
from namm.experiments.engine.run_parts import RunParts


@pytest.fixture(scope="module")
def run(whole_run):
    return namm.Run(whole_run)


def test_its_samples_are_the_evaluations(run, whole_run):
    with h5py.File(whole_run / "evaluate" / "mdm.h5") as file:
        expected = torch.from_numpy(file["images"][:5])
    torch.testing.assert_close(run.sample(5, seed=run.settings.evaluate.seed).cpu(), expected, atol=1e-4, rtol=1e-3)


def test_maps_figures_images_and_rule_are_the_runs(run, whole_run):
    f = RunParts.load(whole_run).mirror("finetune").f
    assert all(torch.equal(a, b) for a, b in zip(run.mirror.f.parameters(), f.parameters(), strict=True))
    assert run.metrics == json.loads((whole_run / "evaluate" / "metrics.json").read_text())
    assert run.verdict.outcome == run.metrics["verdict"]["outcome"]
    with h5py.File(whole_run / "data" / "images.h5") as file:
        assert torch.equal(run.images["test"][:3], torch.from_numpy(file["test"][:3]))
    assert float(run.rule(run.images["train"][:4]).max()) < 1e-4  # the data keep their rule


def test_it_introduces_itself(run, whole_run):
    assert repr(run).startswith(f"Run({str(whole_run)!r}: burgers, preset demo, done: data, map")
    assert run.verdict.outcome in run._repr_html_()


def test_what_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no run 'nowhere'"):
        namm.Run("nowhere")


def test_a_run_of_the_first_version_can_be_opened(tmp_path):
    archive = Path(__file__).parents[1] / "integration" / "run_0_1.tar.xz"
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    old = namm.Run(tmp_path / "run")
    assert old.verdict.outcome in ("works", "no gain", "collapsed")
    with h5py.File(tmp_path / "run" / "evaluate" / "mdm.h5") as file:
        expected = torch.from_numpy(file["images"][:4])
    torch.testing.assert_close(old.sample(4, seed=old.settings.evaluate.seed).cpu(), expected, atol=1e-4, rtol=1e-3)
    assert old.images["test"].shape[0] == 64
