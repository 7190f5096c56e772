"""`namm sample` on a tiny run: what is in the file, going on after an interruption, and what is refused."""

import re
import shlex
import shutil

import h5py
import numpy as np
import pytest
import torch
import yaml

from namm.datasets import store
from namm.experiments.engine import build_models
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.engine.settings import SamplerSettings
from namm.formatting import format_estimate, format_number
from namm.maps import IdentityMap


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def copy(whole_run, tmp_path):
    """A run that may be changed."""
    return shutil.copytree(whole_run, tmp_path / "runs" / "mine")


def read(path):
    with h5py.File(path) as file:
        return {name: file[name][:] for name in ("images", "mirror_images", "distances")} | dict(file.attrs)


def expected(run, model, mirror, sampler, seed, n):
    """x, y and ℓ by the package's own objects."""
    trained = RunParts.load(run)
    options = {} if sampler is None else {"sampler": build_models.sampler(sampler)}
    x, y = trained.source(model, mirror).sample_pairs(n, generator=seed, progress=False, **options)
    return {"images": x, "mirror_images": y, "distances": trained.rule()(x)}


def assert_close(found, wanted):
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values.numpy(), atol=1e-4, rtol=1e-3)


DPM = SamplerSettings("dpm-solver", 4)


def test_by_default_samples_of_the_model_through_the_finetuned_f(namm, whole_run):
    code, said = namm("sample", whole_run, "-n", 70)
    assert code == 0
    assert "through the finetuned f, dpm-solver of 4 steps, seed 0" in said
    found = read("samples.h5")
    assert_close(found, expected(whole_run, "mdm", RunParts.load(whole_run).mirror("finetune"), DPM, 0, 70))
    ell = found["distances"].astype(float)
    mean, median, worst = format_estimate(ell.mean(), ell.std(ddof=1)), *map(format_number, (np.median(ell), ell.max()))
    assert f"mean {mean}, median {median}, worst {worst}" in said
    assert f"(sample {ell.argmax()})" in said
    before = found
    code, said = namm("sample", whole_run, "-n", 70)
    assert code == 0
    assert "already holds 70 samples" in said
    code, said = namm("sample", whole_run, "-n", 71)
    assert code == 1
    assert "samples: 70 -> 71" in said
    np.testing.assert_array_equal(read("samples.h5")["images"], before["images"])


def test_before_finetuning_through_the_maps_f(namm, copy):
    assert namm("sample", "mine", "-n", 5, "-o", "finetuned.h5")[0] == 0
    shutil.rmtree(copy / "finetune")
    code, said = namm("sample", "mine", "-n", 5, "-o", "finetuned.h5")
    assert code == 1
    assert "weights: " in said
    code, said = namm("sample", "mine", "-n", 5, "-o", "a.h5")
    assert code == 0
    assert "through the map's f, not finetuned" in said
    assert_close(read("a.h5"), expected(copy, "mdm", RunParts.load(copy).mirror("map"), DPM, 0, 5))


@pytest.mark.parametrize("model", ["dm", "mvae", "vae"])
def test_other_models(namm, whole_run, model):
    code, _ = namm("sample", whole_run, "-n", 5, "-o", "a.h5", "--model", model, "--seed", 9)
    assert code == 0
    mirror = RunParts.load(whole_run).mirror("map") if model == "mvae" else IdentityMap()
    found = read("a.h5")
    assert_close(found, expected(whole_run, model, mirror, DPM if model == "dm" else None, 9, 5))
    assert found["model"] == model
    assert ("sampler" in found) == (model == "dm")


def test_another_sampler(namm, whole_run):
    code, said = namm("sample", whole_run, "-n", 3, "-o", "a.h5", "--sampler", "ddim", "--steps", 3)
    assert code == 0
    assert "ddim of 3 steps" in said
    f = RunParts.load(whole_run).mirror("finetune")
    assert_close(read("a.h5"), expected(whole_run, "mdm", f, SamplerSettings("ddim", 3), 0, 3))
    assert "unipc of 50 steps" in namm("sample", whole_run, "-n", 1, "-o", "b.h5", "--sampler", "unipc")[1]


