"""AdamW and Muon against torch's own and against singular value decompositions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from namm.errors import UsageError
from namm.training.optimisers import (
    ITERATIONS,
    MOMENTUM,
    NEWTON_SCHULZ,
    RMS,
    SMALLEST,
    build,
    kinds,
    matrices_in,
    orthogonalised,
)
from namm.training.settings import TrainSettings
from namm.training.state import FlatWeights

CPU = torch.device("cpu")
ADAMW = TrainSettings(optimiser="adamw", learning_rate=0.01, betas=(0.9, 0.99), weight_decay=0.3)
MUON = TrainSettings(optimiser="muon", learning_rate=0.01, betas=(0.9, 0.99), weight_decay=0.3)


class Network(nn.Module):
    """Layers of every sort on images (B, 2, 6, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 16, 3)
        self.inner = nn.Conv2d(16, 24, 3)
        self.twin = nn.Conv2d(16, 24, 3)
        self.up = nn.ConvTranspose2d(24, 16, 2)
        self.table = nn.Embedding(20, 27)
        self.linear = nn.Linear(16 * 9, 27)
        self.free = nn.Parameter(torch.randn(32, 32))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(27, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.up(self.inner(h) + self.twin(h)))
        h = torch.tanh(self.linear(h.flatten(1)) + self.table.weight.mean(0))
        return self.last(h) + self.free.mean() + self.frozen.weight.mean()


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network().double()


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def gradients_of(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64, generator=generator)
    (module(x) - 3).square().mean().backward()


def descend(module: nn.Module, settings: TrainSettings, steps: int) -> None:
    """Train with the optimisers of `settings`."""
    weights = trained(module)
    flat = FlatWeights(weights, kinds(settings, module, weights))
    optimisers = build(settings, flat, CPU)
    for step in range(steps):
        gradients_of(module, step)
        flat.gather()
        for optimiser in optimisers:
            optimiser.step()


