"""Weights in one vector learn what they would learn one by one; averages and moments are kept."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from namm.errors import CheckpointError, TrainingError
from namm.training.checkpoint import Checkpoint
from namm.training.state import ALIGNMENT, Ema, FlatWeights, TrainingState


def network() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 1)).double()
    made[2].weight.data = made[2].weight.data.contiguous(memory_format=torch.channels_last)
    return made


def weights_of(module):
    return list(module.parameters())


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=6))
def test_weights_stay_as_they_are_and_begin_at_wide_pieces_of_memory(shapes):
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    before = [weight.detach().clone() for weight in weights]
    flat = FlatWeights(weights)
    (vector,) = flat.vectors
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight, old)
        assert weight.stride() == old.stride()
        assert (weight.data_ptr() - vector.data_ptr()) % ALIGNMENT == 0
    kept = sum(float(weight.double().square().sum()) for weight in weights)
    assert float(vector.double().square().sum()) == pytest.approx(kept)  # nothing overlaps, and zeros lie between


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([torch.float32, torch.float64])), min_size=1))
def test_weights_of_one_kind_and_dtype_share_a_vector(labels):
    weights = [nn.Parameter(torch.full((k + 1,), float(k), dtype=dtype)) for k, (_, dtype) in enumerate(labels)]
    flat = FlatWeights(weights, [kind for kind, _ in labels])
    assert list(zip(flat.kinds, [v.dtype for v in flat.vectors], strict=True)) == list(dict.fromkeys(labels))
    assert sum(flat.counts) == len(labels)
    for k, (weight, label) in enumerate(zip(weights, labels, strict=True)):
        vector = flat.vectors[flat.vector_of(k)]
        assert (flat.kinds[flat.vector_of(k)], vector.dtype) == label
        assert weight.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
        assert torch.equal(flat.view(k, vector), torch.full((k + 1,), float(k), dtype=label[1]))


def test_gradients_that_were_not_finite_leave_no_trace():
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    flat = FlatWeights(weights)
    (vector,) = flat.vectors
    for size in (float("nan"), float("inf"), 2.0):
        for weight in weights:
            weight.grad = torch.full_like(weight, size)
        flat.gather()
        norm = torch.nn.utils.clip_grad_norm_(flat.vectors, 1.0)
    assert float(norm) == pytest.approx(2 * 8**0.5)
    assert float(vector.grad.square().sum()) == pytest.approx(1.0, rel=1e-4)


def test_they_learn_what_they_would_one_by_one():
    ours, theirs = network(), network()
    flat = FlatWeights(weights_of(ours))
    one = torch.optim.Adam(flat.vectors, lr=0.01, fused=True)
    many = torch.optim.Adam(theirs.parameters(), lr=0.01)
    for step in range(30):
        x = torch.randn(4, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for module in (ours, theirs):
            (module(x) - 3).square().mean().backward()
        flat.gather()
        torch.nn.utils.clip_grad_norm_(flat.vectors, 0.5)
        one.step()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        many.step()
        many.zero_grad()
    for a, b, start in zip(weights_of(ours), weights_of(theirs), weights_of(network()), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(a, start, rtol=1e-2)


def test_a_weight_without_gradient_stays_where_it_is():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    flat = FlatWeights([used, unused])
    optimiser = torch.optim.Adam(flat.vectors, lr=0.1)
    for _ in range(3):
        used.sum().backward()
        flat.gather()
        assert used.grad is None
        optimiser.step()
    assert torch.allclose(used, torch.full((3,), 0.7))
    assert torch.equal(unused, torch.ones(2))
    unused.sum().backward()
    flat.gather()
    assert flat.vectors[0].grad.count_nonzero() == 2  # what was gathered before is forgotten


def test_layouts_are_kept_and_gaps_closed():
    last = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
    before = [last.detach().clone(), gaps.detach().clone()]
    FlatWeights([last, gaps])
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert gaps.is_contiguous()
    assert torch.equal(last, before[0])
    assert torch.equal(gaps, before[1])


def test_every_dtype_has_a_vector():
    weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)]
    flat = FlatWeights(weights)
    assert [vector.dtype for vector in flat.vectors] == [torch.float32, torch.float64]
    sum((k * weight).sum() for k, weight in enumerate(weights, 1)).backward()
    flat.gather()
    assert [float(vector.grad.sum()) for vector in flat.vectors] == [8.0, 4.0]


def test_released_weights_own_their_memory():
    module = network()
    values = copy.deepcopy(module.state_dict())
    flat = FlatWeights(weights_of(module))
    flat.release()
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, values[name])
        assert weight.stride() == values[name].stride()
        assert weight.untyped_storage().nbytes() == weight.numel() * 8


def state_of(module):
    """A training of the module, and a step of it."""
    flat = FlatWeights(weights_of(module))
    optimiser = torch.optim.Adam(flat.vectors, lr=0.01)

    def step(number):
        x = torch.randn(4, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        (module(x) - 3).square().mean().backward()
        flat.gather()
        optimiser.step()

    return TrainingState(module, flat, [optimiser], 0.9), step


def test_moments_are_kept_for_each_weight_whatever_its_layout():
    """As of a training that began on a GPU, where layouts are others, and goes on without one."""
    first, second = network(), network()
    second[2].weight.data = second[2].weight.data.contiguous()
    (here, step_here), (there, step_there) = state_of(first), state_of(second)
    for number in range(5):
        step_here(number)
    kept = here.checkpoint()
    shapes = [tuple(kept.tensors[f"optimiser/{k}/exp_avg"].shape) for k in range(len(weights_of(first)))]
    assert shapes == [tuple(weight.shape) for weight in first.parameters()]
    there.restore(kept.copy())
    for number in range(5, 10):
        step_here(number)
        step_there(number)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("moments", [{"exp_avg": torch.zeros(3)}, {"other": torch.zeros(3, 2, 3, 3)}])
def test_moments_of_other_weights_are_refused_before_anything_is_changed(moments):
    module = network()
    state, step = state_of(module)
    kept = state.checkpoint().copy()
    step(0)
    after = module[0].weight.detach().clone()
    wrong = {f"optimiser/0/{name}": value for name, value in moments.items()}
    with pytest.raises(CheckpointError, match="moments are those of other weights"):
        state.restore(Checkpoint({**kept.tensors, **wrong}, kept.facts))
    assert torch.equal(module[0].weight, after)


def test_a_weight_that_is_replaced_is_noticed():
    module = network()
    flat = FlatWeights(weights_of(module))
    with torch.no_grad():
        module[0].weight.clamp_(min=0)
    flat.require_in_place()
    module[0].weight.data = module[0].weight.data.clamp(min=0)
    with pytest.raises(TrainingError, match="change weights in place"):
        flat.require_in_place()


# The moving average


def test_moving_average_against_the_recursion():
    """The official code mixes the last two raw weights; a true average remembers all of them."""
    weight, counter = torch.zeros(3), torch.tensor(0)
    ema = Ema({"weight": weight, "counter": counter}, decay=0.9)
    expected = 0.0
    for n in range(200):
        weight.copy_(torch.full((3,), math.sin(n)))
        counter += 1
        ema.update(n)
        d = min(0.9, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * math.sin(n)
    assert torch.allclose(ema.average["weight"], torch.full((3,), expected), atol=1e-6)
    assert ema.average["counter"] == 200


def test_several_averages_in_closed_form():
    """Of a weight that is 0 and then 1 for N steps: 1 − Π d_n, where Π (1 + n)/(10 + n) is 1 / (N+9 choose 9)."""
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    state = TrainingState(module, FlatWeights(weights_of(module)), [], 0.05, (0.1, 0.99999))
    with torch.no_grad():
        module.weight.fill_(1.0)
    for n in range(7):
        state.average(n)
    assert state.ema.average["weight"].item() == pytest.approx(1 - 0.05**7, rel=1e-15)
    assert state.averages[0.1].average["weight"].item() == pytest.approx(1 - 0.1**7, rel=1e-15)
    assert state.averages[0.99999].average["weight"].item() == pytest.approx(1 - 1 / math.comb(16, 9), rel=1e-14)


def test_applied_average_is_taken_back():
    weight = torch.zeros(3)
    ema = Ema({"weight": weight}, decay=0.5)
    weight.fill_(4.0)
    with ema.applied():
        assert torch.equal(weight, torch.zeros(3))
    assert torch.equal(weight, torch.full((3,), 4.0))


def test_steps_are_undone_with_moments_and_average():
    module = network()
    state, step = state_of(module)
    step(0)
    state.ema.update(0)
    before = state.checkpoint().copy()
    with state.undone():
        for number in range(1, 4):
            step(number)
            state.ema.update(number)
        assert not torch.equal(module[0].weight, before.tensors["model/0.weight"])
    after = state.checkpoint()
    assert after.facts == before.facts
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in after.tensors.items())
