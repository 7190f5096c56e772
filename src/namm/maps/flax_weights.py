"""Weights of the published (flax) networks, renamed and reordered for ours.

Input everywhere is a flat mapping from flax path to array, as `wz_0/kernel` or `ResNetBlock_3/Conv_1/bias`. Flax
stores convolution kernels as (height, width, in, out); torch as (out, in, height, width), and a transposed
convolution as (in, out, height, width) with both spatial axes reversed.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Arrays = Mapping[str, np.ndarray]


def icnn_state(arrays: Arrays) -> dict[str, Tensor]:
    """State dict for `ICNN` from `wz_l`, `wx_quad_l`, `wx_lin_l` and `final_conv2d`."""
    layers = sum(name.startswith("wz_") for name in arrays)
    every = range(layers + 1)
    return {
        "quadratic": torch.cat([_kernel(arrays[f"wx_quad_{layer}/kernel"]) for layer in every]),
        "linear": torch.cat([_kernel(arrays[f"wx_lin_{layer}/kernel"]) for layer in every]),
        "bias": torch.cat([_vector(arrays[f"wx_lin_{layer}/bias"]) for layer in every]),
        "hidden": torch.stack([_kernel(arrays[f"wz_{layer}/kernel"]) for layer in range(layers)]),
        "output": _kernel(arrays["final_conv2d/kernel"]),
    }


def resnet_state(arrays: Arrays) -> dict[str, Tensor]:
    """State dict for `ResNet` from `Conv_i`, `GroupNorm_i`, `ResNetBlock_i` and `ConvTranspose_i`."""
    ups = sum(name.startswith("ConvTranspose_") and name.endswith("/kernel") for name in arrays)
    blocks = sum(name.startswith("ResNetBlock_") and name.endswith("/Conv_0/kernel") for name in arrays)
    state = _conv(arrays, "Conv_0", "head.0") | _norm(arrays, "GroupNorm_0", "head.1")
    for level in range(ups):
        state |= _conv(arrays, f"Conv_{level + 1}", f"down.{level}.0")
        state |= _norm(arrays, f"GroupNorm_{level + 1}", f"down.{level}.1")
        state |= _conv(arrays, f"ConvTranspose_{level}", f"up.{level}.0", transposed=True)
        state |= _norm(arrays, f"GroupNorm_{ups + level + 1}", f"up.{level}.1")
    for block in range(blocks):
        for half in (0, 1):
            state |= _conv(arrays, f"ResNetBlock_{block}/Conv_{half}", f"middle.{block}.conv{half}")
            state |= _norm(arrays, f"ResNetBlock_{block}/GroupNorm_{half}", f"middle.{block}.norm{half}")
    return state | _conv(arrays, f"Conv_{ups + 1}", "tail")


def _conv(arrays: Arrays, flax: str, ours: str, *, transposed: bool = False) -> dict[str, Tensor]:
    convert = _transposed_kernel if transposed else _kernel
    return {
        f"{ours}.weight": convert(arrays[f"{flax}/kernel"]),
        f"{ours}.bias": _vector(arrays[f"{flax}/bias"]),
    }


def _norm(arrays: Arrays, flax: str, ours: str) -> dict[str, Tensor]:
    return {
        f"{ours}.weight": _vector(arrays[f"{flax}/scale"]),
        f"{ours}.bias": _vector(arrays[f"{flax}/bias"]),
    }


def _vector(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array))


def _kernel(array: np.ndarray) -> Tensor:
    return _vector(array.transpose(3, 2, 0, 1))


def _transposed_kernel(array: np.ndarray) -> Tensor:
    return _vector(array.transpose(2, 3, 0, 1)[:, :, ::-1, ::-1])
