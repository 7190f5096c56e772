"""Try whether work fits into memory before it begins, so that what does not is refused within seconds."""

from collections.abc import Callable

import torch

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
