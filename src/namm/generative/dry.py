"""One evaluation of everything that sampling needs, before it begins: what does not fit is said within seconds."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from namm.constraints import Constraint
from namm.errors import MemoryShortage, is_out_of_memory
from namm.generative.base import evaluating
from namm.generative.diffusion import Diffusion
from namm.generative.mirrored import Mirrored
from namm.numerics import generator


def shortage(attempt: Callable[[int], None], size: int, device: torch.device) -> tuple[str, int] | None:
    """None where `attempt(size)` fits into memory; else what the allocator said, and a smaller size that fits, or 0.

    Attempts leave the random state of torch as it was.
    """
    problem = _problem(attempt, size, device)
    if problem is None:
        return None
    fitting = size // 2
    while fitting and _problem(attempt, fitting, device) is not None:
        fitting //= 2
    return problem, fitting


def _problem(attempt: Callable[[int], None], size: int, device: torch.device) -> str | None:
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


def rehearse_sampling(
    source: Mirrored, size: int, constraint: Constraint | None = None, *, compile: bool = False
) -> None:
    """Refuse to make `size` samples together where the network, f or ℓ does not fit; compiles what is to be."""
    device = source.device

    @torch.no_grad()
    def attempt(n: int) -> None:
        noise = torch.randn((n, *source.model.sample_shape), generator=generator(0, "dry sampling")).to(device)
        with evaluating(source):
            if isinstance(source.model, Diffusion):
                with source.model.compiled(n) if compile else nullcontext():
                    for _ in range(3 if compile else 1):  # what is compiled records CUDA graphs after its first call
                        source.model.denoise(noise, noise.new_ones(n))
            x = source.to_data(noise)
        if constraint is not None:
            constraint(x)

    if (found := shortage(attempt, size, device)) is None:
        return
    problem, fitting = found
    smaller = f"{fitting} fit: ask for that batch_size" if fitting else "not even one fits: take a smaller network"
    raise MemoryShortage(
        f"sampling: {size} samples together do not fit into memory ({problem}); {smaller}, or free what other programs "
        "hold."
    )
