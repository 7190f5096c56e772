"""All sweeps of an implicit step in one kernel, by triton's interpreter."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from namm.simulators.burgers import _has_kernel

SOLVED = """
import sys
import torch
from namm.simulators.burgers import BurgersGrid, _ImplicitHalfStep
from namm.simulators.burgers_kernels import solve

torch.manual_seed(0)
torch.set_default_device(sys.argv[1])
for rows, columns, flip in ((8, 5, 1), (13, 3, -1), (64, 40, -1)):
    grid = BurgersGrid(flip * 10 / (rows - 1), 0.025)
    how = (grid.advection, grid.diffusion, grid.covered_speed, grid.relaxation, grid.sweeps(torch.float32))
    r, pull = 0.7 * torch.randn(2, 1, rows, columns), torch.randn(2, 1, rows, columns)
    sides = []
    for dtype in (torch.float, torch.double):
        leaf = r.to(dtype).requires_grad_()
        v = solve(leaf, *how) if dtype == torch.float else _ImplicitHalfStep.apply(leaf, grid, -2)
        sides.append((v.detach(), *torch.autograd.grad(v, leaf, pull.to(dtype))))
    for ours, true in zip(*sides, strict=True):
        assert (ours - true).abs().max() < 2e-6, (rows, (ours - true).abs().max())
    assert (sides[1][0] - r).abs().max() > 1e-3
    torch.library.opcheck(solve, (r.requires_grad_(), *how))
"""


def test_distances_agree_with_float64(interpreted):
    """By the benchmark, whose exit code says so."""
    script = Path(__file__).parents[2] / "benchmarks" / "implicit_step.py"
    assert "largest difference from float64" in interpreted(str(script))


def test_states_and_gradients_agree_with_float64(interpreted):
    interpreted("-c", SOLVED, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_states_and_gradients_agree_with_float64_on_a_gpu():
    subprocess.run([sys.executable, "-c", SOLVED, "cuda"], check=True)


COMPILED = """
import torch
from namm.constraints import Burgers
from namm.simulators import burgers

torch.manual_seed(0)
x = 0.5 * torch.rand(3, 1, 16, 9)

def both(call):
    leaf = x.clone().requires_grad_()
    distance = call(leaf)
    return distance.detach(), *torch.autograd.grad(distance.sum(), leaf)

taken = []
burgers._has_kernel = lambda r, dim: taken.append(dim) or True
plain = both(Burgers())
assert not taken  # what is not compiled can be differentiated twice, and vmapped
ours = both(torch.compile(Burgers(), fullgraph=True, backend="aot_eager"))
assert taken
assert 0 < max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True)) < 1e-5
"""


def test_a_compiler_takes_it_as_it_is(interpreted):
    interpreted("-c", COMPILED)


def test_kernels_are_for_float32_on_a_gpu_along_columns(monkeypatch):
    monkeypatch.setattr("namm.simulators.burgers.HAS_TRITON", True)

    def has(dtype=torch.float32, dim=-2, cuda=True):
        return _has_kernel(SimpleNamespace(is_cuda=cuda, dtype=dtype, ndim=4), dim)

    assert has()
    assert has(dim=2)
    assert not has(dim=-1)
    assert not has(dtype=torch.float64)
    assert not has(cuda=False)
    monkeypatch.setattr("namm.simulators.burgers.HAS_TRITON", False)
    assert not has()
