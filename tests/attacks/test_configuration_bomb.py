"""A configuration of a few digits that asks for all memory, or for layers without end, before weights are read.

Whoever sends it sends no digests, or those that fit.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from namm.constraints.count import Counter
from namm.digests import DIGESTS
from namm.errors import CheckpointError, NammError
from namm.maps import ICNN, MirrorMap, ResNet


@pytest.fixture
def saved(tmp_path):
    MirrorMap(ICNN(1, 1, 2), ResNet(1, 2, 1, 1)).save(tmp_path)
    for digests in tmp_path.rglob(DIGESTS):
        digests.unlink()
    return tmp_path


def change(folder, side, **settings):
    path = folder / side / "config.json"
    config = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("side", "settings"),
    [
        ("g", {"filters": 10**6}),
        ("g", {"layers": 10**12}),
        ("g", {"kernel_size": 99_999}),
        ("f", {"blocks": 10**9}),
        ("f", {"downsamplings": 64}),
        ("f", {"filters": "many"}),
        ("f", {"blocks": None}),  # left out, it is the default's 6, and five blocks have no weights
        ("g", {"_class_name": ["ICNN"]}),
    ],
)
def test_a_network_must_fit_its_weights(saved, side, settings):
    change(saved, side, **settings)
    with pytest.raises(NammError):
        MirrorMap.load(saved)


def test_weights_in_pickles_are_not_looked_for(saved):
    weights = saved / "g" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    torch.save({"quadratic": torch.zeros(1)}, weights.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match="cannot be loaded as a ICNN"):
        MirrorMap.load(saved)


def test_a_counter_gets_no_memory_that_its_file_does_not_fill(tmp_path):
    counter = Counter(8, filters=(2, 2), width=4)
    header = json.dumps({"counter": {**counter.config, "size": 4 * 10**6, "width": 10**6}, "facts": {}})
    save_file(counter.state_dict(), tmp_path / "counter.safetensors", metadata={"namm": header})
    with pytest.raises(CheckpointError, match=r"counter\.safetensors is truncated or not a counter"):
        Counter.load(tmp_path / "counter.safetensors")
