"""Files that somebody else wrote: what they cost is known before it is spent, and what they break becomes a sentence.

Every reader of the package keeps four rules:

1. Only a regular file is opened. A pipe, a device or a folder in its place would block, or never end.
2. What is parsed whole has a largest size; what is packed has a largest size unpacked, compared before unpacking.
3. Libraries raise on damaged input whatever they like. One context, `damage_as`, makes one sentence of all of it.
4. Nothing is unpickled and nothing is run.
"""

import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from namm.errors import DataError, MemoryShortage, NammError

REASON = "\0reason\0"
"""Stands in a sentence for what a library raised; no path holds it."""
LARGEST_RECORD = 16 * 2**20
"""Bytes of a file that is parsed whole: a record, a configuration, an index."""
ROOM, RATIO = 256 * 2**20, 256
"""Whatever is packed may unpack to so many bytes, or to so many times its own size if that is more."""
LONGEST_REASON = 300
SETTLED = 10**9
"""Nanoseconds from a file's last change after which its date tells it from the next."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def damage_as(kind: type[NammError], sentence: str) -> Iterator[None]:
    """Raise whatever a library raises in this context as `kind`, with `sentence`, in which `REASON` is its message.

    For the reading of one file and nothing else: in this context every error is taken for the file's.
    """
    try:
        yield
    except NammError:
        raise
    except Exception as error:
        raise kind(sentence.replace(REASON, reason(error))) from error


def reason(error: Exception) -> str:
    """What an error says, in one line of bounded length."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    message = " ".join(str(error)[: 4 * LONGEST_REASON].split())
    if not message or isinstance(error, KeyError):
        message = f"{type(error).__name__} {message}".strip()
    return message if len(message) <= LONGEST_REASON else f"{message[:LONGEST_REASON]} …"


# Opening


def require_plain(path: Path) -> int:
    """The size of a regular file, or of the one that a link leads to; an `OSError` for anything else, unopened."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file")
    return found.st_size


Stamp = tuple[int, ...]


def stamp(file: Path | int) -> Stamp:
    """What changes when a file does, by its path or its descriptor: device, inode, size and times of change."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(found: Stamp) -> bool:
    """Whether a file's next state will have another stamp: clocks of disks are coarse, and may have been set back."""
    return abs(time.time_ns() - max(found[-2:])) > SETTLED


def read_bytes(path: Path, most: int = LARGEST_RECORD) -> bytes:
    """The content of a regular file of at most `most` bytes; an `OSError` says what is wrong with any other."""
    size = require_plain(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # should a pipe take its place just now
    with os.fdopen(descriptor, "rb") as file:
        content = b"" if size > most else file.read(size + 1)  # and no more at once: the buffer is allocated before
    if max(size, len(content)) > most:
        raise OSError(f"it has {in_words(max(size, len(content)))}, and at most {in_words(most)} are read")
    return content


def read_text(path: Path, most: int = LARGEST_RECORD) -> str:
    """The same as text in UTF-8."""
    return read_bytes(path, most).decode()


def load_json(path: Path, most: int = LARGEST_RECORD) -> Any:
    """The value in a JSON file; to be called in `damage_as`."""
    return json.loads(read_text(path, most))


V = TypeVar("V")


def typed(kind: type[V], values: Any) -> V:
    """A dataclass from the mapping of its fields in a file; a value of another type is a `TypeError` that names it."""
    if not isinstance(values, Mapping):
        raise TypeError(f"it holds {type(values).__name__}, not a mapping")
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not _is_of(value, hints.get(name, object)):
            raise TypeError(f"{name} is {str(value)[:80]!r}, a {type(value).__name__}")
    return kind(**values)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value of a file is of an annotated type, of which only the outermost counts; integers are floats."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return hint is Any or isinstance(value, origin or hint)


# Unpacking


def require_room(place: object, packed: int, unpacked: int) -> None:
    """Refuse what would unpack from `packed` to `unpacked` bytes, where data do not, or where memory ends."""
    require_credible(place, packed, unpacked)
    if unpacked <= ROOM:
        return
    import psutil

    if unpacked > (free := psutil.virtual_memory().available):
        raise MemoryShortage(
            f"{place} takes {in_words(unpacked)} in memory, where {in_words(free)} are free: read a part of it "
            "(`open_images` of an HDF5 or NPY file), or free what other programs hold."
        )


def require_credible(place: object, packed: int, unpacked: int) -> None:
    """Refuse what would unpack from `packed` to `unpacked` bytes, where data do not, in whatever pieces it is read."""
    if unpacked > max(ROOM, RATIO * packed):
        raise DataError(
            f"{place} takes {in_words(packed)} and would unpack to {in_words(unpacked)}: a file that grows more than "
            f"{RATIO}-fold is taken for damaged, or for a trap. If you trust it, unpack it and save it without "
            "compression."
        )


def in_words(size: int) -> str:
    """A number of bytes for people."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} bytes"
