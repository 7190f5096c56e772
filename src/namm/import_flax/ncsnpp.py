"""Weights and sizes of the published score network for `NCSNpp`, from a flat mapping of flax path to array.

Flax numbers modules of one kind in order of use over the whole network, and ours are registered in order of use, so
the k-th of a kind there is the k-th of the kind here. With L resolutions and n blocks each, a network has 2Ln + 3L
residual blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from namm.generative.networks.ncsnpp.layers import PyramidStep, ResidualBlock, SelfAttention
from namm.generative.networks.ncsnpp.network import NCSNpp
from namm.import_flax.layers import Arrays, conv, count, dense, norm

BLOCK, ATTENTION, PYRAMID = "ResnetBlockBigGANpp", "AttnBlockpp", "Downsample"


def ncsnpp_shape(arrays: Arrays) -> dict[str, Any]:
    """Sizes of a network by the shapes of its arrays: `channels`, `filters`, `multipliers` and `blocks` of `NCSNpp`."""
    levels = count(arrays, PYRAMID) + 1
    blocks, rest = divmod(count(arrays, BLOCK) - 3 * levels, 2 * levels)
    if rest or blocks < 1:
        raise ValueError(f"{count(arrays, BLOCK)} residual blocks do not make a network of {levels} resolutions")
    filters = arrays["Conv_0/kernel"].shape[-1]
    firsts = [f"{BLOCK}_{level * (blocks + 1)}/Conv_0/kernel" for level in range(levels)]
    return {
        "channels": arrays["Conv_0/kernel"].shape[2],
        "filters": filters,
        "multipliers": [arrays[first].shape[-1] // filters for first in firsts],
        "blocks": blocks,
    }


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


def ncsnpp_state(arrays: Arrays, network: NCSNpp) -> dict[str, Tensor]:
    """State dict for `network` from the arrays of the same architecture."""
    state = {
        **conv(arrays, "Conv_0", "head"),
        **dense(arrays, "Dense_0", "time.0"),
        **dense(arrays, "Dense_1", "time.2"),
        **norm(arrays, "GroupNorm_0", "norm"),
        **conv(arrays, "Conv_1", "tail"),
    }
    for k, name in enumerate(_names(network, ResidualBlock)):
        state |= _block(arrays, f"{BLOCK}_{k}", name)
    for k, name in enumerate(_names(network, SelfAttention)):
        state |= _attention(arrays, f"{ATTENTION}_{k}", name)
    for k, name in enumerate(_names(network, PyramidStep)):
        state |= conv(arrays, f"{PYRAMID}_{k}/Conv2d_0", f"{name}.conv", kernel="weight")
    return state


def _names(network: NCSNpp, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in network.named_modules() if isinstance(module, kind)]


def _block(arrays: Arrays, flax: str, ours: str) -> dict[str, Tensor]:
    state = dense(arrays, f"{flax}/Dense_0", f"{ours}.bias")
    for half in (0, 1):
        state |= norm(arrays, f"{flax}/GroupNorm_{half}", f"{ours}.norm{half}")
        state |= conv(arrays, f"{flax}/Conv_{half}", f"{ours}.conv{half}")
    if f"{flax}/Conv_2/kernel" in arrays:
        state |= conv(arrays, f"{flax}/Conv_2", f"{ours}.shortcut")
    return state


def _attention(arrays: Arrays, flax: str, ours: str) -> dict[str, Tensor]:
    parts = [dense(arrays, f"{flax}/NIN_{k}", "", kernel="W", bias="b") for k in range(4)]
    return {
        **norm(arrays, f"{flax}/GroupNorm_0", f"{ours}.norm"),
        f"{ours}.qkv.weight": torch.cat([part[".weight"] for part in parts[:3]]),
        f"{ours}.qkv.bias": torch.cat([part[".bias"] for part in parts[:3]]),
        f"{ours}.out.weight": parts[3][".weight"],
        f"{ours}.out.bias": parts[3][".bias"],
    }
