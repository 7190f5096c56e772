"""The rehearsed step: one that does not fit is refused before anything is spent, one that fits leaves no trace."""

import numpy as np
import pytest
import torch
from torch import nn

from namm.errors import MemoryShortage, UsageError, is_out_of_memory
from namm.experiments.engine import build_models
from namm.maps import IdentityMap
from namm.numerics import autocast
from namm.training import checkpoint, trainer
from namm.training.objectives import Objective
from namm.training.settings import TrainSettings
from namm.training.train_model import train_model
from namm.training.trainer import rehearse, step_memory, train

GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 8 GiB")
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried to allocate 9"
)
SHORTAGES = [GPU, CPU, MemoryError()]
X = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
QUICK = TrainSettings(budget="6 steps", batch_size=12, log_every=1, ema_decay=0.9, clip=1.0)


class Norm(Objective):
    """Has all that a step can change: weights, frozen ones, statistics in buffers, dropout, a clock of its own."""

    def __init__(self, limit: int = 10**9, error: Exception = GPU) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.limit, self.error, self.sizes = limit, error, []

    def draw(self, batch, generator):
        return (torch.randn(batch[0].shape, generator=generator),)

    def forward(self, *tensors):
        x, z = tensors
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise self.error
        y = nn.functional.dropout(self.norm(self.layer(x)) + 0.1 * z, 0.2, self.training)
        return {"loss": (y * self.frozen - x).square().mean()}


def fit(objective, folder=None, **changes):
    torch.manual_seed(3)
    settings = TrainSettings(**{**QUICK.__dict__, **changes})
    return train(objective, (X,), settings, folder=folder, progress=False)


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_what_does_not_fit_is_said_with_what_does(error, tmp_path):
    objective = Norm(limit=5, error=error)
    with pytest.raises(MemoryShortage, match=r"training: a step with batch_size 12 does not fit.*batch_size of 3 fits"):
        fit(objective, tmp_path / "new")
    assert objective.sizes == [12, 6, 3]
    assert not (tmp_path / "new").exists()  # so that the same folder may be used with a smaller batch
    assert fit(objective, tmp_path / "new", batch_size=3).steps == 6


def test_where_nothing_fits_another_remedy_is_named():
    with pytest.raises(MemoryShortage, match=r"not even a single image fits\. Take smaller networks or images"):
        fit(Norm(limit=0))


def test_of_the_allocators_message_one_line_is_kept():
    with pytest.raises(MemoryShortage) as caught:
        fit(Norm(limit=0))
    assert "Tried to allocate 20.00 GiB" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_is_one_step_at_the_full_batch_and_comes_before_the_data_are_prepared(monkeypatch):
    class Prepared(Exception):
        pass

    def prepare(*_):
        raise Prepared

    monkeypatch.setattr(trainer, "batches", prepare)
    objective = Norm()
    with pytest.raises(Prepared):
        fit(objective)
    assert objective.sizes == [12]


@pytest.mark.parametrize(("compiled", "taken"), [(False, 1000), (True, 2000)])  # half a batch is tried of the latter
def test_what_it_took_is_not_given_to_the_data(monkeypatch, compiled, taken):
    class Prepared(Exception):
        pass

    def prepare(images, order, device, reserved_bytes):
        raise Prepared(reserved_bytes)

    monkeypatch.setattr(trainer, "batches", prepare)
    monkeypatch.setattr(trainer, "peak", lambda device: 1000)
    assert step_memory(Norm()) == 0
    with pytest.raises(Prepared, match=f"^{taken}$"):
        fit(Norm(), compile=compiled)


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bf16_only_where_the_gpu_has_it(monkeypatch, native):
    def supported(including_emulation=True):
        return native or including_emulation

    asked = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch, "autocast", lambda *arguments, enabled: asked.append((*arguments, enabled)))
    autocast("auto", torch.device("cuda"))
    assert asked == [("cuda", torch.bfloat16, native)]


