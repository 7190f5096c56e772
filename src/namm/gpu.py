"""What a GPU likes: weights channels-last, and launches recorded beforehand. Nothing here changes what is computed."""

from typing import Any

import torch
from torch import nn

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
