"""Batches of a shuffled data set, as a pure function of the step.

The training stream is the concatenation of one permutation of the data per epoch, each seeded by (seed, epoch); step s
takes entries s·B … (s+1)·B − 1 of it. Nothing is dropped, a batch may be larger than the data, and a resumed run or
another number of processes sees the same images in the same order, because there is no state to lose.
"""

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from namm.constraints.contract import ROUNDING
from namm.errors import DataError
from namm.formatting import format_number
from namm.numerics import arithmetic, generator

PREFETCH = 3  # batches read ahead when streaming
CHUNK = 64  # images mapped at a time
EXAMINED = 256  # images, evenly spread over a set, whose values are looked at
VALUES = 2**24  # pixels of them together, at most: 128 MiB in float64
LIMIT = 1e15  # largest value, and the inverse of the smallest spread: float32 holds the sum of a million squares


class Images(Protocol):
    """Anything with a shape that gives rows by a sorted index array: a tensor, a NumPy array, an HDF5 data set."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, H, W)."""

    def __getitem__(self, index: Any) -> Any:
        """Rows."""


class Order:
    """Which images make up the part of each batch that belongs to one process."""

    def __init__(self, n: int, batch_size: int, seed: int, *, rank: int = 0, world: int = 1) -> None:
        self.n, self.batch_size, self.seed = n, batch_size, seed
        share = batch_size // world
        self.window = (rank * share, (rank + 1) * share)
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def indices(self, step: int) -> np.ndarray:
        """Indices of this process's share of batch `step`: (B / world,)."""
        first, last = (step * self.batch_size + edge for edge in self.window)
        parts = [
            self._epoch_order(epoch)[max(first - epoch * self.n, 0) : last - epoch * self.n]
            for epoch in range(first // self.n, (last - 1) // self.n + 1)
        ]
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._permutation = torch.randperm(self.n, generator=generator(self.seed, "order", epoch)).numpy()
            self._epoch = epoch
        return self._permutation


class ResidentBatches:
    """All images live on the device; a batch is one gather."""

    def __init__(self, images: Images, order: Order, device: torch.device) -> None:
        self.order = order
        self.images = to_tensor(images[:]).to(device)

    def batch(self, step: int) -> Tensor:
        """(B / world, C, H, W) on the device."""
        index = torch.from_numpy(self.order.indices(step))
        if self.images.is_cuda:
            index = index.pin_memory().to(self.images.device, non_blocking=True)
        return self.images[index]


class StreamingBatches:
    """Images stay where they are; a thread reads the next batches while the device works."""

    def __init__(self, images: Images, order: Order, device: torch.device) -> None:
        self.images, self.order, self.device = images, order, device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="namm-batches")
        self._ahead: dict[int, Future[Tensor]] = {}

    def batch(self, step: int) -> Tensor:
        """(B / world, C, H, W) on the device."""
        self._ahead = {s: future for s, future in self._ahead.items() if s >= step}
        for s in range(step, step + PREFETCH + 1):
            if s not in self._ahead:
                self._ahead[s] = self._reader.submit(self._read, self.order.indices(s))
        return self._ahead.pop(step).result().to(self.device, non_blocking=True)

    def _read(self, indices: np.ndarray) -> Tensor:
        rows, place = np.unique(indices, return_inverse=True)  # HDF5 wants its rows sorted and once
        batch = to_tensor(self.images[rows])[torch.from_numpy(place)]
        return batch.pin_memory() if self.device.type == "cuda" else batch


def batches(
    images: Images, order: Order, device: torch.device, reserved_bytes: int = 0
) -> ResidentBatches | StreamingBatches:
    """Resident batches where the images fit into half of the free memory, streaming ones otherwise.

    `reserved_bytes` of the free memory are left out: what the training itself will take.
    """
    itemsize = 8 if "float64" in str(getattr(images, "dtype", "")) else 4
    needed = int(np.prod(images.shape, dtype=np.int64)) * itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    already_here = isinstance(images, Tensor) and images.device.type == device.type
    kind = ResidentBatches if already_here or needed <= (free - reserved_bytes) // 2 else StreamingBatches
    return kind(images, order, device)


def in_chunks(images: Images, size: int) -> Iterator[Tensor]:
    """The images in order, `size` at a time."""
    for start in range(0, images.shape[0], size):
        yield to_tensor(images[start : start + size])


def map_images(function: Callable[[Tensor], Tensor], images: Images, device: torch.device, name: str) -> np.ndarray:
    """`function` of all images, (N, C, H, W), computed on `device` in plain float32 a few at a time, without gradients.

    The result is in memory, or in a temporary file that disappears with it if it would fill half of that. `name` is
    what errors call the function, which must keep the images' shape.
    """
    mapped, done = _room(tuple(images.shape)), 0
    for x in in_chunks(images, CHUNK):
        with torch.no_grad(), arithmetic("fp32", device):
            y = function(x.to(device))
        if y.shape != x.shape:
            raise DataError(
                f"{name} turns an image of {tuple(x.shape[1:])} into {tuple(y.shape[1:])}: it must keep the shape."
            )
        if not torch.isfinite(y).all():
            raise DataError(f"{name}(x) is not finite for images {done} to {done + len(x) - 1}; x: {describe(x)}.")
        mapped[done : done + len(x)] = y.float().cpu().numpy()
        done += len(x)
    return mapped


