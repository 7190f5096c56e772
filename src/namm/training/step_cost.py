"""What a step of a training costs, found before the training begins: memory (`rehearse`), seconds (`seconds_per_step`).

A step that does not fit into memory is refused within seconds, with a batch size that does. The seconds of a step turn
a budget in minutes into a number of steps.
"""

import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import Tensor

from namm.datasets.batches import Images, to_tensor
from namm.errors import MemoryShortage
from namm.memory import peak, reset_peak, shortage, step_on_copies
from namm.numerics import autocast, generator
from namm.training.objectives import Objective
from namm.training.settings import TrainSettings

WARM_UP, TIMED = 3, 8  # steps not timed, in which code is compiled and recorded; groups of steps timed at least
GROUP = 8  # steps timed together on a GPU, where waiting for each would be counted too
TIMING_SHARE = 0.03  # of a training's seconds that may be spent on timing its steps

_rehearsed: WeakKeyDictionary[Objective, tuple[TrainSettings, int]] = WeakKeyDictionary()


def rehearse(
    objective: Objective,
    data: tuple[Images, ...],
    settings: TrainSettings,
    device: torch.device,
    *,
    world: int = 1,
    title: str = "training",
) -> None:
    """Refuse a training whose steps do not fit into memory, before anything is spent on it; once for each.

    The step is the training's own, forward and backward at the full batch, with as much set aside as the optimiser and
    the average will take. It works on copies of the weights and on random numbers of its own, so that a training ends
    with the same bits with it and without it. A compiled step may need less memory than the plain one that is tried
    here, so half a batch is tried for it; the whole one follows in the warm-up that compiles it.

    Args:
        objective: The loss; moved to `device` and otherwise left as it is.
        data: Images (N, C, H, W) of the batches' shapes, as for `train`; images serve for mirror images as well.
        settings: Batch size and precision.
        device: Where it is trained.
        world: Processes that share a batch.
        title: What errors call it.
    """
    if objective in _rehearsed and _rehearsed[objective][0] == settings:
        return
    objective.to(device).train()
    dtype = next((p.dtype for p in objective.parameters() if p.requires_grad), torch.float32)
    copies = 3 if world == 1 else 4  # two moments, all gradients together, and what the processes exchange
    share = settings.batch_size // world
    tried = -(-share // 2) if settings.compile else share

    def inputs(size: int) -> tuple[Tensor, ...]:
        some = (to_tensor(images[: min(size, images.shape[0])]) for images in data)
        batch = tuple(rows[torch.arange(size) % len(rows)].to(device, dtype) for rows in some)
        return (*batch, *objective.draw(batch, generator(settings.seed, "dry step", device=device)))

    def attempt(size: int) -> None:
        step_on_copies(objective, lambda: inputs(size), autocast(settings.precision, device), copies)

    reset_peak(device)
    if (found := shortage(attempt, tried, device)) is not None:
        raise MemoryShortage(_shortage_message(title, settings, device, found[1] * world, found[0]))
    _rehearsed[objective] = settings, peak(device) * share // tried


def step_memory(objective: Objective) -> int:
    """Bytes of the GPU that a step of `objective` took when it was rehearsed; 0 on a CPU, which does not count them."""
    return _rehearsed[objective][1] if objective in _rehearsed else 0


def _shortage_message(title: str, settings: TrainSettings, device: torch.device, fitting: int, problem: str) -> str:
    where = f"the memory of {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "memory"
    smaller = f"a batch_size of {fitting} fits" if fitting else "not even a single image fits"
    plain = settings.precision == "fp32" and device.type == "cuda"
    others = "smaller networks or images" + (", or precision bf16 (auto)" if plain else "")
    return (
        f"{title}: a step with batch_size {settings.batch_size} does not fit into {where} ({problem}); {smaller}. "
        f"Take {'that, ' if fitting else ''}{others}, or free what other programs hold."
    )


def warm_up(update: Callable[[int], object]) -> None:
    """Make the first steps, which take longer than others."""
    for step in range(WARM_UP):
        update(step)


def seconds_per_step(update: Callable[[int], object], accelerator: Accelerator, seconds: float = 0.0) -> float:
    """Seconds that `update(step)` takes, step = 0, 1, …, the same in all processes.

    Other work on the machine can only slow a step down, so the lower quartile of many is taken, spread over some
    seconds: what happens to run beside the first steps then costs the training nothing.

    Args:
        update: Makes one step.
        accelerator: Says where, and joins the processes.
        seconds: What the training shall take; the steps of a longer one are timed for longer.
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
    more = int(TIMING_SHARE * seconds / (group * found)) - TIMED
    return measure(more) if more > 0 else found


def clock(device: torch.device) -> float:
    """Seconds since some fixed time, once all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
