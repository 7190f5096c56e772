"""What version 0.1 wrote is read as it was meant: a pipeline, its network, the models of a run and their samples."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from namm import NAMMPipeline
from namm.experiments.engine import build_models
from namm.experiments.engine.run_parts import RunParts
from namm.generative import NCSNpp
from namm.generative.sample_file import SampleFile

ARCHIVE = Path(__file__).with_name("run_0_1.tar.xz")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("version_0_1")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_a_pipeline_is_loaded_though_its_network_has_moved(old, tmp_path):
    index = json.loads((old / "pipeline" / "model_index.json").read_text())
    assert index["network"] == ["namm.generative.ncsnpp", "NCSNpp"]  # a module that no longer exists
    pipe = NAMMPipeline.from_pretrained(old / "pipeline")
    assert type(pipe.network) is NCSNpp
    for name in ("g", "f", "network"):
        stored, loaded = load_file(old / "pipeline" / name / WEIGHTS), getattr(pipe, name).state_dict()
        assert stored.keys() == loaded.keys()
        assert all(torch.equal(stored[key], loaded[key]) for key in stored)

    pipe.save_pretrained(tmp_path)
    again = NAMMPipeline.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["network"] == [NCSNpp.__module__, "NCSNpp"]
    first, second = (each(batch_size=2, num_inference_steps=2, generator=0) for each in (pipe, again))
    assert torch.equal(first.images, second.images)
    assert first.images.shape == (2, 1, 8, 8)


def test_a_network_is_loaded_by_itself(old):
    folder = old / "pipeline" / "network"
    assert json.loads((folder / "config.json").read_text())["_class_name"] == "NCSNpp"
    stored, loaded = load_file(folder / WEIGHTS), NCSNpp.from_pretrained(folder).state_dict()
    assert all(torch.equal(stored[key], loaded[key]) for key in stored)


def test_the_samples_of_a_run_are_made_again(old):
    """From stored weights, seed and sampler: x, y and ℓ of the file, but for the rounding of another machine."""
    trained = RunParts.load(old / "run")
    settings = trained.settings.samples
    source = trained.source("mdm", trained.mirror("map"))
    with SampleFile(old / "run" / "samples" / "train.h5") as file:
        x, y = source.sample_pairs(
            settings.n, generator=settings.seed, progress=False, **build_models.sampling(settings.sampler)
        )
        assert np.allclose(x, file.images[:], atol=1e-4)
        assert np.allclose(y, file.mirror_images[:], atol=1e-4)
        assert np.allclose(trained.rule()(x).numpy(force=True), file.distances, rtol=1e-3)
        assert file.images[:].std() > 0.1
