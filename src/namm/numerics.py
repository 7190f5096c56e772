"""Precision and randomness, decided in one place.

Two rules of the package live here. What must not be rounded (ℓ, g, simulators, losses) runs in float32 or better,
whatever autocast says. And every random draw is a pure function of a seed and of *what it is for*, so that a
resumed run, another batch size or another number of processes draws the same numbers.
"""

import hashlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself in float32 or float64, a float32 copy of anything narrower."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def full_precision(x: Tensor) -> AbstractContextManager[None]:
    """Context in which autocast is off on `x`'s device."""
    return torch.autocast(x.device.type, enabled=False)


def fold(seed: int, *path: int | str) -> int:
    """A 63-bit seed that depends on `seed` and on every element of `path`, e.g. `fold(0, "noise", step)`."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, *path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded with `fold(seed, *path)`."""
    return torch.Generator(device).manual_seed(fold(seed, *path))
