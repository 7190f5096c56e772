"""Kernels of our own, by triton's interpreter, which needs no GPU."""

import pytest

IN_FLOAT64 = """
import torch
import torch.nn.functional as F
from namm.generative.networks.ncsnpp.layers import SQRT_HALF
from namm.generative.networks.ncsnpp.kernels import activated, concatenated, joined, normalised

torch.manual_seed(0)
worst = 0.0

def compare(ours, true, *given):
    global worst
    sides = []
    for call, dtype in ((ours, torch.float), (true, torch.double)):
        leaves = [t.to(dtype).requires_grad_() for t in given]
        y = call(*leaves)
        pull = torch.cos(torch.arange(y.numel(), dtype=dtype)).view(y.shape)
        sides.append((y.detach(), *torch.autograd.grad(y, leaves, pull)))
    worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*sides, strict=True)))

def both(pair):
    return pair[0] + 2 * pair[1]

def norm(x, added, weight, bias):
    return F.group_norm(x + added[:, :, None, None], groups, weight, bias, 1e-6)

shapes = ((2, 8, 4, 4, 2), (3, 12, 4, 6, 3), (2, 6, 3, 3, 1), (2, 32, 8, 8, 8), (1, 192, 2, 2, 32), (2, 64, 16, 12, 16))
for images, channels, rows, columns, groups in shapes:  # a program holds less than the last
    x, h = (1 + 2 * torch.randn(images, channels, rows, columns) for _ in range(2))
    added, weight, bias = (torch.randn(shape) for shape in ((images, channels), (channels,), (channels,)))
    compare(lambda *t: normalised(*t, groups, 1e-6, silu=False), norm, x, added, weight, bias)
    compare(lambda *t: normalised(*t, groups, 1e-6, silu=True), lambda *t: F.silu(norm(*t)), x, added, weight, bias)
    compare(
        lambda x, w, b: both(activated(x, w, b, groups, 1e-6)),
        lambda x, w, b: F.silu(F.group_norm(x, groups, w, b, 1e-6)) + 2 * x,
        *(x, weight, bias),
    )
    compare(  # the gradient of what is joined is a part of another's
        lambda x, h, bias: concatenated(joined(x, h, bias), h),
        lambda x, h, bias: torch.cat([(x + h + bias[:, None, None]) * SQRT_HALF, h], dim=1),
        *(x, h, bias),
    )
print(worst)
"""


def test_values_and_gradients_agree_with_float64(interpreted):
    assert 0 < float(interpreted(IN_FLOAT64)) < 1e-5


LEARNED = """
import torch
from contextlib import nullcontext
from namm.generative import Diffusion, NCSNpp
from namm.gpu import with_kernels
from namm.training.train_model import ModelObjective
from namm.training.settings import TrainSettings
from namm.training.trainer import train

losses = []
for place in (nullcontext(), with_kernels()):
    torch.manual_seed(0)
    network = NCSNpp(height=8, filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0)
    images = torch.randn(8, 1, 8, 8)
    how = TrainSettings(budget="10 steps", batch_size=4, learning_rate=1e-2, validations=0, log_every=1)
    objective = ModelObjective(Diffusion(network, (1, 8, 8)))
    with place:
        losses.append(train(objective, (images,), how, progress=False).losses["loss"])
print(abs(losses[1] / losses[0] - 1))
"""


def test_a_network_learns_the_same_by_them(interpreted):
    assert float(interpreted(LEARNED)) < 1e-3


SAME_NETWORK = """
import torch
from namm.generative import NCSNpp
from namm.gpu import with_kernels

torch.manual_seed(0)
network = NCSNpp(height=8, filters=8, multipliers=(1, 2, 2, 1), blocks=1, attention=(4,), dropout=0.0)
for weight in network.parameters():
    torch.nn.init.normal_(weight, std=0.2)
x, t = torch.randn(2, 1, 8, 8), torch.tensor([0.2, 0.7])

def both():
    y = network(x, t)
    return y, *torch.autograd.grad(y.square().mean(), list(network.parameters()))

plain = both()
with with_kernels():
    ours = both()
print(max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(ours, plain, strict=True)))
"""


def test_the_network_computes_the_same(interpreted):
    """Down to a resolution of one pixel."""
    assert 0 < float(interpreted(SAME_NETWORK)) < 1e-4


ROUNDED = (
    SAME_NETWORK[: SAME_NETWORK.index("plain =")]
    + """
def off(found):
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(found, true, strict=True))

true = both()
with torch.autocast("cpu", torch.bfloat16):
    plain = off(both())
    with with_kernels():
        ours = off(both())
print(ours / plain)
"""
)


def test_in_bfloat16_it_is_nearly_as_near_to_float32(interpreted):
    """The interpreter cuts bits off where a GPU rounds, which alone is twice as wrong."""
    assert 0.3 < float(interpreted(ROUNDED)) < 3


DROPOUT = """
import torch
from namm.generative.networks.ncsnpp.kernels import normalised

x = torch.randn(4, 16, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
ones, zeros = torch.ones(16), torch.zeros(16)
plain = normalised(x, None, ones, zeros, 4, 1e-6, silu=True)
dropped = normalised(x, None, ones, zeros, 4, 1e-6, silu=True, dropout=0.25)
kept = dropped != 0
assert torch.allclose(dropped[kept], plain[kept] / 0.75, rtol=1e-5)
assert not torch.autograd.grad(dropped[~kept].sum(), x)[0].any()
print(float(kept.float().mean()))
"""


def test_what_is_dropped_is_zero_and_has_no_gradient(interpreted):
    assert float(interpreted(DROPOUT)) == pytest.approx(0.75, abs=0.03)


NARROW = """
import torch
from namm.generative.networks.ncsnpp.kernels import normalised

x = 100 + torch.randn(2, 8, 96, 96)  # far from zero: sums of squares would cancel
for step in (0, 1000):
    x[:, :, :6] += step  # what is read first is then far from the rest
    true = torch.nn.functional.group_norm(x.double(), 2)
    ours = normalised(x, None, torch.ones(8), torch.zeros(8), 2, 1e-5, silu=False)
    print(float((ours - true).abs().max()))
"""


def test_nothing_cancels_where_the_mean_is_large(interpreted):
    assert max(map(float, interpreted(NARROW).split())) < 1e-4
