"""What a GPU likes: weights channels-last, sums over pixels that keep all of it busy, launches recorded beforehand.

Nothing here changes what is computed, beyond the order of sums.
"""

from typing import Any

import torch
from torch import Tensor, nn

BAND = 2**8
"""Pixels of a channel that are summed by themselves first."""
QUICK = 2**12
"""Pixels of a batch for each weight tensor, up to which its kernels are done before the next ones are launched."""


def lay_out(module: nn.Module, device: torch.device) -> None:
    """On a GPU, keep the weights of convolutions channels-last: images follow them, as its matrix units like it."""
    if device.type == "cuda":
        for weight in module.parameters():
            if weight.ndim == 4:
                weight.data = weight.data.clone(memory_format=torch.channels_last)  # one input channel needs it too


def compile_options(network: nn.Module, device: torch.device, pixels: int, world: int = 1) -> dict[str, Any]:
    """Options of inductor for `network` on batches of so many pixels, alone or as one of `world` processes.

    Random numbers are drawn as without compiling: the same ones, and faster than inductor's own, one at a time. A GPU
    that works alone may wait longer for launches, whose number grows with that of the weights, than for the kernels,
    whose time grows with the pixels. Then they are recorded once as CUDA graphs and replayed; otherwise the replay
    would be what it waits for.
    """
    weights = sum(1 for _ in network.parameters())
    graphs = device.type == "cuda" and world == 1 and pixels <= QUICK * weights
    return {"fallback_random": True, "triton.cudagraphs": graphs}


# Channels-last images: all pixels of a channel make one long sum, and a small batch too few of them for a GPU.


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance (of the population) and mean of each channel in bands of rows: (B, C, H, W) -> twice (B, C, bands)."""
    variance, mean = torch.var_mean(_bands(x), (3, 4), correction=0)
    return variance, mean


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x · scale + shift, (B, C, H, W) and twice (B, C); what their gradients sum is summed in bands first."""
    bands = _bands(x)
    scale, shift = (each[:, :, None].expand(bands.shape[:3])[..., None, None] for each in (scale, shift))
    return (bands * scale + shift).flatten(2, 3)


def _bands(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, bands, rows, W), equal ones; a single one where memory is not channels-last."""
    height, width = x.shape[2:]
    rows = max(1, BAND // width)
    return x.unflatten(2, (-1, rows if x.stride(1) == 1 and height % rows == 0 else height))
