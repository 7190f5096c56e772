"""A file that grows in blocks and survives being killed.

It grows as `<name>.partial` and is renamed when complete, so a file under its own name is whole. Every
block's CRC-32 is written with it. Since a block is a pure function of (seed, split, number), to go on after
an interruption is to draw each block whose stored pixels do not match their stored checksum.

All space is allocated when the file is begun. Writing a block then changes pixels and one checksum, never
HDF5's own index, so a kill leaves nothing in it half done.
"""

import fcntl
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from namm.datasets.base import BLOCK, SPLITS
from namm.errors import RunFolderError
from namm.files import rename_durably

CHUNK_BYTES = 128 * 1024
"""Images are chunked on disk in pieces of about this size: small enough to read shuffled batches."""

UNWRITTEN = -1
"""In place of a block's checksum."""

Block = tuple[str, int]
"""Split and number of a block."""


def beside(path: Path, suffix: str) -> Path:
    """`path` with a second suffix."""
    return path.with_name(path.name + suffix)


def begin(partial: Path, shape: tuple[int, int, int], sizes: dict[str, int], attributes: dict[str, Any]) -> None:
    """Lay out a file without pixels, under a draft name until it is whole: no kill leaves half a layout."""
    draft = beside(partial, ".draft")
    with h5py.File(draft, "w") as file:
        for split in SPLITS:
            n = sizes[split]
            per_chunk = max(1, min(n, CHUNK_BYTES // (4 * int(np.prod(shape)))))
            chunks = (per_chunk, *shape) if n else None
            file.create_dataset(split, (n, *shape), "f4", chunks=chunks, dcpl=_allocate_now())
            file.create_dataset(f"checksums/{split}", data=np.full(-(-n // BLOCK), UNWRITTEN, np.int64))
        file.attrs.update(attributes)
    os.replace(draft, partial)


def _allocate_now() -> Any:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return plan


def write_block(file: h5py.File, block: Block, images: NDArray[np.float32]) -> None:
    """Put the pixels of a block and their checksum on their way to the disk."""
    split, k = block
    file[split][k * BLOCK : k * BLOCK + len(images)] = images
    file[f"checksums/{split}"][k] = _checksum(images)
    file.flush()


def unwritten(file: h5py.File) -> list[Block]:
    """Blocks whose pixels are not there, or do not match their checksum."""
    blocks = [(split, k) for split in SPLITS for k in range(len(file[f"checksums/{split}"]))]
    return [block for block in blocks if not _intact(file, block)]


def _intact(file: h5py.File, block: Block) -> bool:
    split, k = block
    stored = int(file[f"checksums/{split}"][k])
    return stored != UNWRITTEN and stored == _checksum(file[split][k * BLOCK : (k + 1) * BLOCK])


def _checksum(images: NDArray[np.float32]) -> int:
    return zlib.crc32(images.tobytes())


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
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A writer that ended just now may have removed the file that was opened here: that lock binds nobody.
        if not (lock.exists() and os.path.samestat(os.fstat(handle.fileno()), lock.stat())):
            raise BlockingIOError
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
