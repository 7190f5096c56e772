"""The pair of maps as one object, and on disk."""

import json

import pytest
import torch
from torch import nn

from namm.errors import CheckpointError, UsageError
from namm.maps import ICNN, IdentityMap, Mirror, MirrorMap, ResNet


def pair(**inverse) -> MirrorMap:
    return MirrorMap(ICNN(layers=1, filters=4), ResNet(filters=4, blocks=1, **inverse))


@pytest.mark.parametrize(
    "mirror",
    [
        pair(skip=True, boundary="circular", normalisation="none"),
        MirrorMap(ResNet(filters=4, blocks=1, activation="none"), ICNN(layers=1, filters=4)),
    ],
    ids=["icnn-resnet", "resnet-icnn"],
)
def test_saved_and_loaded_maps_agree_to_the_bit(mirror, tmp_path):
    mirror.eval().save(tmp_path)
    again = MirrorMap.load(tmp_path)
    x = torch.rand(2, 1, 16, 16)
    assert torch.equal(again.to_mirror(x), mirror.to_mirror(x))
    assert torch.equal(again.to_data(x), mirror.to_data(x))
    assert not again.training
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    assert json.loads((tmp_path / "f" / "config.json").read_text())["_class_name"] == type(mirror.f).__name__


def test_float64_weights_survive(tmp_path):
    mirror = pair().double().eval()
    mirror.save(tmp_path)
    again = MirrorMap.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), mirror.parameters(), strict=True))


def test_identity_map_has_the_same_two_methods():
    identity = IdentityMap()
    x = torch.rand(2, 1, 4, 4)
    assert isinstance(identity, Mirror)
    assert isinstance(pair(), Mirror)
    assert torch.equal(identity.to_data(identity.to_mirror(x)), x)
    assert not list(identity.parameters())


def test_a_network_of_the_users_own_is_accepted_but_not_saved(tmp_path):
    mirror = MirrorMap(nn.Identity(), ResNet(filters=4, blocks=1))
    x = torch.rand(1, 1, 8, 8)
    assert torch.equal(mirror.to_mirror(x), x)
    assert not mirror.can_save
    with pytest.raises(UsageError, match="g is a Identity"):
        mirror.save(tmp_path)


def test_folders_that_hold_no_map_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a saved mirror map"):
        MirrorMap.load(tmp_path / "nowhere")
    pair().save(tmp_path)
    config = tmp_path / "g" / "config.json"
    config.write_text(config.read_text().replace("ICNN", "Transformer"))
    with pytest.raises(CheckpointError, match="Transformer"):
        MirrorMap.load(tmp_path)


def test_truncated_weights_are_refused(tmp_path):
    pair().save(tmp_path)
    weights = next((tmp_path / "f").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"changed: .*f/diffusion_pytorch_model\.safetensors"):
        MirrorMap.load(tmp_path)
    (tmp_path / "f" / "digests.json").unlink()  # as version 0.1 left it
    with pytest.raises(CheckpointError, match="cannot be loaded as a ResNet"):
        MirrorMap.load(tmp_path)
