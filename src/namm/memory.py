"""Try whether work fits into memory before it begins, so that what does not is refused within seconds."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from namm.errors import is_out_of_memory


def shortage(attempt: Callable[[int], None], size: int, device: torch.device) -> tuple[str, int] | None:
    """None where `attempt(size)` fits into memory; else the allocator's message and a smaller size that fits, or 0.

    Attempts leave the random state of torch as it was.
    """
    problem = _shortage_at(attempt, size, device)
    if problem is None:
        return None
    fitting = size // 2
    while fitting and _shortage_at(attempt, fitting, device) is not None:
        fitting //= 2
    return problem, fitting


def _shortage_at(attempt: Callable[[int], None], size: int, device: torch.device) -> str | None:
    """None where `attempt(size)` fits; else the first line of the allocator's message."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            attempt(size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return str(error).strip().partition("\n")[0] or type(error).__name__
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # whoever places data next looks at what is free
    return None


def step_on_copies(
    module: nn.Module, inputs: Callable[[], tuple[Tensor, ...]], autocast: AbstractContextManager[None], copies: int
) -> None:
    """Compute `module(*inputs())["loss"]` and its gradient on copies of weights and buffers; nothing is changed.

    `copies` further tensors of the size of each weight are held meanwhile, as an optimiser would.
    """
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    held = [torch.empty_like(weight) for weight in weights.values() for _ in range(copies)]
    tensors = inputs()
    with autocast:
        losses = functional_call(module, weights | buffers, tensors)
    if weights:
        torch.autograd.grad(losses["loss"], list(weights.values()), allow_unused=True)
    del held


def reset_peak(device: torch.device) -> None:
    """Let `peak` count from now on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Bytes of a GPU that were taken at most since `reset_peak`, beyond what still is; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved(device) - torch.cuda.memory_allocated(device)
