"""Noise that belongs to a sample, and samples made in batches by any number of processes.

The noise of sample i at step k is row i mod 64 of a block that is a function of (seed, ⌊i/64⌋, k) alone. Which samples
are made together, and by whom, therefore changes nothing: neither the batch size nor the number of processes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather
from torch import Tensor

from namm.errors import UsageError
from namm.numerics import generator as seeded
from namm.progress import ProgressBar

BLOCK = 64
"""Samples per block. Part of what a seed means, so not a setting."""


@dataclass(frozen=True)
class Noise:
    """The noise of samples `start` to `stop`, each of shape `shape`, where `like` lives and in its precision."""

    seed: int
    start: int
    stop: int
    shape: tuple[int, ...]
    like: Tensor

    def __call__(self, step: int) -> Tensor:
        """z ~ N(0, I) for step `step`, 0 being the state from which sampling starts: (stop − start, *shape)."""
        first, last = self.start // BLOCK, (self.stop - 1) // BLOCK
        blocks = torch.cat([self._block(k, step) for k in range(first, last + 1)])
        return blocks[self.start - first * BLOCK : self.stop - first * BLOCK].to(self.like.dtype)

    def _block(self, k: int, step: int) -> Tensor:
        rng = seeded(self.seed, "sample", k, step, device=self.like.device)
        return torch.randn(BLOCK, *self.shape, generator=rng, device=self.like.device)


def as_seed(generator: torch.Generator | int | None) -> int:
    """The seed itself, or one drawn from the generator (torch's own for None)."""
    if isinstance(generator, int):
        return generator
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (1,), generator=generator, device=device))


def sample_in_batches(
    make: Callable[[Noise], Tensor],
    n: int,
    shape: tuple[int, ...],
    *,
    like: Tensor,
    batch_size: int,
    generator: torch.Generator | int | None,
    first: int = 0,
) -> Tensor:
    """Samples `first` to `first` + `n`, `make` turning the noise of a batch into its samples: (n, *shape).

    Under torchrun every process must call this: each makes its share, all get all samples, and the seed is that of the
    first process.
    """
    if n < 1 or batch_size < 1 or first < 0:
        raise UsageError(
            f"n and batch_size must be at least 1 and first at least 0, not {n}, {batch_size} and {first}."
        )
    processes = PartialState(cpu=not torch.cuda.is_available())
    seed = as_seed(generator)
    if processes.num_processes > 1:
        (seed,) = broadcast_object_list([seed])
    starts = batch_starts(n, batch_size, processes.process_index, processes.num_processes)
    end = min(n, (processes.process_index + 1) * share(n, processes.num_processes))
    parts = [make(Noise(seed, first + k, first + min(k + batch_size, end), shape, like)) for k in starts]
    mine = torch.cat([like.new_empty(0, *shape), *parts])
    return mine if processes.num_processes == 1 else _gather(mine, n, processes)


def share(n: int, processes: int) -> int:
    """Samples per process; the last ones may have fewer."""
    return -(-n // processes)


def batch_starts(n: int, batch_size: int, rank: int = 0, world: int = 1) -> range:
    """First samples of the batches of one process."""
    each = share(n, world)
    return range(min(n, rank * each), min(n, (rank + 1) * each), batch_size)


def sampling_bar(n: int, batch_size: int, steps: int, visible: bool) -> ProgressBar:
    """The bar of `n` samples of so many `steps` each, shown by the main process for its own batches."""
    processes = PartialState(cpu=not torch.cuda.is_available())
    batches = len(batch_starts(n, max(1, batch_size), 0, processes.num_processes))
    return ProgressBar(f"sampling {n}", steps * batches, visible=visible and processes.is_main_process)


def _gather(mine: Tensor, n: int, processes: PartialState) -> Tensor:
    padded = mine.new_zeros(share(n, processes.num_processes), *mine.shape[1:])
    padded[: len(mine)] = mine
    everything: Tensor = gather(padded.to(processes.device))
    return everything[:n].to(mine.device)
