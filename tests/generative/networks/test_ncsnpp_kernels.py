"""Kernels of our own, by triton's interpreter, which needs no GPU."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_kernels_agree_with_torch_in_float64_and_learn_the_same(interpreted, tmp_path):
    file = tmp_path / "kernels.json"
    interpreted(str(BENCHMARKS / "score_network.py"), "--json", str(file))
    found = json.loads(file.read_text())
    assert 0 < found["difference"] < 1e-5
    assert found["learned"] < 1e-3


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
    assert 0 < float(interpreted("-c", SAME_NETWORK)) < 1e-4


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
    assert 0.3 < float(interpreted("-c", ROUNDED)) < 3


DROPOUT = """
import torch
from namm.generative.networks.ncsnpp.norm_kernels import normalised

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
    assert float(interpreted("-c", DROPOUT)) == pytest.approx(0.75, abs=0.03)


NARROW = """
import torch
from namm.generative.networks.ncsnpp.norm_kernels import normalised

x = 100 + torch.randn(2, 8, 96, 96)  # far from zero: sums of squares would cancel
for step in (0, 1000):
    x[:, :, :6] += step  # what is read first is then far from the rest
    true = torch.nn.functional.group_norm(x.double(), 2)
    ours = normalised(x, None, torch.ones(8), torch.zeros(8), 2, 1e-5, silu=False)
    print(float((ours - true).abs().max()))
"""


def test_nothing_cancels_where_the_mean_is_large(interpreted):
    assert max(map(float, interpreted("-c", NARROW).split())) < 1e-4


G = """
import torch
from namm.gpu import with_kernels
from namm.maps import ICNN
from namm.maps.kernels import icnn

torch.manual_seed(0)
for channels, layers, filters, rows, columns in ((1, 3, 16, 16, 16), (2, 2, 16, 8, 16), (1, 1, 32, 16, 24)):
    g = ICNN(channels, layers, filters)
    with torch.no_grad():
        g.hidden.uniform_(0, 0.05)
        g.output.uniform_(0, 0.05)
        g.bias.normal_(std=0.3)
    x = torch.rand(2, channels, rows, columns)
    found = icnn(g, x, tf32=False)
    with torch.no_grad(), with_kernels():
        assert torch.equal(g(x), icnn(g, x)) == ((channels, filters) == (1, 32))  # others are not known to be safe
    true = g.double()(x.double())
    assert (true - x).abs().max() > 0.1
    assert (found - true).abs().max() < 3e-6 * true.abs().max()
"""


def test_kernels_of_g_agree_with_its_closed_form_in_float64(interpreted):
    interpreted("-c", G)
