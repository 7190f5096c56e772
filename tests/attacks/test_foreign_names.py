"""Digests and indices that name files outside their folder, and files beside the weights that would be read instead."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from namm.digests import DIGESTS, require_sealed, signed
from namm.errors import CheckpointError, NammError
from namm.maps import ICNN, MirrorMap, ResNet
from namm.pipeline import INDEX, NAMMPipeline, _index_sha256
from namm.training.checkpoint import read

NAMES = ["../secret", "/etc/hostname", "a/../../secret", "", "a\0b", "\ud800", "n" * 5000]


@pytest.mark.parametrize("name", NAMES)
def test_digests_name_files_of_their_folder_alone(tmp_path, name):
    (tmp_path / "secret").write_text("a")
    folder = tmp_path / "g"
    folder.mkdir()
    (folder / DIGESTS).write_text(json.dumps(signed({name: "0" * 64})))
    with pytest.raises(CheckpointError, match=r"the digests of .*g name .*, which is no file in it: copy it anew\."):
        require_sealed(folder, "copy it anew.")


def test_an_index_beside_the_weights_is_not_followed(tmp_path):
    """diffusers reads what an index names, wherever that lies, rather than the file whose digest was compared."""
    torch.manual_seed(0)
    mirror = MirrorMap(ICNN(1, 1, 2), ResNet(1, 2, 1, 1))
    mirror.save(tmp_path / "map")
    other = {name: tensor + 1 for name, tensor in mirror.g.state_dict().items()}
    save_file(other, tmp_path / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "../../other.safetensors")}
    (tmp_path / "map" / "g" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    state = torch.random.get_rng_state()
    read_back = MirrorMap.load(tmp_path / "map")
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, tensor in mirror.state_dict().items():
        assert torch.equal(read_back.state_dict()[name], tensor)


@pytest.mark.parametrize("entry", [{"/": 1}, {"..": 1}, {"_files": 5}, {"_files": None}, {"constraint": None}, {"": 1}])
def test_an_index_leads_nowhere_else(tmp_path, entry):
    (tmp_path / "secret").write_text("a")
    index = {"constraint": {}, "_files": {}, **entry}
    index = {name: value for name, value in index.items() if value is not None}
    folder = tmp_path / "pipe"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps(index | {"_sha256": _index_sha256(index)}))
    with pytest.raises(NammError):
        NAMMPipeline.from_pretrained(folder)


@pytest.mark.parametrize("about", ["[]", "[[1, 2]]", '"sha256"', "5", "null", '{"facts": []}'])
def test_a_header_of_another_kind_is_a_sentence(tmp_path, about):
    path = tmp_path / "step-000000001.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"namm": about})
    with pytest.raises(CheckpointError, match=os.fspath(path)):
        read(path)
