"""Files and folders that can be trusted: written whole or not at all, owned by one process at a time."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from namm.errors import FolderInUseError, RunFolderError


def write_atomically(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Write `content` to `path` so that no reader and no crash ever sees a part of it.

    Nothing is written through a link: one called `path` is replaced. `mode` is that of a new file, before the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(temporary, path)


def remove_partials(folder: Path) -> None:
    """Remove what a killed process had begun to write here with `write_atomically`. For the folder's one writer."""
    for leftover in folder.glob(".*.partial"):
        if leftover.is_file():
            leftover.unlink()


def rename_durably(source: Path, target: Path) -> None:
    """Rename and wait until the folder's entry is on disk too."""
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Write `value` as readable JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)


def refuse_link(path: Path) -> None:
    """Refuse a link where a file is about to be written: it may lead out of the folder, to a file of the user's."""
    if path.is_symlink():
        raise RunFolderError(f"{path} is a link, and nothing is written through it: remove it.")


def open_lock(path: Path) -> TextIO:
    """Open a lock file to read and write, and create it where it is missing; its content stays. A link is refused."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+")
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def take_lock(path: Path) -> TextIO:
    """Hold a lock file until it is closed; a BlockingIOError says who else holds it."""
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = lock.read().strip() or "another process"
        lock.close()
        raise BlockingIOError(errno.EAGAIN, owner) from None
    except BaseException:
        lock.close()
        raise
    return lock


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; a second process that asks for it meanwhile is refused.

    The lock belongs to the open file, so it ends with the process however that ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder / ".lock")
    except BlockingIOError as error:
        raise FolderInUseError(
            f"the folder {folder} is in use by {error.strerror}: wait for it, or choose another one."
        ) from None
    except OSError as error:
        raise RunFolderError(
            f"the folder {folder} cannot be written ({error.strerror}): choose another one."
        ) from error
    with lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        yield


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where two nested mappings differ, as `map.filters: 64 -> 32`."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key, "absent"), new.get(key, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a} -> {b}")
    return found
