"""How metrics read images: by rows, checked, whatever holds them."""

from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from namm.datasets.batches import Images, in_chunks, to_tensor
from namm.errors import DataError
from namm.numerics import generator

PIECE = 512
"""Images read from disk at a time."""


class View:
    """Some rows of a set of images, read when asked for.

    Args:
        images: the set (N, …).
        rows: sorted indices into it, (n,).
    """

    def __init__(self, images: Images, rows: np.ndarray) -> None:
        self.images, self.rows = images, rows

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, …)."""
        return (len(self.rows), *self.images.shape[1:])

    def __getitem__(self, index: Any) -> Any:
        """The rows that `index`, a slice or a sorted array, selects among these."""
        return self.images[self.rows[index]]


def held(images: Images) -> Images:
    """`images` in memory, for whoever reads them many times; as they are where that would take an eighth of it."""
    if isinstance(images, Tensor | np.ndarray):
        return images
    if isinstance(images, View):
        return View(held(images.images), images.rows)
    if 8 * 4 * int(np.prod(images.shape, dtype=np.int64)) > psutil.virtual_memory().available:
        return images
    return torch.cat(list(in_chunks(images, PIECE)))


def read(images: Images, index: Any, name: str) -> Tensor:
    """The rows that `index`, a slice or a sorted array, selects, as floating-point numbers (n, …).

    Raises:
        DataError: one of them holds NaN or inf; the message names the set, `name`, and the image.
    """
    rows = to_tensor(images[index])
    if torch.isfinite(rows.flatten(1).sum(1)).all():  # any NaN or infinity would survive the sum
        return rows
    finite = torch.isfinite(rows.flatten(1)).all(1)
    if not finite.all():
        bad = np.arange(images.shape[0])[index][int((~finite).nonzero()[0])]
        while isinstance(images, View):  # the number that it has in the user's own set
            bad, images = images.rows[bad], images.images
        raise DataError(
            f"image {bad} of the {name} holds NaN or inf ({int((~finite).sum())} of the {len(rows)} images read "
            "with it do): a mean over it says nothing. Mend what made it, or leave such images out and say how many."
        )
    return rows


def wide(x: Tensor) -> Tensor:
    """`x` in float64, where it is or, if that device has no float64, on the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def random_rows(n: int, size: int, seed: int, *path: int | str) -> np.ndarray:
    """`size` of the indices 0 … n − 1 without repetition, sorted, as a function of (seed, path)."""
    return np.sort(torch.randperm(n, generator=generator(seed, *path))[:size].numpy())


def require_comparable(x: Images, y: Images, names: tuple[str, str]) -> None:
    """Refuse sets (N, …) whose images differ in shape, or that hold fewer than two."""
    for images, name in zip((x, y), names, strict=True):
        shape = tuple(getattr(images, "shape", ()))
        if len(shape) < 2 or shape[0] < 2 or 0 in shape:
            raise DataError(f"the {name} must be at least two images, first axis N; their shape is {shape}.")
    if tuple(x.shape[1:]) != tuple(y.shape[1:]):
        raise DataError(
            f"the {names[0]} have shape {tuple(x.shape)} and the {names[1]} {tuple(y.shape)}: images of different "
            "shape cannot be compared. Resize or crop one of them, or check the order of the axes (N, C, H, W)."
        )


def require_size(n: int, size: int, name: str) -> None:
    """Refuse subsets of `size` out of `n` images where there are not as many."""
    if not 2 <= size <= n:
        raise DataError(
            f"subsets of {size} images cannot be drawn from {n} {name}: "
            f"bring more of them, or choose a size from 2 to {n}."
        )
