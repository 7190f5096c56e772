"""`namm export`: what comes back from the folder makes the run's own samples."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from namm import Burgers, NAMMPipeline, polish
from namm.cli import main
from namm.experiments.engine.run_parts import RunParts


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe(batch_size=5, num_inference_steps=4, generator=2)


def test_the_pipeline_makes_the_evaluations_samples(whole_run, tmp_path, capsys):
    assert main(["export", str(whole_run), "-o", "deep/pipe"]) == 0
    said = capsys.readouterr().out
    assert "through the finetuned f" in said
    assert 'NAMMPipeline.from_pretrained("deep/pipe")' in said
    pipe = NAMMPipeline.from_pretrained("deep/pipe")
    assert isinstance(pipe.constraint, Burgers)
    with h5py.File(whole_run / "evaluate" / "mdm.h5") as file:
        out = call(pipe)
        for name in ("images", "mirror_images", "distances"):
            np.testing.assert_allclose(getattr(out, name), file[name][:5], atol=1e-4, rtol=1e-3)
    g = RunParts.load(whole_run).mirror("finetune").g
    assert all(torch.equal(a, b) for a, b in zip(pipe.g.parameters(), g.parameters(), strict=True))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["pipe"]


def test_half_rounds_the_network_alone(whole_run):
    assert main(["export", str(whole_run), "-o", "whole"]) == 0
    assert main(["export", str(whole_run), "-o", "small", "--half"]) == 0
    whole, small = (NAMMPipeline.from_pretrained(name) for name in ("whole", "small"))
    for name, rounded in (("f", False), ("g", False), ("network", True)):
        files = (Path(folder, name).glob("*.safetensors") for folder in ("whole", "small"))
        large, little = (sum(path.stat().st_size for path in each) for each in files)
        assert (little < 0.6 * large) == rounded
        for a, b in zip(getattr(whole, name).parameters(), getattr(small, name).parameters(), strict=True):
            assert torch.equal(a.half().float() if rounded else a, b)
    np.testing.assert_allclose(call(small).images, call(whole).images, atol=2e-2)


def test_the_baseline_has_no_maps(whole_run):
    assert main(["export", str(whole_run), "-o", "pipe", "--model", "dm"]) == 0
    pipe = NAMMPipeline.from_pretrained("pipe")
    assert pipe.f is None
    out = call(pipe)
    assert torch.equal(out.images, out.mirror_images)


def test_before_finetuning_the_maps_own_f(whole_run, tmp_path, capsys):
    copy = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(copy / "finetune")
    assert main(["export", "run", "-o", "pipe"]) == 0
    assert "through the map's f, not finetuned" in capsys.readouterr().out
    f = RunParts.load(whole_run).mirror("map").f
    pipe = NAMMPipeline.from_pretrained("pipe")
    assert all(torch.equal(a, b) for a, b in zip(pipe.f.parameters(), f.parameters(), strict=True))
    shutil.rmtree(copy / "mdm")
    assert main(["export", "run", "-o", "other"]) == 1
    assert "--until mdm` completes it" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_nothing_is_overwritten(whole_run, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    for target in ("mine", "mine/notes"):
        assert main(["export", str(whole_run), "-o", target]) == 1
        assert "is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "mine" / "notes").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert main(["export", str(whole_run), "-o", "empty"]) == 0
    assert main(["export", "nowhere", "-o", "x"]) == 2
    assert main(["export", str(whole_run)]) == 2


def test_the_card_has_the_certificate_of_the_runs_polished_samples(whole_run, rewrite, tmp_path):
    copy = shutil.copytree(whole_run, tmp_path / "run")
    metrics = json.loads((copy / "evaluate" / "metrics.json").read_text())
    x = torch.rand(5, 1, 8, 8)
    made = {name: polish(x[:n], Burgers()).certificate.summary() for name, n in (("finetuned", 3), ("dm", 4))}
    metrics["certificates"] = {f"{name}_polished": summary for name, summary in made.items()}
    rewrite(copy / "evaluate" / "metrics.json", metrics)
    for model, n in (("mdm", 3), ("dm", 4)):
        assert main(["export", "run", "-o", model, "--model", model]) == 0
        assert f"{n} of {n} images reach the rule, by closed form" in (tmp_path / model / "README.md").read_text()
