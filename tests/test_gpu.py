"""What a GPU likes: the same numbers in another order of memory and of launches."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from namm.experiments.engine import build_models
from namm.experiments.presets import preset
from namm.generative import Diffusion, NCSNpp
from namm.generative.diffusion import FixedBatch
from namm.generative.networks.ncsnpp.layers import fir
from namm.gpu import Recorded, can_record, compile_options, use_channels_last, uses_kernels, with_kernels
from namm.training.train_model import ModelObjective

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_weights_of_convolutions_are_laid_out_for_a_gpu():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(2, 2, 2), nn.Linear(4, 4), nn.Conv2d(1, 4, 3))
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    use_channels_last(module, CPU)
    assert module[0].weight.is_contiguous()
    use_channels_last(module, CUDA)
    assert module[0].weight.stride() == (27, 1, 9, 3)
    assert module[3].weight.stride() == (9, 1, 3, 1)  # of one input channel: the output follows these
    x = torch.zeros(2, 1, 5, 5)
    assert module[3](x).is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(weight, before[name]) for name, weight in module.named_parameters())
    places = [weight.data_ptr() for weight in module.parameters()]
    use_channels_last(module, CUDA)
    assert [weight.data_ptr() for weight in module.parameters()] == places  # what is laid out already stays


def test_launches_are_recorded_where_they_are_what_a_gpu_waits_for():
    """As measured: the score network at every batch, the map at small ones only."""
    s = preset("burgers", "paper").settings
    image, maps = 64**2, build_models.mirror(s.map, torch.zeros(2, 1, 64, 64))
    score = build_models.diffusion(s.mdm.network, s.mdm.diffusion, (1, 64, 64), seed=0)

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


def score_network():
    return NCSNpp(height=8, filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0)


def test_a_network_with_kernels_is_recorded_on_a_gpu_in_float32(monkeypatch):
    monkeypatch.setattr("namm.gpu.HAS_TRITON", True)
    model = Diffusion(score_network(), (1, 8, 8))
    assert can_record(model.network, CUDA)
    assert can_record(ModelObjective(model), CUDA)
    assert not can_record(model.network, CPU)
    assert not can_record(nn.Linear(1, 1), CUDA)
    assert not can_record(ModelObjective(Diffusion(nn.Identity(), (1, 8, 8))), CUDA)
    assert not can_record(model.network.double(), CUDA)
    monkeypatch.setattr("namm.gpu.HAS_TRITON", False)
    assert not can_record(score_network(), CUDA)


def test_sampling_records_such_a_network(monkeypatch):
    monkeypatch.setattr("namm.generative.diffusion.can_record", lambda *_: True)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    network = score_network()
    nn.init.normal_(network.tail.weight)
    y_t, t = torch.randn(2, 1, 8, 8), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        assert torch.equal(FixedBatch(network, 3, (1, 8, 8), CPU)(y_t, t), network(y_t, t))


class OnGPU(torch.Tensor):
    """Memory of a CPU that says otherwise."""

    is_cuda = True


@pytest.fixture
def recorder(monkeypatch):
    """Stands in for CUDA graphs: a replay is the recorded call on the recording's memory; counts recordings."""
    recordings = []

    class Graph:
        def replay(self):
            recordings[-1]()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return recordings


