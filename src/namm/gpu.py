"""What a GPU likes: weights channels-last, and launches recorded beforehand. Nothing here changes what is computed."""

from typing import Any

import torch
from torch import Tensor, nn

QUICK = 2**12
"""Numbers in a batch for each weight tensor, up to which its kernels are done before the next ones are launched."""


def lay_out(module: nn.Module, device: torch.device) -> None:
    """On a GPU, keep the weights of convolutions channels-last: images follow them, as its matrix units like it."""
    if device.type == "cuda":
        for weight in module.parameters():
            if weight.ndim == 4 and weight.stride() != _channels_last(weight):
                weight.data = weight.data.clone(memory_format=torch.channels_last)  # one input channel needs it too


def _channels_last(weight: Tensor) -> tuple[int, ...]:
    return torch.empty_like(weight, device="meta", memory_format=torch.channels_last).stride()


def compile_options(network: nn.Module, device: torch.device, numbers: int, world: int = 1) -> dict[str, Any]:
    """Options of inductor for `network` on batches of so many numbers, B·C·H·W.

    Random numbers are drawn as without compiling: the same ones, and faster than inductor's own, one at a time. A GPU
    may wait longer for launches, whose number grows with that of the weights, than for the kernels, whose time grows
    with the batch. Then they are recorded once as CUDA graphs and replayed; otherwise the replay would be what it waits
    for. Not so where `world` > 1 processes exchange gradients, which cannot be recorded.
    """
    weights = sum(1 for _ in network.parameters())
    graphs = device.type == "cuda" and world == 1 and numbers <= QUICK * weights
    return {"fallback_random": True, "triton.cudagraphs": graphs}
