"""All sweeps of an implicit step in one kernel, by triton's interpreter."""

from pathlib import Path

SOLVED = """
import torch
from namm.simulators.burgers import BurgersGrid, _ImplicitHalfStep
from burgers_kernels import solve

torch.manual_seed(0)
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
    interpreted("-c", SOLVED)


COMPILED = """
import torch
from burgers_kernels import by_kernel
from namm.constraints import Burgers

torch.manual_seed(0)
x = 0.5 * torch.rand(3, 1, 16, 9)

def both(call):
    leaf = x.clone().requires_grad_()
    distance = call(leaf)
    return distance.detach(), *torch.autograd.grad(distance.sum(), leaf)

plain = both(Burgers())
ours = both(torch.compile(Burgers(step=by_kernel), fullgraph=True, backend="aot_eager"))
assert 0 < max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True)) < 1e-5
"""


def test_a_compiler_takes_it_as_it_is(interpreted):
    interpreted("-c", COMPILED)
