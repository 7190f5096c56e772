"""g and f compute what the published networks compute."""

import numpy as np
import torch

from namm.import_flax.networks import icnn_state, resnet_state
from namm.maps import ICNN, ResNet


def weights(file) -> dict[str, np.ndarray]:
    return {key.removeprefix("params/"): file[key] for key in file if key.startswith("params/")}


def nchw(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).permute(0, 3, 1, 2)


def reference_icnn(file) -> ICNN:
    network = ICNN(
        channels=int(file["cfg/n_in_channels"]),
        layers=int(file["cfg/n_layers"]),
        filters=int(file["cfg/n_filters"]),
        kernel_size=int(file["cfg/kernel_size"]),
        strong_convexity=float(file["cfg/strong_convexity"]),
        negative_slope=float(file["cfg/negative_slope"]),
    )
    network.load_state_dict(icnn_state(weights(file)))
    return network


def reference_resnet(file) -> ResNet:
    network = ResNet(
        channels=int(file["cfg/output_nc"]),
        filters=int(file["cfg/ngf"]),
        blocks=int(file["cfg/n_res_blocks"]),
        downsamplings=int(file["cfg/n_downsample_layers"]),
        residual=bool(file["cfg/residual"]),
        activation=str(file["cfg/final_activation"]),
    )
    network.load_state_dict(resnet_state(weights(file)))
    return network.eval()


def test_icnn_float64(parity):
    file = parity("icnn.npz")
    g = reference_icnn(file).double()(nchw(file["x"]).double())
    assert (g - nchw(file["g_f64"])).abs().max() <= 1e-9


def test_icnn_float32(parity):
    file = parity("icnn.npz")
    assert (reference_icnn(file)(nchw(file["x"])) - nchw(file["g"])).abs().max() <= 5e-6


def test_resnet_float64(parity):
    file = parity("resnet.npz")
    f = reference_resnet(file).double()(nchw(file["x"]).double())
    assert (f - nchw(file["f_f64"])).abs().max() <= 1e-9


def test_resnet_float32(parity):
    file = parity("resnet.npz")
    assert (reference_resnet(file)(nchw(file["x"])) - nchw(file["f"])).abs().max() <= 3e-5
