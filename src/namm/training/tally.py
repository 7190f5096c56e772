"""Sums of loss terms between two lines of the log, kept on the device so that adding never waits for it."""

import torch
from torch import Tensor

Losses = dict[str, Tensor]


class Tally:
    """Sums of every term, and the first step whose loss was not finite."""

    def __init__(self) -> None:
        self.sums: Losses = {}
        self.weight = 0
        self._first_bad: Tensor | None = None

    @torch.no_grad()
    def add(self, losses: Losses, *, step: int = 0, weight: int = 1) -> None:
        """Add the terms of one step, `weight` times."""
        self.weight += weight
        for name, value in losses.items():
            term = value.detach().double() * weight
            self.sums[name] = self.sums[name] + term if name in self.sums else term
        loss = losses["loss"].detach()
        bad = torch.where(torch.isfinite(loss), torch.inf, float(step))
        self._first_bad = bad if self._first_bad is None else torch.minimum(self._first_bad, bad)

    def means(self) -> Losses:
        """Mean of every term."""
        return {name: total / self.weight for name, total in self.sums.items()}

    def first_bad(self) -> int | None:
        """The first step added whose loss was not finite, if any. Waits for the device."""
        step = float("inf") if self._first_bad is None else float(self._first_bad)
        return None if step == float("inf") else int(step)
