"""Where a command computes, as `--device` says it, for this process and those that it starts.

CUDA shows programs the GPUs that CUDA_VISIBLE_DEVICES names. So everything after this finds, as always, the first GPU
that it sees, or the CPU where it sees none; nothing else has to know of the choice. It is made before torch is loaded.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from namm.errors import UsageError
from namm.experiments.engine.processes import world

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def computing_on(name: str) -> Iterator[None]:
    """Compute on `cpu`, `cuda` or `cuda:N` inside this context; refused where that is not there."""
    before = os.environ.get(VISIBLE)
    shown = _visible(name, before)
    try:
        if shown is not None:
            os.environ[VISIBLE] = shown
        if name != "cpu":
            _require_gpu(name)
        yield
    finally:
        if before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = before


def _visible(name: str, before: str | None) -> str | None:
    """What CUDA_VISIBLE_DEVICES must say; None where it stays as it is."""
    if name in ("cpu", "cuda"):
        return "" if name == "cpu" else None
    if name.partition(":")[0] == "mps":
        raise UsageError("--device mps is not supported, for it has no float64, which rules are measured in: take cpu.")
    match = re.fullmatch(r"cuda:(\d{1,3})", name)
    if match is None:
        raise UsageError(f"--device takes cpu, cuda or cuda:N, such as cuda:1, not {name!r}.")
    if world() > 1:
        raise UsageError(f"--device {name}: torchrun gives every process a GPU of its own; take cuda, or cpu.")
    known = None if before is None else [gpu.strip() for gpu in before.split(",") if gpu.strip()]
    if known is None:
        return match[1]
    if not known:
        raise UsageError(f"--device {name}: {VISIBLE} is empty, which hides all GPUs: unset it, or take --device cpu.")
    if int(match[1]) >= len(known):
        raise UsageError(f"--device {name}: {VISIBLE} shows {len(known)} GPUs here, the first of which is cuda:0.")
    return known[int(match[1])]


def _require_gpu(name: str) -> None:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = "PyTorch sees no such GPU here" if built else "this PyTorch was built for CPUs alone"
        raise UsageError(f"--device {name} is not there: {reason}. Leave it out, or take --device cpu.")
