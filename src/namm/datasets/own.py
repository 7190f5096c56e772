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
from typing import IO, Any, ClassVar
from zipfile import BadZipFile, ZipFile

import h5py
import numpy as np
import torch
from numpy.lib.format import open_memmap, read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray
from torch import Tensor

from namm.datasets.base import BLOCK, SPLITS, Dataset
from namm.datasets.convert import (
    FEW,
    LAYOUTS,
    Layout,
    as_float32,
    require_finite,
    require_images,
    require_layout,
    to_nchw,
)
from namm.datasets.lazy import LazyImages
from namm.datasets.readers import HDF5_SUFFIXES, open_hdf5, open_images, read_images
from namm.errors import DataError, UsageError
from namm.numerics import generator

HASH = 16
"""Hexadecimal digits of a hash: enough to tell one file from another."""
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Shares of an array that several splits are taken from."""
LEAST = {"train": 2, "val": 1, "test": 2}
"""Images that a split needs: those to train on and those to evaluate with are compared in subsets."""
GROUP_BYTES = 512 * 2**20
"""Images that are read together, in the file's order: compressed files unpack many rows to read one."""

Header = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of an array in a file."""


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
        for split in reversed(SPLITS):  # what is left goes to train
            sharing, there = self.sharing(split), self.counts[self.arrays[split]]
            if not sizes[split] and split != sharing[0]:
                part = SHARES[split] / sum(SHARES[other] for other in sharing)
                sizes[split] = max(1, round(there * part))
            elif not sizes[split]:
                sizes[split] = there - sum(sizes[other] for other in sharing[1:])
            if split == sharing[0]:
                self._require_enough(sizes, sharing, there)
        return sizes

    def _require_enough(self, sizes: Mapping[str, int], sharing: Sequence[str], there: int) -> None:
        wanted = {split: sizes[split] for split in sharing}
        if sum(wanted.values()) > there or any(n < LEAST[split] for split, n in wanted.items()):
            counts = ", ".join(f"{n} for {split}" for split, n in wanted.items())
            raise DataError(
                f"{self.path} holds {there} images to take {counts} from: train and test need at least two each, val "
                "one, and no image is in two. Ask for fewer, or bring more."
            )

    def rows(self, split: str, sizes: Mapping[str, int], seed: int) -> NDArray[np.int64]:
        """Which images of its array make up a split, in random order."""
        sharing, there = self.sharing(split), self.counts[self.arrays[split]]
        order: NDArray[np.int64] = torch.randperm(there, generator=generator(seed, "own images")).numpy()
        first = sum(sizes[other] for other in sharing[: sharing.index(split)])
        return order[first : first + sizes[split]]


def look(path: Path, key: str | None = None, layout: str | None = None) -> OwnFile:
    """Which arrays of a file are images to train on, and how many; reads no pixels but those of PNGs."""
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    arrays = _arrays(path, key)
    names = list(dict.fromkeys(arrays.values()))
    stated = layout if layout or _knows_layout(path) else _plain_layout(path, names[0])
    found = {name: _shape(path, name, stated) for name in names}
    shapes = sorted({shape[1:] for shape in found.values()})
    if len(shapes) > 1:
        sizes = ", ".join("×".join(map(str, shape)) for shape in shapes)
        raise DataError(f"the splits of {path} hold images of different shapes, {sizes}: they must agree.")
    channels, height, width = shapes[0]
    counts = {name: shape[0] for name, shape in found.items()}
    return OwnFile(path, arrays, counts, (channels, height, width), stated)


def content_hash(path: Path) -> str:
    """A hash of a file, or of the names and contents of the PNGs in a folder."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:HASH]
    whole = hashlib.sha256()
    for each in sorted(p for p in path.iterdir() if p.suffix.lower() == ".png"):
        whole.update(each.name.encode() + content_hash(each).encode())
    return whole.hexdigest()[:HASH]


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
        found = self._found
        if found.shape != self.image_shape:
            raise DataError(f"{self.file} holds other images than it did: run the same command again.")
        rows = found.rows(split, self.counts, seed)
        with ExitStack() as stack:
            images = self._images(found.arrays[split], stack)
            many = max(1, GROUP_BYTES // (4 * BLOCK * math.prod(self.shape)))
            for start in range(0, len(numbers), many):
                parts = [rows[k * BLOCK : (k + 1) * BLOCK] for k in numbers[start : start + many]]
                yield from _in_order(images, np.concatenate(parts)).split([len(part) for part in parts])

    @cached_property
    def _found(self) -> OwnFile:
        return look(self.file, self.key, self.layout)

    @cached_property
    def _in_memory(self) -> dict[str | None, Tensor]:
        return {}

    def _images(self, name: str | None, stack: ExitStack) -> "LazyImages | MappedImages | Tensor":
        """The images of an array; what cannot be read on demand is read once, and kept as long as this is."""
        layout = self._found.layout
        if _is_hdf5(self.file):
            return stack.enter_context(open_images(self.file, key=name, layout=layout))
        if self.file.suffix.lower() == ".npy":
            return MappedImages(open_memmap(self.file, mode="r"), require_layout(layout, str(self.file)), self.file)
        if name not in self._in_memory:
            self._in_memory[name] = read_images(self.file, key=name, layout=layout)
        return self._in_memory[name]


@dataclass(frozen=True)
class MappedImages:
    """Images of an NPY file, read when they are indexed."""

    array: NDArray[Any]
    layout: Layout
    path: Path

    def __getitem__(self, rows: NDArray[np.int64]) -> Tensor:
        """The images of these rows: float32, (B, C, H, W)."""
        values = as_float32(self.array[rows])
        require_finite(values, str(self.path), rows)
        return torch.from_numpy(to_nchw(values, self.layout))


def _in_order(images: LazyImages | MappedImages | Tensor, rows: NDArray[np.int64]) -> Tensor:
    """The images of `rows`, read in the file's order."""
    order = np.argsort(rows)
    return images[rows[order]][np.argsort(order)]


def _is_hdf5(path: Path) -> bool:
    return path.suffix.lower() in HDF5_SUFFIXES and not path.is_dir()


def _shape(path: Path, name: str | None, layout: str | None) -> tuple[int, ...]:
    """(N, C, H, W), as its header says."""
    if _is_hdf5(path):
        with open_images(path, key=name, layout=layout) as images:
            return images.shape
    if name not in (headers := _headers(path)):
        return tuple(read_images(path, key=name, layout=layout).shape)  # PNGs, or an error
    shape, kind = headers[name]
    place = f"{path}, {name}" if name else str(path)
    stated = require_layout(layout, place)
    require_images(shape, kind, stated, place)
    n, a, b, c = shape
    return (n, a, b, c) if stated == "NCHW" else (n, c, a, b)


def _arrays(path: Path, key: str | None) -> dict[str, str | None]:
    """The array that each split is taken from."""
    if key is not None or path.is_dir() or not (_is_hdf5(path) or path.suffix.lower() == ".npz"):
        return dict.fromkeys(SPLITS, key)
    shapes = {str(name): shape for name, (shape, _) in _headers(path).items()}
    if not shapes:
        return dict.fromkeys(SPLITS, None)
    names = [name for name, shape in shapes.items() if len(shape) == 4 and 0 not in shape]
    if "train" in names:
        return {split: split if split in names else "train" for split in SPLITS}
    if len(names) != 1:
        raise DataError(f"{path} holds {_unclear(shapes, names)}")
    return dict.fromkeys(SPLITS, names[0])


def _unclear(shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> str:
    """What a file holds in which no array, or none of several, is known to be the images."""
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if names:
        return f"{listed}: say which array the images are (--data.key NAME), or call them train, val and test."
    lacking = any(len(shape) == 3 and 0 not in shape for shape in shapes.values())
    hint = "; to greyscale images add the channel axis, as in x[:, None]" if lacking else ""
    return f"no array of four axes with images in it, but {listed}. Images are (images, channels, rows, columns){hint}."


def _headers(path: Path) -> dict[str | None, Header]:
    """What is known of the arrays in a file; nothing where it cannot be read, which its reader says better."""
    found: dict[str | None, Header] = {}

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = tuple(item.shape or ()), item.dtype

    if _is_hdf5(path):
        with open_hdf5(path) as file:
            file.visititems(note)
        return found
    with suppress(ValueError, EOFError, OSError, BadZipFile):
        if path.suffix.lower() == ".npy":
            mapped = open_memmap(path, mode="r")
            return {None: (mapped.shape, mapped.dtype)}
        if path.suffix.lower() == ".npz":
            with ZipFile(path) as archive:
                members = [name for name in archive.namelist() if name.endswith(".npy")]
                return {name.removesuffix(".npy"): _header(archive.open(name)) for name in members}
    return {}


def _header(file: IO[bytes]) -> Header:
    """That of an array in the NPY format, without its values."""
    with file:
        read = read_array_header_1_0 if read_magic(file) == (1, 0) else read_array_header_2_0
        shape, _, kind = read(file)
    return shape, kind


def _knows_layout(path: Path) -> bool:
    """Whether it is a folder of PNGs or a file of ours."""
    if not _is_hdf5(path):
        return path.is_dir()
    with open_hdf5(path) as file:
        return "namm_version" in file.attrs


def _plain_layout(path: Path, name: str | None) -> str:
    """The layout, where only one axis can be the channels."""
    header = _headers(path).get(name)
    shape = header[0] if header else ()
    if len(shape) != 4:
        return LAYOUTS[0]  # there are no images: their reader says what is there instead
    few = [layout for layout, axis in zip(LAYOUTS, (1, 3), strict=True) if shape[axis] <= FEW]
    if len(few) == 1:
        return few[0]
    raise UsageError(
        f"{path} does not say which axis of {shape} holds the channels: add --data.layout NCHW (images, channels, "
        "rows, columns) or --data.layout NHWC (channels last)."
    )