def test_the_seed_of_the_finetuning_is_warned_of(namm, whole_run, copy):
    said = namm("sample", whole_run, "-n", 1, "-o", "a.h5", "--seed", 1)
    assert said[0] == 0
    assert "finetuned on samples of the seed 1" in said[1]
    assert "warning" not in namm("sample", whole_run, "-n", 1, "-o", "b.h5", "--seed", 2)[1]
    settings = yaml.safe_load((copy / "settings.yaml").read_text())
    settings["samples"]["seed"], settings["evaluate"]["seed"] = 0, 1
    (copy / "settings.yaml").write_text(yaml.safe_dump(settings))
    code, said = namm("sample", copy, "-n", 1, "-o", "c.h5")  # finetuning is stale now, but not the model
    assert code == 0
    assert "not finetuned, dpm-solver of 4 steps, seed 2" in said


def test_an_interrupted_file_is_gone_on_with(namm, whole_run, monkeypatch, tmp_path):
    arguments = ("sample", whole_run, "-n", 200, "--batch-size", 64)
    assert namm(*arguments, "-o", "whole.h5")[0] == 0
    write_block, written = store.write_block, []

    def stopping(file, block, rows):
        if len(written) in (6, 13):
            written.append(None)
            raise KeyboardInterrupt
        written.append(block)
        write_block(file, block, rows)

    monkeypatch.setattr(store, "write_block", stopping)
    for _ in range(2):
        code, said = namm(*arguments, "-o", "a.h5")
        assert code == 1
        assert "a.h5 is not complete yet: the same command goes on" in said
        assert not (tmp_path / "a.h5").exists()
    assert namm(*arguments, "-o", "a.h5")[0] == 0
    assert len([block for block in written if block]) < 4 * 4 + 2 * 4  # at most a block's arrays twice per interruption
    found, whole = read("a.h5"), read("whole.h5")
    for name in ("images", "mirror_images", "distances"):
        np.testing.assert_array_equal(found[name], whole[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no run 'nowhere'"),
        (["RUN", "--sampler", "euler"], "euler-maruyama"),
        (["RUN", "--model", "gan"], "mdm"),
        (["RUN", "--steps", "1"], "at least 2 steps"),
        (["RUN", "--model", "vae", "--steps", "9"], "has no sampler"),
        (["RUN", "-n", "0"], "at least 1"),
        (["RUN", "--batch-size", "0"], "at least 1"),
        (["RUN", "-o", "samples.png"], "must name an HDF5 file"),
        ([], "RUN"),
    ],
)
def test_wrong_usage(namm, whole_run, tmp_path, arguments, message):
    code, said = namm("sample", *(str(whole_run) if argument == "RUN" else argument for argument in arguments))
    assert code == 2
    assert message in said
    assert not list(tmp_path.iterdir())


def test_a_missing_stage_is_answered_with_the_command_that_makes_it(namm, copy):
    shutil.rmtree(copy / "mvae")
    code, said = namm("sample", "mine", "--model", "mvae", "-n", 2)
    assert code == 1
    assert "the stage 'mvae' of runs/mine has not been run" in said
    assert namm(*shlex.split(re.search("`namm (.*)`", said)[1]), "--force")[0] == 0
    assert namm("sample", "mine", "--model", "mvae", "-n", 2)[0] == 0


def test_a_stale_or_unfinished_stage_is_not_used(namm, copy):
    (copy / "mdm" / "training" / "model.safetensors").unlink()
    code, said = namm("sample", copy)
    assert code == 1
    assert "the stage 'mdm'" in said
    assert "was cut short" in said
    settings = yaml.safe_load((copy / "settings.yaml").read_text())
    settings["mdm"]["train"]["learning_rate"] = 0.5
    (copy / "settings.yaml").write_text(yaml.safe_dump(settings))
    code, said = namm("sample", copy)
    assert code == 1
    assert "was made with other settings" in said
    assert "--until mdm` completes it" in said


def test_samples_are_the_same_on_any_number_of_calls(namm, whole_run):
    namm("sample", whole_run, "-n", 65, "-o", "a.h5")
    namm("sample", whole_run, "-n", 130, "-o", "b.h5")
    few, many = (torch.from_numpy(read(name)["images"]) for name in ("a.h5", "b.h5"))
    torch.testing.assert_close(few, many[:65], atol=1e-4, rtol=1e-3)
