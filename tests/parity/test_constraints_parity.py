"""ℓ of total flux and of periodic images equals the published implementation's."""

import numpy as np
import pytest
import torch

from namm.constraints import Periodic, TotalFlux


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "rule"), [("flux", TotalFlux(120.0)), ("periodic", Periodic((2, 2)))])
def test_distance_equals_the_reference(parity, name, rule, dtype):
    """The reference summed in float32: its rounding, relative to the sums involved, sets the tolerance."""
    file = parity("constraints.npz")
    x = torch.from_numpy(file[f"{name}_x"]).permute(0, 3, 1, 2).to(dtype)
    reference = file[f"{name}_loss"]
    rounding = 1e-6 * (np.abs(file["flux_x"]).sum((1, 2, 3)) if name == "flux" else reference)
    assert (np.abs(rule(x).numpy() - reference) <= rounding).all()
