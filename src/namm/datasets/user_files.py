"""A user's own file as a dataset: what is in it, how it is split, and its images in the order that seed and split say.

A file may come with its splits: arrays called `train`, `val` and `test`. A split that it lacks is taken from `train`,
or, where there is a single array, from that: its images are shuffled by the seed and cut into consecutive parts.
A split of the file's own is shuffled too: files are often sorted, and the first images of a split stand for all of it.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from namm.datasets.base import BLOCK, SPLITS, Dataset
from namm.datasets.readers import (
    FEW,
    HDF5_SUFFIXES,
    LAYOUTS,
    LazyImages,
    hdf5_arrays,
    is_lazy,
    npy_header,
    npz_members,
    open_images,
    png_files,
    read_images,
)
from namm.errors import DataError, UsageError
from namm.hdf5 import open_hdf5
from namm.numerics import generator
from namm.reading import REASON, damage_as, require_plain

HASH = 16
"""Hexadecimal digits of a hash: enough to tell one file from another."""
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Shares of an array that several splits are taken from."""
LEAST = {"train": 2, "val": 1, "test": 2}
"""Images that a split needs: those to train on and those to evaluate with are compared in subsets."""
GROUP_BYTES = 512 * 2**20
"""Images that are read together, in the file's order: compressed files unpack many rows to read one."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OwnFile:
    """What was found in a file.

    Attributes:
        path: The file, or the folder of PNGs.
        arrays: Name of the array that each split is taken from; None for a file that holds a single one.
        counts: Images in each of these arrays.
        shape: (C, H, W) of an image.
        layout: Order of the axes on disk; None where the file knows it.
    """

    path: Path
    arrays: Mapping[str, str | None]
    counts: Mapping[str | None, int]
    shape: tuple[int, int, int]
    layout: str | None

    def sharing(self, split: str) -> list[str]:
        """The splits that are taken from the same array, in order."""
        return [other for other in SPLITS if self.arrays[other] == self.arrays[split]]

    def sizes(self, asked: Mapping[str, int]) -> dict[str, int]:
        """Images per split: as many as asked, and for those asked with 0 what the file has, or their share of it."""
        sizes = dict(asked)
        for split in reversed(SPLITS):  # what is left goes to the first that shares an array
            sharing, there = self.sharing(split), self.counts[self.arrays[split]]
            is_first = split == sharing[0]
            if not sizes[split]:
                part = SHARES[split] / sum(SHARES[other] for other in sharing)
                rest = there - sum(sizes[other] for other in sharing[1:])
                sizes[split] = rest if is_first else max(1, round(there * part))
            taken = {other: sizes[other] for other in sharing}
            if is_first and (sum(taken.values()) > there or any(n < LEAST[other] for other, n in taken.items())):
                counts = ", ".join(f"{n} for {other}" for other, n in taken.items())
                raise DataError(
                    f"{self.path} holds {there} images to take {counts} from: train and test need at least two each, "
                    "val one, and no image is in two. Ask for fewer, or bring more."
                )
        return sizes

    def rows(self, split: str, sizes: Mapping[str, int], seed: int) -> NDArray[np.int64]:
        """Which images of its array make up a split, in random order."""
        sharing, there = self.sharing(split), self.counts[self.arrays[split]]
        order: NDArray[np.int64] = torch.randperm(there, generator=generator(seed, "own images")).numpy()
        first = sum(sizes[other] for other in sharing[: sharing.index(split)])
        return order[first : first + sizes[split]]


@dataclass(frozen=True)
class OwnImages(Dataset):
    """Images of a user's file; `counts` are those of the splits, `content` is the file's hash."""

    name: ClassVar[str] = "own"
    sizes: ClassVar[dict[str, int]] = {}
    file: Path
    key: str | None
    layout: str | None
    content: str
    image_shape: tuple[int, int, int]
    counts: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        return self.image_shape

    def parameters(self) -> dict[str, bool | int | float | str | None]:
        """What shapes an image: the file's content, whatever it is called."""
        return {"content": self.content, "key": self.key, "layout": self.layout}

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """Images that are there already cannot be drawn anew."""
        raise UsageError("images of a file are not drawn: ask for its blocks.")

    def blocks(self, seed: int, split: str, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Blocks of a split in the order of `numbers`: (64, C, H, W) each, the last one with what is left."""
        if not numbers:
            return
        if self._file.shape != self.image_shape:
            raise DataError(f"{self.file} holds other images than it did: run the same command again.")
        rows = self._file.rows(split, self.counts, seed)
        with ExitStack() as stack:
            images = self._images(self._file.arrays[split], stack)
            many = max(1, GROUP_BYTES // (4 * BLOCK * math.prod(self.shape)))
            for start in range(0, len(numbers), many):
                parts = [rows[k * BLOCK : (k + 1) * BLOCK] for k in numbers[start : start + many]]
                group = np.concatenate(parts)
                order = np.argsort(group)
                in_file_order = images[group[order]]
                yield from in_file_order[np.argsort(order)].split([len(part) for part in parts])

    @cached_property
    def _file(self) -> OwnFile:
        return look(self.file, self.key, self.layout)

    @cached_property
    def _in_memory(self) -> dict[str | None, Tensor]:
        return {}

    def _images(self, name: str | None, stack: ExitStack) -> LazyImages | Tensor:
        """The images of an array; what cannot be read on demand is read once, and kept as long as this is."""
        if is_lazy(self.file):
            return stack.enter_context(open_images(self.file, key=name, layout=self._file.layout))
        if name not in self._in_memory:
            self._in_memory[name] = read_images(self.file, key=name, layout=self._file.layout)
        return self._in_memory[name]


def content_hash(path: Path) -> str:
    """A hash of a file, or of the names and contents of the PNGs in a folder."""
    if not path.is_dir():
        with damage_as(DataError, f"{path} cannot be read: {REASON}."):
            require_plain(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:HASH]
    whole = hashlib.sha256()
    for each in png_files(path):
        whole.update(each.name.encode() + content_hash(each).encode())
    return whole.hexdigest()[:HASH]


# Looking into a file


def look(path: Path, key: str | None = None, layout: str | None = None) -> OwnFile:
    """Which arrays of a file are images to train on, and how many; reads no pixels but those of PNGs."""
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    stored, knows_layout = _stored_arrays(path)
    arrays = dict.fromkeys(SPLITS, key) if key is not None else _arrays(path, stored)
    names = list(dict.fromkeys(arrays.values()))
    if layout is None and not knows_layout:
        layout = _only_layout(path, stored.get(names[0]))
    shapes = {name: _image_shape(path, name, layout, stored.get(name)) for name in names}
    if len(sizes := sorted({shape[1:] for shape in shapes.values()})) > 1:
        listed = ", ".join("×".join(map(str, size)) for size in sizes)
        raise DataError(f"the splits of {path} hold images of different shapes, {listed}: they must agree.")
    channels, height, width = sizes[0]
    return OwnFile(path, arrays, {name: shape[0] for name, shape in shapes.items()}, (channels, height, width), layout)


def _stored_arrays(path: Path) -> tuple[dict[str | None, NDArray[Any]], bool]:
    """Arrays of a file by name, as stand-ins that have their shape and type, and whether the file knows its layout.

    There are none where it cannot be read, which its reader says better.
    """
    if path.is_dir():
        return {}, True
    suffix = path.suffix.lower()
    if suffix in HDF5_SUFFIXES:
        with open_hdf5(path) as file:
            stored = hdf5_arrays(file).items()
            with damage_as(DataError, f"{path} cannot be read ({REASON}): it is damaged; write it anew."):
                found: dict[str | None, NDArray[Any]] = {
                    name: _stand_in(each.shape or (), each.dtype) for name, each in stored
                }
                return found, "namm_version" in file.attrs
    with suppress(Exception):  # NumPy and zipfile raise anything on damaged files
        require_plain(path)
        if suffix == ".npy":
            return {None: open_memmap(path, mode="r")}, False
        if suffix == ".npz":
            with ZipFile(path) as archive:
                members = npz_members(archive).items()
                return {name: _stand_in(*npy_header(archive, member)) for name, member in members}, False
    return {}, False


def _stand_in(shape: Shape, kind: np.dtype[Any]) -> NDArray[Any]:
    """An array of that shape and type that takes no memory."""
    return np.broadcast_to(np.zeros((), kind), shape)


def _arrays(path: Path, stored: Mapping[str | None, NDArray[Any]]) -> dict[str, str | None]:
    """The array that each split is taken from, where no key names it."""
    if not stored or None in stored:
        return dict.fromkeys(SPLITS, None)
    names = [str(name) for name, array in stored.items() if array.ndim == 4 and array.size]
    if "train" in names:
        return {split: split if split in names else "train" for split in SPLITS}
    if len(names) == 1:
        return dict.fromkeys(SPLITS, names[0])
    listed = ", ".join(f"{name} {array.shape}" for name, array in stored.items())
    if names:
        raise DataError(
            f"{path} holds {listed}: say which array the images are (--data.key NAME), or call them train, val and "
            "test."
        )
    is_grey = any(array.ndim == 3 and array.size for array in stored.values())
    hint = "; to greyscale images add the channel axis, as in x[:, None]" if is_grey else ""
    raise DataError(
        f"{path} holds no array of four axes with images in it, but {listed}. Images are (images, channels, rows, "
        f"columns){hint}."
    )


def _only_layout(path: Path, stored: NDArray[Any] | None) -> str:
    """The layout, where only one axis can be the channels."""
    if stored is None or stored.ndim != 4:
        return LAYOUTS[0]  # there are no images: their reader says what is there instead
    few = [layout for layout, axis in zip(LAYOUTS, (1, 3), strict=True) if stored.shape[axis] <= FEW]
    if len(few) == 1:
        return few[0]
    raise UsageError(
        f"{path} does not say which axis of {stored.shape} holds the channels: add --data.layout NCHW (images, "
        "channels, rows, columns) or --data.layout NHWC (channels last)."
    )


def _image_shape(path: Path, name: str | None, layout: str | None, stored: NDArray[Any] | None) -> Shape:
    """(N, C, H, W), without reading pixels where a header says it."""
    if is_lazy(path):
        with open_images(path, key=name, layout=layout) as images:
            return images.shape
    if stored is not None:
        return LazyImages(stored, layout, f"{path}, {name}").shape
    return tuple(read_images(path, key=name, layout=layout).shape)  # PNGs, or an error
