"""Kolmogorov flow, its initial field and the divergence of images against the published implementation's numbers."""

import re

import numpy as np
import pytest
import torch

from namm.constraints import DivergenceFree
from namm.simulators.fluid import FluidGrid, advance, divergence, force, initial_field, vorticity

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@pytest.fixture
def reference(parity):
    return parity("kolmogorov.npz")


def pair(reference, names, suffix="", dtype=torch.float64):
    return torch.from_numpy(np.stack([reference[name + suffix] for name in names])).to(dtype)


@pytest.fixture
def start(reference):
    return pair(reference, ("u_000", "v_000"))


@pytest.fixture
def grid(start):
    return FluidGrid(size=start.shape[-1])


@PRECISIONS
def test_velocities(reference, start, grid, dtype):
    velocity, done = start.to(dtype), 0
    counts = sorted(int(found[1]) for key in reference if (found := re.fullmatch(r"u_(\d{3})_f64", key)))
    assert counts[-1] >= 100
    for steps in counts:
        velocity, done = advance(velocity, grid, steps - done), steps
        expected = pair(reference, (f"u_{steps:03}_f64", f"v_{steps:03}_f64"))
        assert (velocity - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)], ids=str)
def test_divergence_and_vorticity_after_100_steps(reference, start, grid, dtype, tolerance):
    velocity = advance(start.to(dtype), grid, 100)
    for operator, key in ((divergence, "divergence_100_f64"), (vorticity, "vorticity_100_f64")):
        np.testing.assert_allclose(operator(velocity, grid.spacing), reference[key], rtol=0, atol=tolerance)


def test_forcing(reference, start, grid):
    expected = pair(reference, ("force_u_000_f64", "force_v_000_f64"))
    assert (force(start, grid) - expected).abs().max() <= 1e-9


def test_initial_field(reference, start):
    """The reference's is float32, and so is its rounding."""
    ours = initial_field(pair(reference, ("noise_u", "noise_v")))
    assert (ours - start).abs().max() <= 2e-6


@PRECISIONS
def test_distance_of_images(parity, dtype):
    reference = parity("constraints.npz")
    x = torch.from_numpy(reference["incompress_x"]).movedim(-1, 1).to(dtype)
    np.testing.assert_allclose(DivergenceFree()(x), reference["incompress_loss"], rtol=1e-5)
