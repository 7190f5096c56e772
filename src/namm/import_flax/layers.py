"""One layer's weights, renamed and reordered from flax to torch.

Arrays are a flat mapping from flax path to array, such as `ResNetBlock_3/Conv_1/bias`. Flax stores convolution kernels
as (height, width, in, out), torch as (out, in, height, width); a transposed convolution is (in, out, height, width)
there with both spatial axes reversed. Matrices change from (in, out) to (out, in).

Every function takes the layer's path in flax and its name in the state dict.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Arrays = Mapping[str, np.ndarray]
State = dict[str, Tensor]


def conv(arrays: Arrays, path: str, name: str, *, kernel: str = "kernel") -> State:
    """Weight and bias of a convolution."""
    weight = conv_kernel(arrays[f"{path}/{kernel}"])
    return {f"{name}.weight": weight, f"{name}.bias": tensor(arrays[f"{path}/bias"])}


def transposed_conv(arrays: Arrays, path: str, name: str) -> State:
    """Weight and bias of a transposed convolution."""
    weight = tensor(arrays[f"{path}/kernel"].transpose(2, 3, 0, 1)[:, :, ::-1, ::-1])
    return {f"{name}.weight": weight, f"{name}.bias": tensor(arrays[f"{path}/bias"])}


def dense(arrays: Arrays, path: str, name: str, *, kernel: str = "kernel", bias: str = "bias") -> State:
    """Weight and bias of a linear layer."""
    weight = tensor(arrays[f"{path}/{kernel}"].T)
    return {f"{name}.weight": weight, f"{name}.bias": tensor(arrays[f"{path}/{bias}"])}


def norm(arrays: Arrays, path: str, name: str) -> State:
    """Scale and shift of a normalisation."""
    return {f"{name}.weight": tensor(arrays[f"{path}/scale"]), f"{name}.bias": tensor(arrays[f"{path}/bias"])}


def conv_kernel(array: np.ndarray) -> Tensor:
    """A convolution's kernel in torch's order."""
    return tensor(array.transpose(3, 2, 0, 1))


def tensor(array: np.ndarray) -> Tensor:
    """A copy with memory of its own, in C order."""
    return torch.from_numpy(np.array(array, order="C"))


def count(arrays: Arrays, kind: str) -> int:
    """Number of modules of a kind: `count(arrays, "Conv")` of `Conv_0` and `Conv_1` is 2."""
    return len({path.partition("/")[0] for path in arrays if path.startswith(f"{kind}_")})
