"""`namm repair` on a tiny run: the file, the figures, the verdict, polishing, finetuning, and what is refused."""

import json
import shutil

import h5py
import numpy as np
import pytest
import torch

from namm.datasets import load
from namm.errors import NammWarning
from namm.exact import polish
from namm.experiments.engine.run_parts import RunParts
from namm.formatting import format_estimate
from namm.generative.repair import repair
from namm.generative.sample_file import SampleFile
from namm.training import train_map
from namm.training.checkpoint import weights_digest


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def samples(whole_run, tmp_path):
    """A file of images that are none of the run's: its test images with smooth errors."""
    x = load(whole_run / "data" / "images.h5", "test")
    coarse = torch.randn(len(x), 1, 2, 2, generator=torch.Generator().manual_seed(3))
    x = x + 0.05 * torch.nn.functional.interpolate(coarse, 8, mode="bicubic")
    np.save(tmp_path / "theirs.npy", x.numpy())
    return x


def read(path):
    with h5py.File(path) as file:
        return {name: file[name][:] for name in file if name != "checksums"}, dict(file.attrs)


def expected(run, x, stage):
    """By the package's own call."""
    trained = RunParts.load(run)
    data = load(run / "data" / "images.h5", "test")
    return repair(x, trained.mirror(stage), rule=trained.rule(), data=data)


NCHW = ("--layout", "NCHW")


def test_the_images_the_figures_and_the_verdict_are_those_of_the_call(namm, whole_run, samples):
    code, said = namm("repair", whole_run, "theirs.npy", "-o", "mended.h5", *NCHW)
    assert code == 0, said
    assert "70 images of theirs.npy" in said
    assert "f as the stage finetune left it" in said
    wanted = expected(whole_run, samples, "finetune")
    arrays, about = read("mended.h5")
    np.testing.assert_allclose(arrays["images"], wanted.images.numpy(), atol=1e-6)
    rule = RunParts.load(whole_run).rule()
    np.testing.assert_allclose(arrays["distances"], rule(wanted.images).numpy(), rtol=1e-4)
    for scores in (wanted.before, wanted.after, wanted.data):
        assert format_estimate(scores.distance.mean, scores.distance.std) in said
        assert format_estimate(scores.mmd.mean, scores.mmd_error) in said
    assert "\n".join(wanted.verdict.lines()) in said
    assert json.loads(about["verdict"]) == json.loads(json.dumps(wanted.verdict.as_json()))
    assert json.loads(about["scores"])["repaired"]["spread"] == pytest.approx(wanted.after.spread)
    assert (about["file"], about["run"], about["stage"]) == ("theirs.npy", whole_run.name, "finetune")
    assert about["weights"] == weights_digest(RunParts.load(whole_run).mirror("finetune"))
    assert not [value for value in about.values() if isinstance(value, str) and str(whole_run.parent) in value]
    before = arrays["images"]
    code, said = namm("repair", whole_run, "theirs.npy", "-o", "mended.h5", *NCHW)
    assert code == 1
    assert "mended.h5 is there already and is not overwritten" in said
    np.testing.assert_array_equal(read("mended.h5")[0]["images"], before)


def test_polished_images_bring_their_certificate(namm, whole_run, samples):
    code, said = namm("repair", whole_run, "theirs.npy", "-o", "mended.h5", "--polish", "--stage", "map", *NCHW)
    assert code == 0, said
    trained, data = RunParts.load(whole_run), load(whole_run / "data" / "images.h5", "test")
    rule, repaired = trained.rule(), expected(whole_run, samples, "map")
    floor = float(rule(data).double().mean())
    wanted = polish(repaired.images, rule, scale=[float(data.std())], floor=floor)
    arrays, about = read("mended.h5")
    np.testing.assert_allclose(arrays["images"], wanted.images.numpy(), atol=1e-5)
    assert about["floor"] == pytest.approx(floor, rel=1e-5)
    assert "by closed form" in said
    assert f"{wanted.certificate.reached.sum()} of 70 images reach the rule" in said
    assert json.loads(about["certificate"])["reached"] == wanted.certificate.reached.sum()
    with SampleFile("mended.h5") as file:
        np.testing.assert_allclose(file.certificate.moved, wanted.certificate.moved, rtol=1e-3)
        np.testing.assert_array_equal(file.images[:], arrays["images"])
    assert arrays["distances"].mean() < 0.1 * repaired.after.distance.mean
    assert set(json.loads(about["scores"])) == {"before", "repaired", "polished", "data"}


