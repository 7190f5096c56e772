"""Sums of loss terms between two lines of the log, kept on the device so that adding never waits for it.

All terms are added at once: a step of a small batch is over before many small additions could be launched.
"""

import torch
from torch import Tensor

Losses = dict[str, Tensor]


class Tally:
    """Sums of every term, and the first step whose loss was not finite."""

    def __init__(self) -> None:
        self.weight = 0
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None
        self._first_bad: Tensor | None = None

    @torch.no_grad()
    def add(self, losses: Losses, *, step: int = 0, weight: int = 1) -> None:
        """Add the terms of one step, `weight` times."""
        terms = torch.stack([value.detach() for value in losses.values()]).double()
        bad = torch.where(torch.isfinite(losses["loss"].detach()), torch.inf, float(step))
        if self._sums is None or self._first_bad is None:
            self._names, self._sums, self._first_bad = tuple(losses), weight * terms, bad
        else:
            self._sums = torch.add(self._sums, terms, alpha=weight)
            self._first_bad = torch.minimum(self._first_bad, bad)
        self.weight += weight

    def means(self) -> Losses:
        """Mean of every term."""
        return {} if self._sums is None else dict(zip(self._names, self._sums / self.weight, strict=True))

    def first_bad(self) -> int | None:
        """The first step added whose loss was not finite, if any. Waits for the device."""
        step = float("inf") if self._first_bad is None else float(self._first_bad)
        return None if step == float("inf") else int(step)