def decaying(weights, decay):
    """Groups of torch's optimisers: what has two axes or more decays."""
    return [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": decay},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]


def test_adamw_is_that_of_torch():
    ours, theirs = network(), network()
    descend(ours, ADAMW, 20)
    optimiser = torch.optim.AdamW(decaying(trained(theirs), 0.3), lr=0.01, betas=(0.9, 0.99))
    for step in range(20):
        optimiser.zero_grad()
        gradients_of(theirs, step)
        optimiser.step()
    for a, b, start in zip(trained(ours), trained(theirs), trained(network()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(a, start, rtol=1e-2)


# Orthogonal matrices


def lifted(values):
    """What the iterations make of singular values whose squares sum to one."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return values


def by_svd(matrix):
    """The same update from a singular value decomposition."""
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ (lifted(sigma / sigma.norm())[:, None] * vh)


sizes = st.integers(1, 24)


@given(n=st.integers(1, 4), rows=sizes, columns=sizes, scale=st.sampled_from([1e-6, 1.0, 1e6]), seed=st.integers(0, 99))
def test_singular_vectors_stay_and_values_become_about_one(n, rows, columns, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, rows, columns, dtype=torch.float64, generator=generator)
    found = orthogonalised(x)
    assert found.shape == x.shape
    for matrix, made in zip(x, found, strict=True):
        torch.testing.assert_close(made, by_svd(matrix), rtol=1e-6, atol=1e-8)
        u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
        values = (u.mT @ made @ vh.mT).diagonal()
        seen = values[sigma > 0.002 * sigma.norm()]
        assert float(seen.min()) > 0.68
        assert float(seen.max()) < 1.21


def test_in_less_precision_it_is_nearly_as_orthogonal():
    x = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    exact = orthogonalised(x.double())
    assert torch.allclose(orthogonalised(x).double(), exact, atol=1e-4)
    half = orthogonalised(x, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert float((half.double() - exact).norm() / exact.norm()) < 0.03


def test_zeros_and_the_smallest_gradients_do_no_harm():
    for size in (0.0, 1e-30, 1e-20):
        made = orthogonalised(torch.full((1, 16, 16), size))
        assert float(made.abs().max()) < 1e-4


# Muon


def test_a_step_is_what_it_would_be_for_each_matrix():
    """By singular values, one weight at a time, and AdamW of torch for what is no matrix."""
    ours, theirs = network(), network()
    descend(ours, MUON, 5)
    matrices = [theirs.inner.weight, theirs.twin.weight, theirs.up.weight, theirs.linear.weight]
    momenta = [torch.zeros_like(weight) for weight in matrices]
    others = [p for p in trained(theirs) if all(p is not weight for weight in matrices)]
    adamw = torch.optim.AdamW(decaying(others, 0.3), lr=0.01, betas=(0.9, 0.99))
    for step in range(5):
        for weight in trained(theirs):
            weight.grad = None
        gradients_of(theirs, step)
        adamw.step()
        for weight, momentum in zip(matrices, momenta, strict=True):
            with torch.no_grad():
                momentum.copy_(MOMENTUM * momentum + (1 - MOMENTUM) * weight.grad)
                direction = MOMENTUM * momentum + (1 - MOMENTUM) * weight.grad
                update = by_svd(direction.reshape(len(weight), -1))
                step_size = 0.01 * 0.2 * math.sqrt(max(update.shape))
                weight.copy_((1 - 0.01 * 0.3) * weight - step_size * update.reshape(weight.shape))
    for a, b, start in zip(trained(ours), trained(theirs), trained(network()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        assert not torch.equal(a, start)


def test_it_is_that_of_torch():
    """Which iterates in bfloat16, so the updates of one step are compared in its precision."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 40, bias=False), nn.Linear(40, 24, bias=False))
    theirs = nn.Sequential(nn.Linear(16, 40, bias=False), nn.Linear(40, 24, bias=False))
    theirs.load_state_dict(ours.state_dict())
    start = [w.detach().clone() for w in ours.parameters()]
    weights = trained(ours)
    flat = FlatWeights(weights, kinds(MUON, ours, weights))
    (muon,) = build(MUON, flat, CPU)
    options = {"lr": 0.01, "weight_decay": 0.3, "momentum": MOMENTUM, "adjust_lr_fn": "match_rms_adamw"}
    reference = torch.optim.Muon(theirs.parameters(), **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(weights, theirs.parameters(), strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=generator)
        flat.gather()
        muon.step()
        reference.step()
    for a, b, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        assert float((a - b).detach().norm() / (b - before).detach().norm()) < 0.03


@given(
    st.lists(st.sampled_from([(16, 16), (16, 17), (17, 16), (31, 19), (20, 16, 3), (16, 17, 1, 1)]), min_size=1),
    st.randoms(use_true_random=False),
)
def test_matrices_of_one_shape_share_a_vector_whatever_lies_between(shapes, random):
    torch.manual_seed(random.randrange(99))
    layers = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d}
    module = nn.Sequential(*(layers[len(s)](s[1], s[0], *s[2:3]) for s in shapes)).double()
    weights = trained(module)
    flat = FlatWeights(weights, kinds(MUON, module, weights))
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    expected = [weight.grad.reshape(len(weight), -1) for weight in weights if weight.ndim > 1]
    flat.gather()
    found = []
    for vector, kind, count in zip(flat.vectors, flat.kinds, flat.counts, strict=True):
        found += list(matrices_in(vector.grad, (count, *kind.matrix))) if kind.matrix else []
    assert len({kind.matrix for kind in flat.kinds}) == len(flat.kinds)
    assert len(found) == len(expected)
    for matrix in expected:
        assert any(matrix.shape == each.shape and torch.equal(matrix, each) for each in found)


def test_updates_are_as_large_as_the_rate_says():
    """Root mean square 0.2 η for any shape, where singular values become one; here 0.68 to 1.21."""
    module = nn.Sequential(nn.Conv2d(32, 16, 3), nn.Linear(64, 64), nn.Linear(20, 80)).double()
    settings = TrainSettings(optimiser="muon", learning_rate=0.5, weight_decay=0.0)
    weights = trained(module)
    before = [weight.detach().clone() for weight in weights]
    flat = FlatWeights(weights, kinds(settings, module, weights))
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    flat.gather()
    for optimiser in build(settings, flat, CPU):
        optimiser.step()
    sizes = [float((w - b).square().mean().sqrt()) for w, b in zip(weights, before, strict=True) if w.ndim > 1]
    assert sizes == pytest.approx([0.5 * RMS] * 3, rel=0.32)


def test_channels_last_makes_no_difference():
    """Columns are in another order then, and so are those of the update."""
    first, second = network(), network()
    second.inner.weight.data = second.inner.weight.data.contiguous(memory_format=torch.channels_last)
    for module in (first, second):
        descend(module, MUON, 3)
    assert not second.inner.weight.is_contiguous()
    torch.testing.assert_close(first.inner.weight, second.inner.weight, rtol=1e-9, atol=1e-9)


def test_a_weight_that_lies_column_by_column_is_no_matrix():
    module = network()
    module.linear.weight.data = module.linear.weight.data.T.contiguous().T
    assert {kind.matrix for kind in kinds(MUON, module, trained(module))} == {None, (24, 144), (24, 64)}


def test_which_weights_are_matrices():
    module = network()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    found = dict(zip(names, kinds(MUON, module, trained(module)), strict=True))
    shapes = {name: kind.matrix for name, kind in found.items() if kind.matrix}
    assert shapes == {
        "inner.weight": (24, 144),
        "twin.weight": (24, 144),
        "up.weight": (24, 64),
        "linear.weight": (27, 144),
    }
    assert {name for name, kind in found.items() if kind.decay} == {
        name for name in names if name.endswith("weight") or name == "free"
    }
    assert not any(kind.matrix for kind in kinds(ADAMW, module, trained(module)))
    assert len(set(kinds(TrainSettings(), module, trained(module)))) == 1


def test_a_network_without_matrices_is_refused():
    module = nn.Conv2d(SMALLEST, SMALLEST - 1, 3)
    with pytest.raises(UsageError, match=f"at least {SMALLEST} channels on either side. Take the optimiser adamw"):
        kinds(MUON, module, trained(module))
