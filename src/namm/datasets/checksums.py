"""Checksums in our HDF5 files: which rows, and which headers, are still as they were written.

Every array grows in blocks of rows, and `checksums/<array>` holds the CRC-32 of each. Whoever reads rows through
`require_rows` has their blocks compared first, each once in a process. All the rest (attributes, shapes and types, and
arrays without checksums) has one digest together, the attribute `sha256`; files of version 0.1 are read without it.
"""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from namm.datasets.base import BLOCK
from namm.digests import SIGNATURE
from namm.errors import DataError
from namm.hdf5 import open_hdf5
from namm.reading import REASON, Stamp, damage_as, is_settled, require_room, stamp

CHECKSUMS = "checksums"
"""Group of the checksums, which are called as the arrays that they are of."""
UNWRITTEN = -1
"""In place of a block's checksum."""
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, TypeError, IndexError)
"""What h5py raises on a damaged file."""

_seen: dict[tuple[Stamp, str], tuple[NDArray[np.int64], int, NDArray[np.bool_]]] = {}
"""Checksums of an array, rows that each is of, and which of these blocks this process has compared."""


def checksum(values: NDArray[Any]) -> int:
    """CRC-32 of values."""
    return zlib.crc32(np.ascontiguousarray(values).data)


def rows_per_block(file: h5py.File, name: str) -> int:
    """Rows that one checksum of this array is of."""
    return int(file[f"{CHECKSUMS}/{name}"].attrs.get("rows", BLOCK))


def damaged_blocks(file: h5py.File, name: str) -> list[int]:
    """Blocks of an array whose values are not there, or do not match their checksum."""
    array = file[name]
    stored, rows = _checksums_of(array)
    return [
        k for k, each in enumerate(stored) if each == UNWRITTEN or each != checksum(array[k * rows : (k + 1) * rows])
    ]


def _checksums_of(array: h5py.Dataset) -> tuple[NDArray[np.int64], int]:
    """The checksums of an array, and how many rows each is of; refused where they cannot be its own."""
    file, name = array.file, array.name.lstrip("/")
    kept, rows = file[f"{CHECKSUMS}/{name}"], rows_per_block(file, name)
    if not isinstance(kept, h5py.Dataset):
        raise ValueError(f"its checksums are a {type(kept).__name__.lower()}, not an array")
    if not 1 <= rows <= BLOCK or kept.shape != (-(-len(array) // rows),):
        raise ValueError(f"its {kept.shape} checksums, each of {rows} rows, are not those of {array.shape}")
    _require_room(kept, len(kept))
    _require_room(array, min(rows, len(array)))
    return kept[:], rows


def _require_room(array: h5py.Dataset, rows: int) -> None:
    """Refuse to read so many rows of an array where its file, or memory, does not hold them."""
    packed = array.id.get_storage_size() * rows // max(1, len(array))
    require_room(f"{array.file.filename}, {array.name}", packed, array.nbytes * rows // max(1, len(array)))


def require_rows(array: h5py.Dataset, rows: NDArray[np.int64] | None = None) -> h5py.Dataset:
    """The array itself, whose rows (all of them by default) are as they were written; a `DataError` where not.

    An array without checksums, such as one in a file of somebody else's, is returned as it is.
    """
    file, name = array.file, array.name.lstrip("/")
    if rows is None:
        _require_room(array, len(array))
    if "namm_version" not in file.attrs or f"{CHECKSUMS}/{name}" not in file:
        return array
    try:
        key = stamp(file.id.get_vfd_handle()), name
        stored, length, good = _seen.get(key) or (*(kept := _checksums_of(array)), np.zeros(len(kept[0]), bool))
        if is_settled(key[0]):
            _seen[key] = stored, length, good
        wanted = range(len(stored)) if rows is None else np.unique(rows // length)
        for k in (k for k in wanted if not good[k]):
            good[k] = stored[k] == checksum(array[k * length : (k + 1) * length])
            if not good[k]:
                last = min((k + 1) * length, len(array)) - 1
                raise DataError(_damaged(file, f"rows {k * length} to {last} of {name!r} do not match their checksum"))
    except UNREADABLE as error:
        raise DataError(_damaged(file, f"{name!r} cannot be read: {error}")) from error
    return array


def all_checksums(path: Path) -> str:
    """All digests that a file brings, which tell its content from that of others."""
    with open_hdf5(path) as file, damage_as(DataError, f"{path} is damaged ({REASON}): copy it anew."):
        found = {"header": str(file.attrs.get(SIGNATURE))}
        kept = file.get(CHECKSUMS, {})

        def note(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset):
                _require_room(item, len(item))
                found[name] = str(checksum(item[:]))

        if isinstance(kept, h5py.Group):
            kept.visititems(note)
        return json.dumps(found, sort_keys=True)


def has_mark(file: h5py.File, mark: str) -> bool:
    """Whether a file has an attribute, which tells what kind of file it is; refused where that cannot be read."""
    try:
        return mark in file.attrs
    except UNREADABLE as error:
        raise DataError(_damaged(file, f"it cannot be read: {error}")) from error


def seal_header(file: h5py.File) -> None:
    """Write the digest of everything that has no checksums and does not change any more."""
    file.attrs[SIGNATURE] = _header_digest(file)


def require_header(file: h5py.File) -> None:
    """Refuse a file of ours whose header is not as it was sealed."""
    try:
        sealed = file.attrs.get(SIGNATURE)
        is_whole = sealed is None or sealed == _header_digest(file)
    except UNREADABLE as error:
        raise DataError(_damaged(file, f"it cannot be read: {error}")) from error
    if not is_whole:
        raise DataError(_damaged(file, "its attributes, shapes or types do not match their digest"))


def _damaged(file: h5py.File, how: str) -> str:
    return f"{file.filename} is damaged ({how}): copy it anew, or delete it and give the command that wrote it again."


def _header_digest(file: h5py.File) -> str:
    found: dict[str, Any] = {}

    def note(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if name.split("/", maxsplit=1)[0] == CHECKSUMS:
            return
        about = [[key, str(value)] for key, value in sorted(item.attrs.items()) if key != SIGNATURE]
        if isinstance(item, h5py.Dataset):
            about += [["shape", str(item.shape)], ["type", item.dtype.str]]
            if f"{CHECKSUMS}/{name}" not in file:
                require_room(f"{file.filename}, {name}", item.id.get_storage_size(), item.nbytes)
                about += [["content", str(checksum(item[()]))]]
        found[name] = about

    note("", file)
    file.visititems(note)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