def test_a_training_ends_with_the_same_bits_with_it_and_without_it(tmp_path, monkeypatch):
    torch.manual_seed(1)
    weights = Norm().state_dict()
    found = {}
    for name in ("with", "without"):
        objective = Norm()
        objective.load_state_dict(weights)
        fit(objective, tmp_path / name)
        newest = sorted((tmp_path / name / "checkpoints").glob("*"))[-1]
        found[name] = checkpoint.read(newest).tensors | {
            "random": torch.rand(5),
            "calls": torch.tensor(objective.sizes),
        }
        monkeypatch.setattr(trainer, "rehearse", lambda *_, **__: None)
    assert len(found["with"].pop("calls")) == len(found["without"].pop("calls")) + 1
    assert found["with"].keys() == found["without"].keys()
    assert any("norm.running_mean" in name for name in found["with"])
    assert any("exp_avg" in name for name in found["with"])
    for name, tensor in found["with"].items():
        assert torch.equal(tensor, found["without"][name]), name


def test_it_leaves_weights_gradients_statistics_and_random_state_alone():
    objective = Norm()
    before = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    state = torch.get_rng_state()
    rehearse(objective, (X,), QUICK, torch.device("cpu"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.state_dict().items())
    assert all(p.grad is None for p in objective.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    rehearse(objective, (X,), QUICK, torch.device("cpu"))
    assert objective.sizes == [12]  # once is enough


def test_a_finished_training_is_not_rehearsed(tmp_path):
    fit(Norm(), tmp_path / "run")
    again = Norm(limit=5)
    assert fit(again, tmp_path / "run").steps == 6
    assert again.sizes == []


def test_of_what_will_be_compiled_half_a_batch_is_tried_and_processes_share_it():
    for settings, world, size in ((TrainSettings(batch_size=12, compile=True), 1, 6), (QUICK, 2, 6)):
        objective = Norm()
        rehearse(objective, (X,), settings, torch.device("cpu"), world=world)
        assert objective.sizes == [size]


def test_a_batch_larger_than_the_data_is_tried_whole():
    objective = Norm()
    rehearse(objective, (X[:5].numpy().astype(np.float64),), QUICK, torch.device("cpu"))
    assert objective.sizes == [12]


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes do not match"):
        fit(Norm(limit=0, error=RuntimeError("shapes do not match")))
    with pytest.raises(UsageError, match="mine"):
        fit(Norm(limit=0, error=UsageError("mine")))


def test_which_errors_are_of_memory():
    assert all(is_out_of_memory(error) for error in [*SHORTAGES, MemoryShortage(""), OSError(12, "Cannot allocate")])
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not any(
        is_out_of_memory(e) for e in (RuntimeError("size mismatch"), ValueError("out of memory"), OSError(28, ""))
    )


# Models


@pytest.fixture
def model(tiny_preset):
    s = tiny_preset.settings
    return build_models.diffusion(s.mdm.network, s.mdm.diffusion, (1, 8, 8), 0)


def limited(monkeypatch, model, limit):
    """Let the network refuse more than `limit` images, and count what it is given."""
    sizes, forward = [], model.network.forward

    def guarded(y, t):
        sizes.append(len(y))
        if len(y) > limit:
            raise CPU
        return forward(y, t)

    monkeypatch.setattr(model.network, "forward", guarded)
    return sizes


def test_a_model_is_rehearsed_before_its_data_are_mapped(model, monkeypatch):
    mapped = []
    monkeypatch.setattr("namm.training.train_model.mirror_images", lambda *_: mapped.append(1))
    limited(monkeypatch, model, 4)
    with pytest.raises(MemoryShortage, match=r"model: a step with batch_size 8 .* 4 fits"):
        train_model(model, X, IdentityMap(), settings=TrainSettings(budget="2 steps", batch_size=8), progress=False)
    assert not mapped
