"""How a step is compiled."""

import torch


def compile_options(device: torch.device, world: int) -> dict[str, bool]:
    """Options of inductor.

    Random numbers are drawn as without compiling: the same ones, and faster than inductor's own, one at a time. On a
    GPU that trains alone, forward and backward are recorded once as CUDA graphs and replayed, since a small batch
    would otherwise wait for its thousand launches.
    """
    return {"fallback_random": True, "triton.cudagraphs": device.type == "cuda" and world == 1}
