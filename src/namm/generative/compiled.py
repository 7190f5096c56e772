"""A network compiled or recorded for sampling, where every batch is worth the same code."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from namm.gpu import Recorded, can_record, compile_options


class FixedBatch:
    """`network(y_t, t)` for batches of `size`, recorded if it has kernels for this device, else compiled.

    A smaller batch is filled up with copies of its own rows: another size would be recorded or compiled anew, which
    takes as long as hundreds of samples or many thousand.

    Args:
        network: To be recorded or compiled; on `device`.
        size: B.
        shape: (C, H, W) of the images.
        device: Where they are.
    """

    def __init__(self, network: nn.Module, size: int, shape: tuple[int, int, int], device: torch.device) -> None:
        self.size = size
        self.call: Callable[..., Tensor]
        if can_record(network, device):
            self.graphs, self.call = False, Recorded(network)
            return
        options = compile_options(network, device, size * math.prod(shape))
        self.graphs = options["triton.cudagraphs"]
        self.call = torch.compile(network, fullgraph=True, dynamic=False, options=options)

    def __call__(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(B, C, H, W) and (B,) -> (B, C, H, W), B at most `size`."""
        n = len(y_t)
        if n < self.size:
            rows = torch.arange(self.size, device=y_t.device) % n
            y_t, t = y_t[rows], t[rows]
        output = self.call(y_t, t)
        return (output.clone() if self.graphs else output)[:n]  # the next replay writes to the same memory
