"""HDF5 files that grow in blocks and survive being killed, and the one of a dataset: `train`, `val` and `test`.

A file holds named arrays, each in blocks of rows, and as attributes what they were made from. It grows as
`<name>.partial` and is renamed when complete, by the protocol of `namm.files`. Every block's CRC-32 is written with it
(`namm.datasets.checksums`), and compared by all who read it.
Since a block is a pure function of the attributes and its number, to go on after an interruption is to make each block
again whose stored values do not match their stored checksum.

All space is claimed when the file is begun: a disk that is too small is known at once. Writing a block then changes
values and one checksum, never HDF5's own index, so a kill leaves nothing in it half done.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from namm._version import __version__
from namm.datasets.base import BLOCK, SPLITS, Dataset
from namm.datasets.checksums import (
    CHECKSUMS,
    UNWRITTEN,
    checksum,
    damaged_blocks,
    has_mark,
    require_header,
    require_rows,
    rows_per_block,
    seal_header,
)
from namm.datasets.readers import LazyImages
from namm.digests import SIGNATURE
from namm.errors import DataError, RunFolderError, UsageError
from namm.files import beside, only_writer, publish, refuse_link, require_same, reserve
from namm.hdf5 import attributes, open_hdf5
from namm.progress import ProgressBar
from namm.reading import REASON, damage_as, in_words, require_room

CHUNK_BYTES = 128 * 1024
"""Rows are chunked on disk in pieces of about this size: small enough to read shuffled batches."""

ROOM = 64 * 1024
"""What a file takes besides its arrays, at least."""

Block = tuple[str, int]
"""Array and number of a block."""

Header = Mapping[str, Any]
"""Attributes: what the values were made from. They must have `namm_version`; mappings among them are kept as JSON."""

# Any arrays


def grow(
    path: Path,
    arrays: Mapping[str, tuple[int, ...]],
    header: Header,
    fill: Callable[[h5py.File, list[Block]], None],
    *,
    rows: int = BLOCK,
    dtypes: Mapping[str, str] | None = None,
    begin: Callable[[h5py.File], object] = lambda file: None,
) -> None:
    """Complete the file `path` of these arrays and attributes, or go on where an interrupted call stopped.

    A complete file with the same attributes is left alone, one with others is refused.

    Args:
        path: The file.
        arrays: Shapes by name.
        header: Attributes.
        fill: Is given the open file and the blocks that are still to be written.
        rows: Rows of a block.
        dtypes: Of those arrays that are not float32.
        begin: Writes what the file holds from the start, besides arrays and header.
    """
    with only_writer(path):
        if path.exists():
            _require_complete(path, header)
            return
        partial = beside(path, ".partial")
        refuse_link(partial)
        if (blocks := _missing(partial, header)) is None:
            needed = _bytes_needed(arrays)
            _require_disk(path, needed)
            draft = beside(partial, ".draft")  # until its layout is whole: no kill leaves half of one
            draft.unlink(missing_ok=True)  # a link, too, which h5py would write through
            reserve(draft, needed)
            with h5py.File(draft, "w", track_order=True) as file:
                begin(file)
                _lay_out(file, arrays, header, rows, dtypes or {})
                seal_header(file)
            reserve(draft, draft.stat().st_size)
            os.replace(draft, partial)
        with h5py.File(partial, "r+") as file:
            fill(file, unwritten(file) if blocks is None else blocks)
        publish(partial, path)


def _require_disk(path: Path, needed: int) -> None:
    """Refuse arrays that the disk does not hold before hours are spent on laying them out."""
    if needed > (free := shutil.disk_usage(path.parent).free):
        raise RunFolderError(
            f"{path} will take {in_words(needed)}, and its disk has {in_words(free)} left: ask for fewer or smaller "
            "images, or write elsewhere."
        )


def write_block(file: h5py.File, block: Block, values: NDArray[Any]) -> None:
    """Put the values of a block and their checksum on their way to the disk."""
    name, k = block
    start = k * rows_per_block(file, name)
    file[name][start : start + len(values)] = values
    file[f"{CHECKSUMS}/{name}"][k] = checksum(values)
    file.flush()


def unwritten(file: h5py.File) -> list[Block]:
    """Blocks whose values are not there, or do not match their checksum."""
    names: list[str] = []
    with damage_as(DataError, f"the blocks of {file.filename} cannot be checked ({REASON}): it is damaged."):
        file[CHECKSUMS].visititems(lambda name, item: None if isinstance(item, h5py.Group) else names.append(name))
        return [(name, k) for name in names for k in damaged_blocks(file, name)]


def made_from(file: h5py.File) -> dict[str, Any]:
    """The attributes of an open file, without their digest."""
    return {name: value for name, value in attributes(file).items() if name != SIGNATURE}


def _bytes_needed(arrays: Mapping[str, tuple[int, ...]]) -> int:
    """About as much as a file of these arrays takes, with HDF5's own index and some more."""
    values = sum(math.prod(shape) for shape in arrays.values())
    return round(4.1 * values) + ROOM


def _require_complete(path: Path, header: Header) -> None:
    try:
        file = open_hdf5(path)
    except DataError as error:
        raise RunFolderError(f"{path} exists and is not a readable HDF5 file: move it away. {error}") from error
    with file:
        require_header(file)
        _require_same(file, header)


def _require_same(file: h5py.File, header: Header) -> None:
    """Refuse a file that was made from something else."""
    there = made_from(file)
    for name, value in header.items():
        if isinstance(value, Mapping) and isinstance(there.get(name), str):
            with suppress(ValueError, RecursionError):  # what is not JSON is not the same
                there[name] = json.loads(there[name])
    # Another version's complete file is as good as ours: what it was made from is in the other attributes.
    asked = {**header, "namm_version": there.get("namm_version", "absent")}
    require_same(Path(file.filename), there, asked, "other data than asked for")


