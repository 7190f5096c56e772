"""An exponential moving average of weights: ē ← d ē + (1 − d) θ with d = min(decay, (1 + n)/(10 + n)) at step n."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """Average of `tensors`, which the caller goes on changing in place; integer tensors are copied, not averaged."""

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.live = dict(tensors)
        self.average = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        floating = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        self._averages = [self.average[name] for name in floating]
        self._weights = [tensors[name].detach() for name in floating]
        self._others = [name for name in tensors if name not in floating]

    @torch.no_grad()
    def update(self, n: int) -> None:
        """Take in the live tensors after update number `n` = 0, 1, 2, …"""
        decay = min(self.decay, (1 + n) / (10 + n))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)
        for name in self._others:
            self.average[name].copy_(self.live[name])

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the average."""
        for name, average in self.average.items():
            average.copy_(tensors[name])

    @torch.no_grad()
    def copy_to_live(self) -> None:
        """Overwrite the live tensors with the average."""
        for name, tensor in self.live.items():
            tensor.copy_(self.average[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The live tensors hold the average inside this context, and their own values again after it."""
        own = {name: tensor.detach().clone() for name, tensor in self.live.items()}
        self.copy_to_live()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self.live.items():
                    tensor.copy_(own[name])
