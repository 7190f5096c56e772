"""Weights of the published networks for `ICNN`, `ResNet` and `NCSNpp`, from a flat mapping of flax path to array.

A path is such as `ResNetBlock_3/Conv_1/bias`. Flax stores convolution kernels as (height, width, in, out), torch as
(out, in, height, width); a transposed convolution is (in, out, height, width) there with both spatial axes reversed.
Matrices change from (in, out) to (out, in).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from namm.generative.networks.ncsnpp.layers import PyramidStep, ResidualBlock, SelfAttention
from namm.generative.networks.ncsnpp.network import NCSNpp

Arrays = Mapping[str, np.ndarray]
State = dict[str, Tensor]

BLOCK, ATTENTION, PYRAMID = "ResnetBlockBigGANpp", "AttnBlockpp", "Downsample"
WEIGHTS = {"kernel": "bias", "scale": "bias", "weight": "bias", "W": "b"}
"""What flax calls the weight of a layer, and the bias beside it."""
ORDERS = {2: (1, 0), 4: (3, 2, 0, 1)}
"""Axes of torch's matrices and kernels among those of flax."""


def tensor(array: np.ndarray) -> Tensor:
    """A copy with memory of its own, its axes in torch's order."""
    return torch.from_numpy(np.array(array.transpose(ORDERS.get(array.ndim, (0,))), order="C"))


def layer(arrays: Arrays, path: str, name: str) -> State:
    """Weight and bias of a layer, by its path in flax and its name in the state dict."""
    weight = next((key for key in WEIGHTS if f"{path}/{key}" in arrays), "kernel")
    values = arrays[f"{path}/{weight}"], arrays[f"{path}/{WEIGHTS[weight]}"]
    if "ConvTranspose" in path:
        values = values[0][::-1, ::-1].swapaxes(2, 3), values[1]
    return {f"{name}.weight": tensor(values[0]), f"{name}.bias": tensor(values[1])}


def count(arrays: Arrays, kind: str) -> int:
    """Number of modules of a kind: `count(arrays, "Conv")` of `Conv_0` and `Conv_1` is 2."""
    return len({path.partition("/")[0] for path in arrays if path.startswith(f"{kind}_")})


# g and f


def icnn_state(arrays: Arrays) -> State:
    """State dict for `ICNN` from `wz_l`, `wx_quad_l`, `wx_lin_l` and `final_conv2d`."""
    layers = count(arrays, "wz")

    def kernels(kind: str, count: int, part: str = "kernel") -> list[Tensor]:
        return [tensor(arrays[f"{kind}_{k}/{part}"]) for k in range(count)]

    return {
        "quadratic": torch.cat(kernels("wx_quad", layers + 1)),
        "linear": torch.cat(kernels("wx_lin", layers + 1)),
        "bias": torch.cat(kernels("wx_lin", layers + 1, "bias")),
        "hidden": torch.stack(kernels("wz", layers)),
        "output": tensor(arrays["final_conv2d/kernel"]),
    }


def resnet_state(arrays: Arrays) -> State:
    """State dict for `ResNet` from `Conv_i`, `GroupNorm_i`, `ResNetBlock_i` and `ConvTranspose_i`."""
    ups = count(arrays, "ConvTranspose")
    names = {"Conv_0": "head.0", "GroupNorm_0": "head.1", f"Conv_{ups + 1}": "tail"}
    for level in range(ups):
        names |= {f"Conv_{level + 1}": f"down.{level}.0", f"GroupNorm_{level + 1}": f"down.{level}.1"}
        names |= {f"ConvTranspose_{level}": f"up.{level}.0", f"GroupNorm_{ups + level + 1}": f"up.{level}.1"}
    for block in range(count(arrays, "ResNetBlock")):
        for half in (0, 1):
            names[f"ResNetBlock_{block}/Conv_{half}"] = f"middle.{block}.conv{half}"
            names[f"ResNetBlock_{block}/GroupNorm_{half}"] = f"middle.{block}.norm{half}"
    return _layers(arrays, names)