def test_a_recording_is_replayed_on_new_numbers_and_made_anew_where_weights_moved(recorder):
    calls = []

    class Layer(nn.Linear):
        def forward(self, x):
            if uses_kernels():
                calls.append(x)
                output = super().forward(x)
                recorder.append(lambda: output.copy_(layer(x)))
                return output
            return super().forward(x)

    layer = Layer(2, 2).requires_grad_(False)
    quick = Recorded(layer)
    a, b = (torch.randn(3, 2).as_subclass(OnGPU) for _ in range(2))
    first, second = quick(a), quick(b)
    assert not uses_kernels()
    assert torch.equal(first, layer(a))  # the second replay has not overwritten it
    assert torch.equal(second, layer(b))
    assert len(calls) == Recorded.WARM_UP + 1
    layer.weight.mul_(2)
    assert torch.equal(quick(a), layer(a))
    assert len(calls) == Recorded.WARM_UP + 1
    layer.weight.data = 3 * layer.weight.data
    assert torch.equal(quick(a), layer(a))
    assert len(calls) == 2 * (Recorded.WARM_UP + 1)
    layer.eval()
    assert torch.equal(quick(a), layer(a))
    assert len(calls) == 3 * (Recorded.WARM_UP + 1)
    assert quick(a[:1]).shape == (1, 2)
    assert len(calls) == 4 * (Recorded.WARM_UP + 1)
    with torch.no_grad():
        quick(a[:1])
    assert len(calls) == 5 * (Recorded.WARM_UP + 1)


def test_a_recording_follows_the_arithmetic(recorder):
    calls = []

    def call(x):
        calls.append(x)
        recorder.append(lambda: None)
        return x + 1

    quick, x = Recorded(call), torch.ones(2).as_subclass(OnGPU)
    quick(x)
    with torch.backends.cudnn.flags(allow_tf32=not torch.backends.cudnn.allow_tf32):
        quick(x)
        quick(x)
    assert len(calls) == 2 * (Recorded.WARM_UP + 1)


def test_where_gradients_are_wanted_nothing_is_recorded(recorder):
    quick, x = Recorded(lambda x: x.square()), torch.ones(2).as_subclass(OnGPU).requires_grad_()
    assert torch.autograd.grad(quick(x).sum(), x)[0].tolist() == [2, 2]


def test_what_is_recorded_in_inference_mode_serves_outside(recorder):
    def call(x):
        output = x + 1

        @torch.inference_mode()
        def again():
            output.copy_(x + 1)

        recorder.append(again)
        return output

    quick = Recorded(call)
    with torch.inference_mode():
        quick(torch.zeros(2).as_subclass(OnGPU))
    with torch.no_grad():
        assert quick(torch.ones(2).as_subclass(OnGPU)).tolist() == [2, 2]


def test_filters_made_in_inference_mode_take_part_in_gradients():
    with torch.inference_mode(), with_kernels():
        kept = fir(3, 6, 2, 1, like=torch.zeros(1))
    assert not kept.is_inference()
    assert torch.equal(kept, fir(3, 6, 2, 1, like=torch.zeros(1)))


def test_a_recording_keeps_the_names_of_what_is_returned(recorder):
    def call(x):
        losses = {"loss": x.sum(), "term": x.prod()}
        recorder.append(lambda: losses["loss"].copy_(x.sum()))
        return losses

    quick = Recorded(call)
    found = quick(torch.ones(2).as_subclass(OnGPU)), quick(2 * torch.ones(2).as_subclass(OnGPU))
    assert [float(losses["loss"]) for losses in found] == [2, 4]
    assert found[0].keys() == {"loss", "term"}


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@on_a_gpu
def test_a_replay_draws_what_its_seed_says():
    drop = Recorded(lambda x: nn.functional.dropout(x, 0.5))
    x, found = torch.ones(1000, device="cuda"), []
    for seed in (0, 0, 1, 0):
        torch.cuda.manual_seed(seed)
        found.append(drop(x))
    assert torch.equal(found[1], found[3])  # the first made the recording
    assert not torch.equal(found[1], found[2])


@on_a_gpu
def test_a_recording_outlives_another():
    layers = [nn.Linear(256, 256, device="cuda").requires_grad_(False) for _ in range(2)]
    x = torch.randn(64, 256, device="cuda")
    first, second = (Recorded(layer) for layer in layers)
    first(x)
    second(x)
    del first
    torch.cuda.empty_cache()
    noise = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
    assert torch.equal(second(x), layers[1](x))
    assert len(noise) == 64