def _room(shape: tuple[int, ...]) -> np.ndarray:
    if 4 * np.prod(shape, dtype=np.int64) <= psutil.virtual_memory().available // 2:
        return np.empty(shape, np.float32)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def to_tensor(rows: Any) -> Tensor:
    """Rows as a floating-point tensor: float64 is kept, bytes are scaled to [0, 1], other integers are refused."""
    if not isinstance(rows, Tensor):
        array = np.asarray(rows)
        array = array.copy() if min(array.strides, default=0) < 0 else array  # NumPy ignores strides of a single row
        # FITS arrays are big-endian, views may be reversed, mapped files cannot be written to: torch takes none.
        rows = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    if rows.dtype == torch.uint8:
        return rows.float() / 255
    if not rows.is_floating_point() and rows.dtype != torch.bool:
        raise DataError(f"images of type {rows.dtype} have no known scale: convert them to float32 in your own units.")
    return rows.detach() if rows.dtype == torch.float64 else rows.detach().float()


def check_images(images: Images, name: str = "data") -> None:
    """Refuse what is not a non-empty set of images (N, C, H, W)."""
    shape = tuple(getattr(images, "shape", ()))
    if len(shape) != 4:
        raise DataError(f"{name} must have four axes (N, C, H, W); this has shape {shape}.")
    if 0 in shape:
        raise DataError(f"{name} is empty: its shape is {shape}.")


def check_values(images: Images, name: str = "data") -> list[str]:
    """Refuse images from which nothing can be learned, or whose squares float32 cannot hold.

    Looks at up to `EXAMINED` images spread evenly over the set, so a set of any size is judged at once. Constant
    images and copies of one image are refused. A constant channel beside others that vary, and images that are
    constant each but differ, can be learned: what should be known about them is returned in sentences. NaN and Inf are
    left to those who read all images.
    """
    check_images(images, name)
    n, size = images.shape[0], int(np.prod(images.shape[1:], dtype=np.int64))
    count = min(n, EXAMINED, max(2, VALUES // size))
    x = to_tensor(images[np.unique(np.linspace(0, n - 1, count).astype(np.int64))]).cpu().double()
    if not x.isfinite().all():
        return []
    if (largest := float(x.abs().max())) > LIMIT:
        raise DataError(
            f"the {name} reach {format_number(largest)}, and float32 cannot hold sums of squares of values above "
            f"{LIMIT:g}: divide the images by a constant so that their standard deviation is near 1, and adapt the "
            "rule."
        )
    seen = f"{len(x)} of the {n} images" if len(x) < n else f"all {n} images"
    spread, rounding = x.transpose(0, 1).flatten(1).std(1, correction=0), ROUNDING * x.abs().amax((0, 2, 3))
    if (spread <= rounding).all():
        first = format_number(float(x[0, 0, 0, 0]), ".6g")
        raise DataError(
            f"the {name} are constant: in {seen} every channel has the same value everywhere, {first} in "
            "the first one, to within rounding, and there is nothing to learn. Look at the file; from images that vary "
            "by less than a millionth of their mean, subtract it."
        )
    if len(x) > 1 and ((x - x[0]).abs().amax((0, 2, 3)) <= rounding).all():
        raise DataError(
            f"the {name} are constant: {seen} are copies of one, to within rounding, and a model needs images that "
            "differ. Look at how the file was written."
        )
    if (widest := float(spread.max())) < 1 / LIMIT:
        raise DataError(
            f"the {name} have a standard deviation of {format_number(widest)}, and float32 cannot hold squares of "
            f"values below {1 / LIMIT:g} well: multiply the images by a constant so that it is near 1, and adapt the "
            "rule."
        )
    return _peculiar(x, name, spread <= rounding, rounding)


def _peculiar(x: Tensor, name: str, still: Tensor, rounding: Tensor) -> list[str]:
    """What should be known about images (N, C, H, W) that vary, but not in the channels `still`, or not in space."""
    notes = []
    if still.any():
        named = ", ".join(str(c) for c in still.nonzero().flatten().tolist())
        notes.append(f"channel {named} of the {name} is constant: it costs as much as the others and teaches nothing.")
    if x.shape[2] * x.shape[3] > 1 and (x.flatten(2).std(2, correction=0).amax(0) <= rounding).all():
        notes.append(f"every image of the {name} is constant in space: figures of total variation mean nothing.")
    return notes


def check_held_out(images: Images, data: Images) -> None:
    """Refuse validation images that are not of the size of the data."""
    check_images(images, "validation data")
    if images.shape[1:] != data.shape[1:]:
        raise DataError(
            f"validation images are {tuple(images.shape[1:])} but the data are {tuple(data.shape[1:])}: "
            "they must agree."
        )


def describe(batch: Tensor) -> str:
    """Shape and statistics of a batch in a line."""
    statistics = {name: float(getattr(batch, name)()) for name in ("min", "max", "mean", "std")}
    bad = int((~torch.isfinite(batch)).sum())
    listed = ", ".join(f"{name} {format_number(value, '.4g')}" for name, value in statistics.items())
    return f"{tuple(batch.shape)}, {listed}, {bad} values not finite"
