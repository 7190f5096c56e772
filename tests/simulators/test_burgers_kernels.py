"""All sweeps of an implicit step in one kernel, by triton's interpreter."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from namm.constraints import Burgers
from namm.simulators.burgers import LONGEST, _has_kernel

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


def test_states_and_gradients_agree_with_float64(interpreted):
    interpreted(SOLVED, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_states_and_gradients_agree_with_float64_on_a_gpu():
    subprocess.run([sys.executable, "-c", SOLVED, "cuda"], check=True)


COMPILED = """
import torch
from namm.constraints import Burgers
from namm.simulators import burgers

torch.manual_seed(0)
x = 0.5 * torch.rand(3, 1, 16, 9)

def both(call, x=x):
    leaf = x.clone().requires_grad_()
    distance = call(leaf)
    return distance.detach(), *torch.autograd.grad(distance.sum(), leaf)

taken = []
burgers._has_kernel = lambda r, dim: taken.append(dim) or True
plain = both(Burgers())
true = both(Burgers(), x.double())
assert not taken  # what is not compiled can be differentiated twice, and vmapped
ours = both(torch.compile(Burgers(), fullgraph=True, backend="aot_eager"))
assert taken
assert 0 < max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, true, strict=True)) < 1e-5

# torch.func's transformations have no rules for it: there are sweeps
taken.clear()
gradient = torch.func.grad(lambda x: Burgers()(x).sum())
steepest = torch.compile(gradient, fullgraph=True, backend="aot_eager")(x)
assert torch.allclose(steepest, plain[1], atol=1e-6)
slope = lambda x: torch.func.jvp(Burgers(), (x,), (torch.ones_like(x),))[1]
found = torch.compile(slope, fullgraph=True, backend="aot_eager")(x)
ahead, behind = (Burgers()(x.double() + step) for step in (1e-6, -1e-6))
assert torch.allclose(found.double(), (ahead - behind) / 2e-6, atol=1e-5)
assert not taken
"""


def test_a_compiler_takes_it_as_it_is(interpreted):
    interpreted(COMPILED)


UNKNOWN = """
import torch
from namm.simulators.burgers import BurgersGrid, _by_kernel, _ImplicitHalfStep

grid = BurgersGrid(10 / 12, 0.025)
r = torch.rand(1, 1, 13, 2)
r[..., 4, 0] = torch.nan
for call in (lambda r: _by_kernel(r, grid), lambda r: _ImplicitHalfStep.apply(r, grid, -2)):
    leaf = r.clone().requires_grad_()
    v = call(leaf)
    (gradient,) = torch.autograd.grad(v, leaf, torch.ones_like(v))
    assert v[..., 0].isnan().all()
    assert gradient[..., 0].isnan().all()
    assert gradient[..., 1].isfinite().all()
"""


def test_what_is_not_a_number_stays_so(interpreted):
    interpreted(UNKNOWN)


LOOPS = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from namm.simulators.burgers_kernels import _relax

for adjoint in (False, True):
    constants, kinds = {"ADJOINT": adjoint, "N": 64, "LINES": 16}, {"n": "i32", "lines": "i32", "sweeps": "i32"}
    pointers = ("v", "grad", "out", "other")
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*fp32" if name in pointers else "fp32")
        for name in _relax.arg_names
    }
    made = triton.compile(ASTSource(_relax, signature, constants), target=GPUTarget("cuda", 90, 32))
    loop = re.search(r"scf[.]for .*iter_args[(](.*?)[)] ->", made.asm["ttgir"]).group(1)
    assert loop.count("=") == 4, loop  # two states, two places
"""


def test_a_loop_keeps_both_states():
    """As triton compiles it for a GPU; the interpreter does not show what it makes one of."""
    pytest.importorskip("triton", reason="triton is not installed here")
    subprocess.run([sys.executable, "-c", LOOPS], check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_compiled_distances_agree_with_float64_on_a_gpu():
    x = torch.rand(3, 1, 64, 40, device="cuda")
    sides = []
    for rule, dtype in ((torch.compile(Burgers(), fullgraph=True), torch.float), (Burgers(), torch.double)):
        leaf = x.to(dtype).requires_grad_()
        found = rule(leaf)
        sides.append((found.detach(), *torch.autograd.grad(found.sum(), leaf)))
    for ours, true in zip(*sides, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-5 * float(true.abs().max()))


def test_kernels_are_for_float32_on_a_gpu_along_columns(monkeypatch):
    monkeypatch.setattr("namm.simulators.burgers.HAS_TRITON", True)

    def has(dtype=torch.float32, dim=-2, cuda=True, rows=64):
        return _has_kernel(SimpleNamespace(is_cuda=cuda, dtype=dtype, ndim=4, shape=(2, 1, rows, 9)), dim)

    assert has()
    assert has(dim=2)
    assert not has(dim=-1)
    assert not has(dtype=torch.float64)
    assert not has(cuda=False)
    assert not has(rows=LONGEST + 1)
    monkeypatch.setattr("namm.simulators.burgers.HAS_TRITON", False)
    assert not has()
