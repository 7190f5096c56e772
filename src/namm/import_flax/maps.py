"""Weights of the published g and f for `ICNN` and `ResNet`, from a flat mapping of flax path to array."""

import torch
from torch import Tensor

from namm.import_flax.layers import Arrays, conv, conv_kernel, count, norm, tensor, transposed_conv


def icnn_state(arrays: Arrays) -> dict[str, Tensor]:
    """State dict for `ICNN` from `wz_l`, `wx_quad_l`, `wx_lin_l` and `final_conv2d`."""
    layers = count(arrays, "wz")
    every = range(layers + 1)
    return {
        "quadratic": torch.cat([conv_kernel(arrays[f"wx_quad_{layer}/kernel"]) for layer in every]),
        "linear": torch.cat([conv_kernel(arrays[f"wx_lin_{layer}/kernel"]) for layer in every]),
        "bias": torch.cat([tensor(arrays[f"wx_lin_{layer}/bias"]) for layer in every]),
        "hidden": torch.stack([conv_kernel(arrays[f"wz_{layer}/kernel"]) for layer in range(layers)]),
        "output": conv_kernel(arrays["final_conv2d/kernel"]),
    }


def resnet_state(arrays: Arrays) -> dict[str, Tensor]:
    """State dict for `ResNet` from `Conv_i`, `GroupNorm_i`, `ResNetBlock_i` and `ConvTranspose_i`."""
    ups = count(arrays, "ConvTranspose")
    state = conv(arrays, "Conv_0", "head.0") | norm(arrays, "GroupNorm_0", "head.1")
    for level in range(ups):
        state |= conv(arrays, f"Conv_{level + 1}", f"down.{level}.0")
        state |= norm(arrays, f"GroupNorm_{level + 1}", f"down.{level}.1")
        state |= transposed_conv(arrays, f"ConvTranspose_{level}", f"up.{level}.0")
        state |= norm(arrays, f"GroupNorm_{ups + level + 1}", f"up.{level}.1")
    for block in range(count(arrays, "ResNetBlock")):
        for half in (0, 1):
            state |= conv(arrays, f"ResNetBlock_{block}/Conv_{half}", f"middle.{block}.conv{half}")
            state |= norm(arrays, f"ResNetBlock_{block}/GroupNorm_{half}", f"middle.{block}.norm{half}")
    return state | conv(arrays, f"Conv_{ups + 1}", "tail")
