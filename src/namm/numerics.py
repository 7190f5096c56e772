"""Precision and randomness, decided in one place.

Two rules of the package live here. What must not be rounded (ℓ, g, simulators, losses) runs in float32 or better,
whatever autocast says. And every random draw is a pure function of a seed and of *what it is for*, so that a
resumed run, another batch size or another number of processes draws the same numbers.

Four names say how a GPU computes: `fp32` in plain float32; `tf32` with the products of float32 matrices and
convolutions rounded to 10 bits and summed in float32; `bf16` with autocast besides; `auto` as `bf16` where the GPU has
it, else as `tf32`. A CPU knows `bf16` and otherwise computes in float32.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import get_args

import torch
from torch import Tensor

from namm.errors import UsageError
from namm.precision import Precision


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself in float32 or float64, a float32 copy of anything narrower."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def full_precision(x: Tensor) -> AbstractContextManager[None]:
    """Context in which autocast is off on `x`'s device."""
    return torch.autocast(x.device.type, enabled=False)


def in_two(x: Tensor) -> Tensor:
    """A float32 picture as its first 8 bits and what they leave, side by side: (B, C, H, W) -> (B, 2C, H, W).

    Matrix units round what they multiply to 8 or 11 bits. Every pixel is then off by its own amount, which looks like
    noise; of the two parts together they keep 16 bits. Bits are masked, not rounded by a cast: compilers drop those.
    """
    with torch.no_grad():
        coarse = (x.detach().view(torch.int32) & -(2**16)).view(torch.float32)
    return torch.cat([coarse, x - coarse], dim=1)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 where `precision` asks for it, and nowhere else."""
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(precision, device))


def uses_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether `precision` asks for bfloat16 on `device`."""
    if precision not in get_args(Precision):
        raise UsageError(f"precision must be one of {', '.join(get_args(Precision))}, not {precision!r}.")
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16" or (precision == "auto" and has_bf16)


@contextmanager
def backends(precision: Precision, device: torch.device) -> Iterator[None]:
    """TF32 as `precision` asks for it, and the fastest convolutions that cuDNN finds by trying, on a GPU."""
    if device.type != "cuda":
        yield
        return
    tf32, products = precision != "fp32", torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = products


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Everything that `precision` means on `device`; what is differentiated must be so inside."""
    with backends(precision, device), autocast(precision, device):
        yield


def fold(seed: int, *path: int | str) -> int:
    """A 63-bit seed that depends on `seed` and on every element of `path`, e.g. `fold(0, "noise", step)`."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed what layers such as dropout draw from on `device`; `torch.manual_seed` does so for every kind there is."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def generator(seed: int, *path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded with `fold(seed, *path)`."""
    return torch.Generator(device).manual_seed(fold(seed, *path))
