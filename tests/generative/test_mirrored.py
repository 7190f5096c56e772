"""Samples seen from data space."""

import pytest
import torch
from torch import nn

from namm.generative.diffusion import Diffusion
from namm.generative.mirrored import CHUNK, Mirrored
from namm.generative.samplers import DDIM
from namm.maps import IdentityMap, MirrorMap

OPTIONS = {"sampler": DDIM(4), "progress": False}


class Flat(nn.Module):
    """A network without weights."""

    def forward(self, y_t, t):
        return 0.5 * y_t


class Affine(nn.Module):
    """f(y) = 3 y − 1, with dropout that must be off; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.sizes = nn.Dropout(0.5), []

    def forward(self, y):
        self.sizes.append(len(y))
        return self.dropout(3 * y) - 1


def model() -> Diffusion:
    return Diffusion(Flat(), (1, 2, 2))


def test_samples_go_through_f_in_pieces():
    f = Affine()
    mirrored = Mirrored(model(), MirrorMap(nn.Identity(), f))
    n = 2 * CHUNK + 3
    x, y = mirrored.sample_pairs(n, generator=1, **OPTIONS)
    assert f.sizes == [CHUNK, CHUNK, 3]
    assert torch.allclose(x, 3 * y - 1)
    assert torch.equal(y, model().sample(n, generator=1, **OPTIONS))
    assert torch.equal(x, mirrored.sample(n, generator=1, **OPTIONS))
    assert f.dropout.training
    assert not x.requires_grad


def test_f_is_computed_in_float32_whatever_the_model_is():
    f = nn.Conv2d(1, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        x, y = Mirrored(model(), MirrorMap(nn.Identity(), f)).sample_pairs(8, generator=1, **OPTIONS)
        rounded = f(y)
    assert x.dtype == torch.float32
    assert torch.equal(x, f(y))
    assert (rounded - x).abs().max() > 1e-4


def test_the_identity_gives_the_plain_model():
    x = Mirrored(model(), IdentityMap()).sample(5, generator=1, **OPTIONS)
    assert torch.equal(x, model().sample(5, generator=1, **OPTIONS))


def test_any_model_and_any_pair_of_maps():
    class Constant:
        """No nn.Module, and options of its own."""

        sample_shape = (1, 1, 1)

        def sample(self, n, *, generator=None, value=0.0):
            return torch.full((n, 1, 1, 1), value)

    class Doubling:
        def to_mirror(self, x):
            return x / 2

        def to_data(self, y):
            return 2 * y

    assert Mirrored(Constant(), Doubling()).sample(3, value=4.0).flatten().tolist() == [8.0, 8.0, 8.0]
    with pytest.raises(TypeError, match="steps"):
        Mirrored(Constant(), Doubling()).sample(3, steps=4)
