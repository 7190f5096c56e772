"""A file that grows in blocks and survives being killed.

It holds named arrays, each in blocks of 64 rows. It grows as `<name>.partial` and is renamed when complete, so a
file under its own name is whole. Every block's CRC-32 is written with it. Since a block is a pure function of the
file's attributes and its number, to go on after an interruption is to make each block again whose stored values do not
match their stored checksum.

All space is allocated when the file is begun. Writing a block then changes values and one checksum, never
HDF5's own index, so a kill leaves nothing in it half done.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from namm.datasets.base import BLOCK
from namm.errors import RunFolderError
from namm.files import differences, refuse_link, rename_durably, take_lock

CHUNK_BYTES = 128 * 1024
"""Rows are chunked on disk in pieces of about this size: small enough to read shuffled batches."""

UNWRITTEN = -1
"""In place of a block's checksum."""

Block = tuple[str, int]
"""Array and number of a block."""

Header = Mapping[str, bool | int | float | str]
"""Attributes: what the values were made from. They must have `namm_version`."""


def beside(path: Path, suffix: str) -> Path:
    """`path` with a second suffix."""
    return path.with_name(path.name + suffix)


def grow(
    path: Path,
    arrays: Mapping[str, tuple[int, ...]],
    header: Header,
    fill: Callable[[h5py.File, list[Block]], None],
) -> None:
    """Complete the file `path` of these arrays and attributes, or go on where an interrupted call stopped.

    `fill` is given the open file and the blocks that are still to be written. A complete file with the same attributes
    is left alone, one with others is refused.
    """
    with only_writer(path):
        if path.exists():
            _require_same(path, read_header(path), header)
            return
        growing = beside(path, ".partial")
        refuse_link(growing)
        blocks = _left_over(growing, header)
        if blocks is None:
            begin(growing, arrays, header)
            blocks = _left_over(growing, header) or []
        with h5py.File(growing, "r+") as file:
            fill(file, blocks)
        publish(growing, path)


def attributes(file: h5py.File) -> Header:
    """The attributes of an open file as Python values."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in file.attrs.items()}


def read_header(path: Path) -> Header:
    """The attributes of a file."""
    try:
        with h5py.File(path, "r") as file:
            return attributes(file)
    except OSError as error:
        raise RunFolderError(f"{path} exists and is not a readable HDF5 file ({error}): move it away.") from error


def _require_same(path: Path, there: Header, asked: Header) -> None:
    # Another version's complete file is as good as ours: what it was made from is in the other attributes.
    if found := differences(there, {**asked, "namm_version": there.get("namm_version", "absent")}):
        raise RunFolderError(
            f"{path} holds other data than asked for ({'; '.join(found)}) and is not overwritten: write to "
            "another path, or remove that file first."
        )


def _left_over(growing: Path, header: Header) -> list[Block] | None:
    """What is left to write; None where there is no usable file, so that it is begun anew."""
    try:
        with h5py.File(growing, "r") as file:
            there = attributes(file)
            _require_same(growing, there, header)
            blocks = unwritten(file)
    except (OSError, KeyError, RuntimeError):
        return None
    return blocks if there["namm_version"] == header["namm_version"] else None


def begin(partial: Path, arrays: Mapping[str, tuple[int, ...]], header: Header) -> None:
    """Lay out float32 arrays without values, under a draft name until all are: no kill leaves half a layout."""
    draft = beside(partial, ".draft")
    draft.unlink(missing_ok=True)  # a link, too, which h5py would write through
    with h5py.File(draft, "w", track_order=True) as file:
        for name, (n, *shape) in arrays.items():
            per_chunk = max(1, min(n, CHUNK_BYTES // (4 * int(np.prod(shape)))))
            chunks = (per_chunk, *shape) if n else None
            file.create_dataset(name, (n, *shape), "f4", chunks=chunks, dcpl=_allocate_now())
            file.create_dataset(f"checksums/{name}", data=np.full(-(-n // BLOCK), UNWRITTEN, np.int64))
        file.attrs.update(header)
    os.replace(draft, partial)


def _allocate_now() -> Any:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return plan


def write_block(file: h5py.File, block: Block, rows: NDArray[np.float32]) -> None:
    """Put the values of a block and their checksum on their way to the disk."""
    name, k = block
    file[name][k * BLOCK : k * BLOCK + len(rows)] = rows
    file[f"checksums/{name}"][k] = _checksum(rows)
    file.flush()


def unwritten(file: h5py.File) -> list[Block]:
    """Blocks whose values are not there, or do not match their checksum."""
    blocks = [(name, k) for name in file if name != "checksums" for k in range(len(file[f"checksums/{name}"]))]
    return [block for block in blocks if not _intact(file, block)]


def _intact(file: h5py.File, block: Block) -> bool:
    name, k = block
    stored = int(file[f"checksums/{name}"][k])
    return stored != UNWRITTEN and stored == _checksum(file[name][k * BLOCK : (k + 1) * BLOCK])


def _checksum(rows: NDArray[np.float32]) -> int:
    return zlib.crc32(np.ascontiguousarray(rows).data)


def publish(partial: Path, path: Path) -> None:
    """Give a complete file its name, once its bytes are on the disk."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    rename_durably(partial, path)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Be the one process that writes `path`; what the system refuses is raised as a sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(beside(path, ".lock")):
            yield
    except BlockingIOError as error:
        raise RunFolderError(f"{path} is being written by another process: wait until it is done.") from error
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error}): free space, or write elsewhere.") from error


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock file, which the system lets go of if the process dies, and remove it after."""
    with take_lock(lock) as handle:
        # A writer that ended just now may have removed the file that was opened here: that lock binds nobody.
        if not (lock.exists() and os.path.samestat(os.fstat(handle.fileno()), lock.stat())):
            raise BlockingIOError
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
