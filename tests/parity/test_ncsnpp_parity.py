"""The score network computes what the published one computes."""

import numpy as np
import pytest
import torch

from namm.generative import NCSNpp
from namm.import_flax.networks import ncsnpp_shape, ncsnpp_state, possible_heights


def weights(file) -> dict[str, np.ndarray]:
    return {key.removeprefix("params/"): file[key] for key in file if key.startswith("params/")}


def nchw(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).permute(0, 3, 1, 2)


def reference_network(file, **options) -> NCSNpp:
    network = NCSNpp(
        channels=int(file["cfg/num_channels"]),
        height=file["x"].shape[1],
        filters=int(file["cfg/nf"]),
        multipliers=file["cfg/ch_mult"].tolist(),
        blocks=int(file["cfg/num_res_blocks"]),
        attention=file["cfg/attn_resolutions"].tolist(),
        rescale_input=True,
        **options,
    )
    network.load_state_dict(ncsnpp_state(weights(file), network))
    return network.eval()


def std(t: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the VP SDE, β from 0.1 to 20, with the reference's form near zero; (B,) -> (B, 1, 1, 1)."""
    c = -0.25 * t**2 * 19.9 - 0.05 * t
    return torch.where(c.abs() <= 1e-3, -2 * c, -torch.expm1(2 * c)).sqrt()[:, None, None, None]


@pytest.mark.parametrize(("reference", "tolerance"), [(True, 1e-9), (False, 3e-5)])
@torch.no_grad()
def test_output_and_score_float64(parity, reference, tolerance):
    file = parity("ncsnpp.npz")
    t = torch.from_numpy(file["t"]).double()
    output = reference_network(file, reference_frequencies=reference).double()(nchw(file["x"]).double(), t)
    assert (output - nchw(file["output_f64"])).abs().max() <= tolerance
    assert (-output / std(t) - nchw(file["score_f64"])).abs().max() <= tolerance / std(t).min()


@torch.no_grad()
def test_output_and_score_float32(parity):
    file = parity("ncsnpp.npz")
    t = torch.from_numpy(file["t"])
    output = reference_network(file)(nchw(file["x"]), t)
    assert (output - nchw(file["output"])).abs().max() <= 4e-5
    assert ((-output / std(t) - nchw(file["score"])) * std(t)).abs().max() <= 4e-5


def test_shapes_tell_the_architecture(parity):
    file = parity("ncsnpp.npz")
    assert ncsnpp_shape(weights(file)) == {
        "channels": int(file["cfg/num_channels"]),
        "filters": int(file["cfg/nf"]),
        "multipliers": file["cfg/ch_mult"].tolist(),
        "blocks": int(file["cfg/num_res_blocks"]),
    }
    assert file["x"].shape[1] in possible_heights(weights(file), file["cfg/attn_resolutions"].tolist())
