"""A network compiled for sampling, where every batch is worth the same code."""

import torch
from torch import Tensor, nn


class FixedBatch:
    """`network(y_t, t)`, compiled for batches of `size`; a smaller one is filled up with copies of its own rows.

    Another size would be compiled anew, which takes as long as many thousand samples.
    """

    def __init__(self, network: nn.Module, size: int) -> None:
        self.size = size
        self.call = torch.compile(network, fullgraph=True, dynamic=False)

    def __call__(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(B, C, H, W) and (B,) -> (B, C, H, W), B at most `size`."""
        n = len(y_t)
        if n == self.size:
            return self.call(y_t, t)
        rows = torch.arange(self.size, device=y_t.device) % n
        return self.call(y_t[rows], t[rows])[:n]
