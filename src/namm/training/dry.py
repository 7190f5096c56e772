"""A dry step before a long training: what does not fit into memory is said within seconds, and with what would fit.

The step is the training's own, forward and backward at the full batch, with as much set aside as the optimiser and the
average will take. It works on copies of the weights and buffers and on random numbers of its own, so that a training
ends with the same bits with it and without it.

A compiled step may need less than the plain one that is tried here, so of those only half a batch is tried; the whole
one follows in the trial that compiles them.
"""

from weakref import WeakKeyDictionary

import torch
from torch.func import functional_call

from namm.datasets.batches import Images, to_tensor
from namm.errors import MemoryShortage
from namm.memory import shortage
from namm.numerics import autocast, generator
from namm.training.objectives import Losses, Objective
from namm.training.settings import TrainSettings

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

    Args:
        objective: The loss; moved to `device` and otherwise left as it is.
        data: Images (N, C, H, W) of the batches' shapes, as for `train`; of mirror images the images do as well.
        settings: Batch size and precision.
        device: Where it is trained.
        world: Processes that share a batch.
        title: What errors call it.
    """
    if objective in _rehearsed and _rehearsed[objective][0] == settings:
        return
    objective.to(device).train()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    share = settings.batch_size // world
    tried = -(-share // 2) if settings.compile else share
    found = shortage(lambda size: _step(objective, data, settings, device, size, world), tried, device)
    if found is not None:
        raise MemoryShortage(_message(title, settings, device, found[1] * world, found[0]))
    _rehearsed[objective] = settings, _peak(device) * share // tried


def step_memory(objective: Objective) -> int:
    """Bytes of the GPU that a step of `objective` took when it was rehearsed; 0 on a CPU, which does not count them."""
    return _rehearsed[objective][1] if objective in _rehearsed else 0


def _peak(device: torch.device) -> int:
    """Bytes that were taken at most, beyond what still is."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved(device) - torch.cuda.memory_allocated(device)


def _step(
    objective: Objective, data: tuple[Images, ...], settings: TrainSettings, device: torch.device, size: int, world: int
) -> None:
    trainable = {
        name: p.detach().clone().requires_grad_() for name, p in objective.named_parameters() if p.requires_grad
    }
    buffers = {name: buffer.detach().clone() for name, buffer in objective.named_buffers()}
    copies = 3 if world == 1 else 4  # two moments, all gradients together, and what the processes exchange
    reserved = [torch.empty_like(p) for p in trainable.values() for _ in range(copies)]
    dtype = next(iter(trainable.values())).dtype if trainable else torch.float32
    some = (to_tensor(images[: min(size, images.shape[0])]) for images in data)
    batch = tuple(rows[torch.arange(size) % len(rows)].to(device, dtype) for rows in some)
    draws = objective.draw(batch, generator(settings.seed, "dry step", device=device))
    with autocast(settings.precision, device):
        losses: Losses = functional_call(objective, trainable | buffers, (*batch, *draws))
    if trainable:
        torch.autograd.grad(losses["loss"], list(trainable.values()), allow_unused=True)
    del reserved


def _message(title: str, settings: TrainSettings, device: torch.device, fitting: int, problem: str) -> str:
    where = f"the memory of {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "memory"
    smaller = f"a batch_size of {fitting} fits" if fitting else "not even a single image fits"
    plain = settings.precision == "fp32" and device.type == "cuda"
    others = "smaller networks or images" + (", or precision bf16 (auto)" if plain else "")
    return (
        f"{title}: a step with batch_size {settings.batch_size} does not fit into {where} ({problem}); {smaller}. "
        f"Take {'that, ' if fitting else ''}{others}, or free what other programs hold."
    )
