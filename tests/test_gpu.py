"""What a GPU likes: the same numbers in another order of memory and of launches."""

import torch
from torch import nn

from namm.experiments import build
from namm.experiments.presets import preset
from namm.generative.compiled import FixedBatch
from namm.gpu import compile_options, lay_out

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
    places = [weight.data_ptr() for weight in module.parameters()]
    lay_out(module, CUDA)
    assert [weight.data_ptr() for weight in module.parameters()] == places  # what is laid out already stays


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
