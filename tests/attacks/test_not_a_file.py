"""A named pipe, a device or a folder in the place of a file: opening blocks, or reading never ends."""

import os

import pytest

from namm.constraints.count import Counter
from namm.datasets import load, open_store, read_images
from namm.datasets.user_files import content_hash, look
from namm.errors import NammError
from namm.exact.certificate import Certificate
from namm.experiments.assimilation.posterior_file import read_scores
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.settings_file import read_yaml
from namm.files import read_json
from namm.generative.sample_file import SampleFile
from namm.import_flax import read_official
from namm.maps import MirrorMap
from namm.training.log import read_metrics

READERS = {
    "x.h5": lambda path: read_images(path, key="images", layout="NCHW"),
    "x.npy": lambda path: read_images(path, layout="NCHW"),
    "x.npz": lambda path: read_images(path, key="images", layout="NCHW"),
    "a/x.png": lambda path: read_images(path.parent),
    "look.h5": look,
    "look.npy": lambda path: look(path, layout="NCHW"),
    "look.npz": lambda path: look(path, layout="NCHW"),
    "hash.npy": content_hash,
    "store.h5": open_store,
    "load.h5": lambda path: load(path, "train"),
    "samples.h5": SampleFile,
    "posterior.h5": read_scores,
    "settings.yaml": read_yaml,
    "run.json": read_json,
    "stage.json": lambda path: read_record(path.parent),
    "certificate.json": Certificate.load,
    "metrics.jsonl": read_metrics,
    "checkpoint_1": read_official,
    "counter.safetensors": Counter.load,
    "g/config.json": lambda path: MirrorMap.load(path.parent.parent),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_unopened(tmp_path, name, kind):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    if kind == "folder" and name in ("x.h5", "x.npy", "x.npz", "look.h5", "look.npy", "look.npz", "hash.npy"):
        pytest.skip("a folder of PNGs may be called anything")
    with pytest.raises(NammError):
        READERS[name](path)
