"""How long a step takes: what turns minutes into a number of steps, once.

Other work on the machine can only slow a step down, so the lower quartile of many is taken, spread over some seconds:
what happens to run beside the first steps then costs the training nothing.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator

from namm.training.state import TrainingState

Found = TypeVar("Found")
WARM_UP, TIMED = 3, 8  # steps not counted, in which code is compiled and recorded; groups of steps counted at least
GROUP = 8  # steps timed together on a GPU, where waiting for each would be counted too
SHARE = 0.03  # of a training's seconds that its trial may take


def undone(state: TrainingState, trial: Callable[[], Found]) -> Found:
    """What a trial finds, whose steps are then undone."""
    before = state.checkpoint().copy()
    found = trial()
    state.restore(before)
    return found


def warm_up(update: Callable[[int], object]) -> None:
    """The first steps, which take longer than others."""
    for step in range(WARM_UP):
        update(step)


def seconds_per_step(update: Callable[[int], object], accelerator: Accelerator, seconds: float = 0.0) -> float:
    """Seconds that `update(step)` takes, step = 0, 1, …, the same in all processes.

    Args:
        update: Makes one step.
        accelerator: Says where, and joins the processes.
        seconds: What the training shall take; a longer one has a longer trial.
    """
    warm_up(update)
    group = GROUP if accelerator.device.type == "cuda" else 1
    times: list[float] = []

    def measure(groups: int) -> float:
        for _ in range(groups):
            start, first = clock(accelerator.device), WARM_UP + group * len(times)
            for step in range(first, first + group):
                update(step)
            times.append((clock(accelerator.device) - start) / group)
        here = torch.tensor(times, device=accelerator.device).quantile(0.25)
        return float(accelerator.reduce(here, reduction="mean"))

    found = measure(TIMED)
    more = int(SHARE * seconds / (group * found)) - TIMED
    return measure(more) if more > 0 else found


def clock(device: torch.device) -> float:
    """Seconds since some time, once all that was asked of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