def test_a_file_of_samples_is_read_and_what_was_written_is_read_again(namm, whole_run):
    assert namm("sample", whole_run, "-n", 40, "-o", "samples.h5", "--model", "dm")[0] == 0
    assert namm("repair", whole_run, "samples.h5", "-o", "a.h5")[0] == 0
    with SampleFile("samples.h5") as file:
        wanted = expected(whole_run, file.images[:], "finetune")
    np.testing.assert_allclose(read("a.h5")[0]["images"], wanted.images.numpy(), atol=1e-5)
    assert namm("repair", whole_run, "a.h5", "-o", "b.h5")[0] == 0


def test_f_is_trained_on_these_images_first_and_goes_on(namm, whole_run, samples, monkeypatch, tmp_path, unwatched):
    command = ("repair", whole_run, "theirs.npy", "--finetune", *NCHW, "-o")
    asked = []

    def watched(mirror, data, y, *arguments, **options):
        asked.append((y, options["validation"][1], options["settings"]))
        return trained(mirror, data, y, *arguments, **options)

    trained = train_map.finetune_map
    monkeypatch.setattr(train_map, "finetune_map", watched)
    with unwatched():
        code, said = namm(*command, "a.h5")
    assert code == 0, said
    assert "f trained on 63 of these images for 6 steps, in a-finetune-finetune" in said
    parts = RunParts.load(whole_run)
    (y, others, settings) = asked[0]
    assert settings == parts.settings.finetune.train
    with torch.no_grad():
        whole = parts.mirror("finetune").to_mirror(samples).numpy()
    np.testing.assert_allclose(others, whole[9::10], atol=1e-5)
    np.testing.assert_allclose(y, np.delete(whole, np.arange(9, 70, 10), 0), atol=1e-5)
    arrays, about = read("a.h5")
    assert about["finetuned"]
    assert about["weights"] != weights_digest(parts.mirror("finetune"))
    (tmp_path / "a.h5").unlink()
    checkpoint = {path: path.stat().st_mtime_ns for path in (tmp_path / "a-finetune-finetune").rglob("*.safetensors")}
    with unwatched():
        assert namm(*command, "a.h5")[0] == 0  # nothing is trained a second time
    assert {path: path.stat().st_mtime_ns for path in checkpoint} == checkpoint
    np.testing.assert_array_equal(read("a.h5")[0]["images"], arrays["images"])


def test_images_of_another_range_are_warned_of(namm, whole_run, samples):
    np.save("signed.npy", 2 * samples.numpy() - 1)
    with pytest.warns(NammWarning, match="channel 0 of the images has mean and standard deviation .* Rescale those"):
        code, said = namm("repair", whole_run, "signed.npy", "-o", "a.h5", *NCHW)
    assert code == 0
    assert "verdict: no gain" in said
    assert "try: " in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "theirs.npy", "-o", "a.h5"], 2, "there is no run 'nowhere'"),
        (["RUN", "theirs.npy", "-o", "a.h5"], 2, "does not say which axis"),
        (["RUN", "none.npy", "-o", "a.h5", *NCHW], 1, "There is no file or folder none.npy"),
        (["RUN", "theirs.npy", "-o", "a.npy", *NCHW], 2, "must name an HDF5 file"),
        (["RUN", "theirs.npy", *NCHW], 2, "-o"),
        (["RUN", "-o", "a.h5"], 2, "FILE"),
        (["RUN", "large.npy", "-o", "a.h5", *NCHW], 1, "are (1, 16, 16) and the data (1, 8, 8)"),
        (["RUN", "nan.npy", "-o", "a.h5", *NCHW], 1, "nan at index (3, 0, 1, 1)"),
        (["RUN", "theirs.npy", "-o", "a.h5", "--stage", "mdm", *NCHW], 2, "map"),
    ],
)
def test_what_cannot_be_repaired_leaves_no_file(namm, whole_run, samples, tmp_path, arguments, code, message):
    np.save("large.npy", np.random.default_rng(0).random((4, 1, 16, 16), np.float32))
    broken = samples.numpy().copy()
    broken[3, 0, 1, 1] = np.nan
    np.save("nan.npy", broken)
    found, said = namm("repair", *(str(whole_run) if each == "RUN" else each for each in arguments))
    assert found == code, said
    assert message in said
    assert not list(tmp_path.glob("a.*"))


def test_without_a_finetuned_f_the_maps_is_taken(namm, whole_run, samples, tmp_path):
    copy = shutil.copytree(whole_run, tmp_path / "runs" / "mine")
    shutil.rmtree(copy / "finetune")
    code, said = namm("repair", "mine", "theirs.npy", "-o", "a.h5", *NCHW)
    assert code == 0
    assert "f as the stage map left it" in said
    np.testing.assert_allclose(read("a.h5")[0]["images"], expected(copy, samples, "map").images.numpy(), atol=1e-6)
    code, said = namm("repair", "mine", "theirs.npy", "-o", "b.h5", "--stage", "finetune", *NCHW)
    assert code == 1
    assert "the stage 'finetune' of runs/mine has not been run" in said
