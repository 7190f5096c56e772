"""How a step is compiled."""

import torch

SMALL = 2**18
"""Pixels of a batch up to which its kernels are done before the next ones are launched."""


def compile_options(device: torch.device, world: int, pixels: int) -> dict[str, bool]:
    """Options of inductor for batches of so many pixels.

    Random numbers are drawn as without compiling: the same ones, and faster than inductor's own, one at a time. On a
    GPU that trains alone, forward and backward of a small batch are recorded once as CUDA graphs and replayed, instead
    of waiting for a thousand launches; what larger ones would wait for is the replay.
    """
    graphs = device.type == "cuda" and world == 1 and pixels <= SMALL
    return {"fallback_random": True, "triton.cudagraphs": graphs}
