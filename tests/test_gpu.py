"""What a GPU likes: the same numbers in another order of memory, of sums, of launches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from namm.experiments import build
from namm.experiments.presets import preset
from namm.generative.compiled import FixedBatch
from namm.gpu import BAND, affine, compile_options, lay_out, moments

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_weights_of_convolutions_are_laid_out_for_a_gpu():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(2, 2, 2), nn.Linear(4, 4), nn.Conv2d(1, 4, 3))
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    lay_out(module, CPU)
    assert module[0].weight.is_contiguous()
    lay_out(module, CUDA)
    assert module[0].weight.stride() == (27, 1, 9, 3)
    assert module[3].weight.stride() == (9, 1, 3, 1)  # of one input channel: the output follows these
    x = torch.zeros(2, 1, 5, 5)
    assert module[3](x).is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(weight, before[name]) for name, weight in module.named_parameters())


@given(
    batch=st.integers(1, 3),
    channels=st.integers(2, 4),
    height=st.sampled_from([1, 3, 8, 64]),
    width=st.sampled_from([4, 20, 128, BAND + 1]),
    last=st.booleans(),
)
def test_moments_of_bands_join_to_those_of_a_channel(batch, channels, height, width, last):
    memory = torch.channels_last if last else torch.contiguous_format
    x = (3 + torch.randn(batch, channels, height, width, dtype=torch.float64)).contiguous(memory_format=memory)
    variance, mean = moments(x)
    assert variance.shape == mean.shape
    assert mean.shape[2] == 1 or (x.stride(1) == 1 and height * width // mean.shape[2] <= max(BAND, width))
    whole = mean.mean(2)
    spread = (variance + (mean - whole[..., None]).square()).mean(2)
    assert torch.allclose(whole, x.mean((2, 3)), rtol=1e-12)
    assert torch.allclose(spread, x.var((2, 3), correction=0), rtol=1e-10, atol=1e-14)


def test_long_sums_are_cut_and_short_ones_are_not():
    shapes = {(64, 64): 16, (32, 32): 4, (16, 16): 1, (128, 256): 128, (30, 64): 1}
    for (height, width), bands in shapes.items():
        x = torch.ones(2, 3, height, width).contiguous(memory_format=torch.channels_last)
        assert moments(x)[0].shape == (2, 3, bands)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_affine_and_its_gradients(memory):
    x = torch.randn(2, 3, 64, 32, dtype=torch.float64).contiguous(memory_format=memory).requires_grad_()
    scale, shift = (torch.randn(2, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    found, expected = affine(x, scale, shift), x * scale[..., None, None] + shift[..., None, None]
    assert torch.allclose(found, expected, rtol=1e-14)
    assert found.is_contiguous(memory_format=memory)
    weight, leaves = torch.randn_like(found), (x, scale, shift)
    pairs = zip(*(torch.autograd.grad(each, leaves, weight) for each in (found, expected)), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-11) for a, b in pairs)


def test_launches_are_recorded_where_they_are_what_a_gpu_waits_for():
    """As measured: the score network at every batch, the map at small ones only."""
    s = preset("burgers", "paper").settings
    image, maps = 64**2, build.mirror(s.map, 1)
    score = build.diffusion(s.mdm.network, s.mdm.diffusion, (1, 64, 64), seed=0)

    def recorded(network, images, device=CUDA, world=1):
        return compile_options(network, device, images * image, world)["triton.cudagraphs"]

    assert recorded(score, 64)
    assert recorded(score, 256)
    assert recorded(maps, 16)
    assert not recorded(maps, 128)
    assert not recorded(maps, 16, world=2)
    assert not recorded(maps, 16, device=CPU)


def test_options_are_inductors():
    """A misspelt option is refused by torch, and only when something is compiled."""
    found = torch.compile(lambda x: x + 1, options=compile_options(nn.Linear(1, 1), CUDA, 1))
    assert callable(found)


def test_what_a_replay_will_overwrite_is_copied(monkeypatch):
    memory = torch.zeros(3, 1, 2, 2)

    def replay(y_t, t):
        return memory.copy_(y_t)

    monkeypatch.setattr(torch, "compile", lambda network, **options: replay)
    call = FixedBatch(nn.Linear(1, 1), 3, (1, 2, 2), CUDA)
    first = call(torch.ones(3, 1, 2, 2), torch.ones(3))
    second = call(2 * torch.ones(2, 1, 2, 2), torch.ones(2))
    assert first.eq(1).all()
    assert second.eq(2).all()
    assert second.shape == (2, 1, 2, 2)
