"""How a GPU is told to compute, without one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from namm.errors import UsageError
from namm.numerics import arithmetic, autocast, backends, in_two, seed_torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def flags() -> tuple[bool, bool, bool]:
    """TF32 in convolutions and in products, and the trying out of convolutions."""
    cudnn = torch.backends.cudnn
    return cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, cudnn.benchmark


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", True), ("auto", True)])
def test_backends_of_a_gpu(precision, tf32):
    before = flags()
    with backends(precision, CUDA):
        assert flags() == (tf32, tf32, True)
    assert flags() == before
    with pytest.raises(KeyError), backends(precision, CUDA):
        raise KeyError
    assert flags() == before


def test_a_cpu_has_none():
    before = flags()
    with backends("fp32", CPU):
        assert flags() == before


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("auto", torch.float32), ("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)],
)
def test_precision_on_a_cpu(precision, dtype):
    with arithmetic(precision, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    with autocast(precision, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_seeding_is_torchs_own():
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        expected = torch.rand(3)
        seed_torch(5, CPU)
        assert torch.equal(torch.rand(3), expected)


def test_a_misspelt_precision_is_refused():
    with pytest.raises(UsageError, match=r"one of auto, fp32, tf32, bf16, not 'bf61'"), arithmetic("bf61", CPU):
        pass


@pytest.mark.parametrize("precision", ["auto", "fp32", "tf32"])
def test_plain_float32_is_plain_inside_of_autocast_too(precision):
    with torch.autocast("cpu", torch.bfloat16), arithmetic(precision, CPU):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20))
def test_two_parts_of_a_picture_survive_rounding(values):
    x = torch.tensor(values).reshape(1, 1, 1, -1)
    coarse, rest = in_two(x).chunk(2, dim=1)
    assert torch.equal(coarse, coarse.bfloat16().float())
    assert torch.equal(coarse + rest, x)
    smallest = torch.finfo(torch.bfloat16).tiny
    assert ((coarse + rest.bfloat16().float() - x).abs() <= 2.0**-16 * x.abs() + smallest).all()