def _layers(arrays: Arrays, names: Mapping[str, str]) -> State:
    state: State = {}
    for path, name in names.items():
        state |= layer(arrays, path, name)
    return state


# The score network. Flax numbers modules of one kind in order of use over the whole network, and ours are registered in
# order of use, so the k-th of a kind there is the k-th of the kind here. With L resolutions and n blocks each, a
# network has 2Ln + 3L residual blocks.


def ncsnpp_shape(arrays: Arrays) -> dict[str, Any]:
    """Sizes of a network by the shapes of its arrays: `channels`, `filters`, `multipliers` and `blocks` of `NCSNpp`."""
    levels = count(arrays, PYRAMID) + 1
    blocks, rest = divmod(count(arrays, BLOCK) - 3 * levels, 2 * levels)
    if rest or blocks < 1:
        raise ValueError(f"{count(arrays, BLOCK)} residual blocks do not make a network of {levels} resolutions")
    channels, filters = arrays["Conv_0/kernel"].shape[2:]
    firsts = [f"{BLOCK}_{level * (blocks + 1)}/Conv_0/kernel" for level in range(levels)]
    multipliers = [arrays[first].shape[-1] // filters for first in firsts]
    return {"channels": channels, "filters": filters, "multipliers": multipliers, "blocks": blocks}


def possible_heights(arrays: Arrays, attention: Sequence[int]) -> list[int]:
    """Image heights for which attention at these heights of feature maps falls where the arrays have it.

    Resolutions of equal width cannot be told apart, so there may be several. There are none where the arrays have
    attention in the middle only, or where `attention` is not what they were trained with.
    """
    shape = ncsnpp_shape(arrays)
    multipliers, blocks = shape["multipliers"], shape["blocks"]
    widths = [arrays[f"{ATTENTION}_{k}/NIN_0/W"].shape[0] for k in range(count(arrays, ATTENTION))]
    heights = {height * 2**level for height in attention for level in range(len(multipliers))}

    def expected(image: int) -> list[int]:
        at = [m * shape["filters"] for level, m in enumerate(multipliers) if image / 2**level in attention]
        down = [width for width in at for _ in range(blocks)]
        return [*down, multipliers[-1] * shape["filters"], *reversed(at)]

    divisor = 2 ** (len(multipliers) - 1)
    return sorted(height for height in heights if height % divisor == 0 and expected(height) == widths)


def ncsnpp_state(arrays: Arrays, network: NCSNpp) -> State:
    """State dict for `network` from the arrays of the same architecture."""
    names = {"Conv_0": "head", "Dense_0": "time.0", "Dense_1": "time.2", "GroupNorm_0": "norm", "Conv_1": "tail"}
    for k, name in enumerate(_names(network, ResidualBlock)):
        names[f"{BLOCK}_{k}/Dense_0"] = f"{name}.bias"
        for half in (0, 1):
            names[f"{BLOCK}_{k}/GroupNorm_{half}"] = f"{name}.norm{half}"
            names[f"{BLOCK}_{k}/Conv_{half}"] = f"{name}.conv{half}"
        if f"{BLOCK}_{k}/Conv_2/kernel" in arrays:
            names[f"{BLOCK}_{k}/Conv_2"] = f"{name}.shortcut"
    for k, name in enumerate(_names(network, PyramidStep)):
        names[f"{PYRAMID}_{k}/Conv2d_0"] = f"{name}.conv"
    state = _layers(arrays, names)
    for k, name in enumerate(_names(network, SelfAttention)):
        state |= layer(arrays, f"{ATTENTION}_{k}/GroupNorm_0", f"{name}.norm")
        state |= layer(arrays, f"{ATTENTION}_{k}/NIN_3", f"{name}.out")
        query, key, value = (layer(arrays, f"{ATTENTION}_{k}/NIN_{part}", f"{name}.qkv") for part in range(3))
        state |= {each: torch.cat([query[each], key[each], value[each]]) for each in query}
    return state


def _names(network: NCSNpp, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in network.named_modules() if isinstance(module, kind)]
