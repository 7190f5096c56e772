"""A progress bar over the steps of sampling, shown by one process and only where there is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState
from rich.console import Console
from rich.progress import Progress

from namm.generative.base import batch_starts


class Bar:
    """Steps of this process; there may come to be more of them."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self.progress, self.total = progress, total
        self.task = progress.add_task(description, total=total)

    def advance(self) -> None:
        """One step more is done."""
        self.progress.advance(self.task)

    def extend(self, steps: int) -> None:
        """So many more are to do."""
        self.total += steps
        self.progress.update(self.task, total=self.total)


@contextmanager
def bar_over(n: int, batch_size: int, steps: int, visible: bool) -> Iterator[Bar]:
    """A bar for `n` samples, shown where there is a terminal."""
    processes, console = PartialState(cpu=not torch.cuda.is_available()), Console(stderr=True)
    hidden = not (visible and processes.is_main_process and console.is_terminal)
    with Progress(console=console, disable=hidden) as progress:
        batches = len(batch_starts(n, max(1, batch_size), 0, processes.num_processes))
        yield Bar(progress, f"sampling {n}", steps * batches)