def _missing(partial: Path, header: Header) -> list[Block] | None:
    """Blocks that are left to write; None where there is no usable file, so that it is begun anew."""
    try:
        with open_hdf5(partial) as file:
            _require_same(file, header)
            blocks = unwritten(file)
            return blocks if file.attrs["namm_version"] == header["namm_version"] else None
    except DataError:
        return None


def _lay_out(
    file: h5py.File, arrays: Mapping[str, tuple[int, ...]], header: Header, rows: int, dtypes: Mapping[str, str]
) -> None:
    """Allocate arrays without values, and write the header."""
    allocate = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    allocate.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    allocate.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    for name, (n, *shape) in arrays.items():
        per_chunk = max(1, min(n, CHUNK_BYTES // (4 * int(np.prod(shape)))))
        chunks = (per_chunk, *shape) if n else None
        file.create_dataset(name, (n, *shape), dtypes.get(name, "f4"), chunks=chunks, dcpl=allocate.copy())
        checksums = file.create_dataset(f"{CHECKSUMS}/{name}", data=np.full(-(-n // rows), UNWRITTEN, np.int64))
        if rows != BLOCK:
            checksums.attrs["rows"] = rows
    for name, value in header.items():
        file.attrs[name] = json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


class GrownFile:
    """A complete file, open for reading; close it, or use it in a `with`."""

    def __init__(self, path: str | Path, mark: str, otherwise: str) -> None:
        """Open `path`; one without the attribute `mark` is refused with what it is `otherwise`."""
        self.path = Path(path)
        self._file = open_hdf5(self.path)
        try:
            if not has_mark(self._file, mark):
                raise DataError(f"{self.path} was not written by {otherwise}")
            require_header(self._file)
            self.parameters = made_from(self._file)
            """What the values were made from."""
        except BaseException:
            self._file.close()
            raise

    def array(self, name: str) -> h5py.Dataset:
        """An array of at least one axis, by its name."""
        with damage_as(DataError, f"{self.path} has no array {name!r} that can be read ({REASON}): write it anew."):
            found = self._file[name]
            if not isinstance(found, h5py.Dataset) or not found.shape:
                raise TypeError(f"it is {found!r}")
        return found

    def numbers(self, name: str) -> np.ndarray:
        """An array of one real number for each image, (N,)."""
        found = self.array(name)
        with damage_as(DataError, f"{self.path}, {name} cannot be read ({REASON}): write the file anew."):
            if found.ndim != 1 or found.dtype.kind != "f":
                raise TypeError(f"it has shape {found.shape} and type {found.dtype}")
            require_room(f"{self.path}, {name}", found.id.get_storage_size(), found.size * found.dtype.itemsize)
            values: np.ndarray = require_rows(found)[:]
        return values

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The splits of a dataset


def write_store(
    path: str | Path,
    dataset: Dataset,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    quiet: bool = False,
) -> Path:
    """Write a dataset's splits to `path`, or go on where an interrupted call stopped.

    `sizes` gives the images per split, by default the paper's; a split it does not name is left empty. A
    complete file of the same recipe is left alone, one of another recipe is refused. A progress bar is shown where
    there is a terminal, unless `quiet`.
    """
    sizes = dataset.sizes if sizes is None else sizes
    if set(sizes) - set(SPLITS) or min(sizes.values(), default=0) < 0 or not sum(sizes.values()):
        raise UsageError(
            f"Sizes must give images to some of the splits {', '.join(SPLITS)}, and {dict(sizes)} was given."
        )
    counts = {split: sizes.get(split, 0) for split in SPLITS}
    recipe = {name: "none" if value is None else value for name, value in dataset.parameters().items()}
    given = {"seed": seed, "block": BLOCK, **{f"n_{split}": n for split, n in counts.items()}}
    header = {"dataset": dataset.name, **recipe, **given, "namm_version": __version__}

    def draw(file: h5py.File, blocks: list[Block]) -> None:
        lengths = {(split, k): min(BLOCK, counts[split] - k * BLOCK) for split, k in blocks}
        total = sum(counts.values())
        start = total - sum(lengths.values())
        with ProgressBar(f"{dataset.name} images", total, start=start, visible=not quiet) as bar:
            for split in SPLITS:
                numbers = [k for name, k in blocks if name == split]
                for k, images in zip(numbers, dataset.blocks(seed, split, numbers), strict=True):
                    n = lengths[split, k]
                    write_block(file, (split, k), images[:n].numpy())
                    bar.advance(n)

    grow(Path(path), {split: (n, *dataset.shape) for split, n in counts.items()}, header, draw)
    return Path(path)


def load(path: str | Path, split: str) -> Tensor:
    """All images of a split: float32, (N, C, H, W)."""
    with open_store(path) as store:
        return store[split][:]


class Store(GrownFile):
    """An open file that `write_store` completed; close it, or use it in a `with`.

    `store["train"]` is indexed like a tensor (N, C, H, W) and read on demand. `parameters` is the recipe:
    dataset, its parameters, seed, images per split, version.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "namm_version", "namm: read it with read_images and say its layout.")

    @property
    def sizes(self) -> dict[str, int]:
        """Images per split."""
        return {split: self.array(split).shape[0] for split in SPLITS}

    def __getitem__(self, split: str) -> LazyImages:
        if not self.sizes.get(split):
            raise DataError(f"{self.path} holds no {split!r} images: it has {self.sizes}.")
        return LazyImages(self.array(split), "NCHW", self.path)

    def damaged(self) -> list[Block]:
        """(split, number) of every block of 64 images whose pixels no longer match their checksum."""
        return unwritten(self._file)


open_store = Store
