"""Artefacts that survive being killed: the one protocol behind runs, stages, trainings and files of images or samples.

Whatever takes long to make is a folder or a file, brought to its end by any number of calls, in four steps:

1. **Claim.** `owned` (a folder) or `only_writer` (a file) holds a lock, and a second process is refused with the name
   of the one at work. The lock is the system's: it ends with the process, however that ends.
2. **Compare.** What was asked for is written down with the artefact: in a record (`Claim`) or in a file's attributes.
   Other settings are refused by `require_same` with a sentence that lists the differences; nothing is overwritten.
3. **Resume.** Unfinished work lies under a name of its own (`*.partial`, a checkpoint, a stage whose record says
   `running`), each piece of it written whole or known by its checksum. The same call makes the pieces that are missing.
4. **Publish.** What is complete gets its name by one rename (`publish`), after its bytes, and before its folder's
   entry, have reached the disk.

So a kill loses at most the piece that was being made: before a rename the old state stands, after it the new one, and
no name ever stands for a part. Nothing is written through a link, which may lead to a file of the user's.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from namm.errors import FolderInUseError, RunFolderError
from namm.reading import REASON, damage_as, load_json, read_text

UMASK = os.umask(0o077)  # there is no way to read it but to set it, for all threads
os.umask(UMASK)

LOCK = ".lock"
PARTIALS = ".*.partial"
"""Names of what is being written and has no use for anybody else."""

# Writing


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


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Write `value` as readable JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)


def remove_partials(folder: Path) -> None:
    """Remove what a killed process had begun to write here with `write_atomically`. For the folder's one writer."""
    for leftover in folder.glob(PARTIALS):
        if leftover.is_file():
            leftover.unlink()


def sweep(folder: Path) -> None:
    """Remove what killed processes had begun to write here or in any folder below. For the one writer of them all.

    What work goes on from is no leftover and has no hidden name: `images.h5.partial`.
    """
    for leftover in sorted(folder.rglob(PARTIALS)):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)  # it may have been in a folder that is gone


def settle(files: Iterable[Path]) -> None:
    """Bring files that somebody else's code wrote to the disk, with the modes that ours have.

    Libraries make files that nobody but the user may read, and leave it to the system when to write them.
    """
    folders = set()
    for path in files:
        if not path.is_symlink():  # what it leads to is not ours
            path.chmod(0o666 & ~UMASK)
        _flush(path)
        folders.add(path.parent)
    for folder in folders:
        _flush(folder)


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(path: Path, size: int) -> None:
    """Claim room on the disk for a file of ours, made if it is not there; an `OSError` where there is not enough.

    For libraries that cannot bear a full disk: HDF5 may end the process. A file system that claims nothing is let be.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            path.unlink()
            raise
    finally:
        os.close(descriptor)


def publish(partial: Path, path: Path) -> None:
    """Give a complete file, or folder of files, its name, once its bytes are on the disk."""
    if partial.is_dir():
        settle(path for path in partial.rglob("*") if path.is_file())
    else:
        _flush(partial)
    rename_durably(partial, path)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder, and wait until the entry in its folder is on disk too."""
    source.replace(target)
    _flush(target.parent)


def beside(path: Path, suffix: str) -> Path:
    """`path` with a second suffix."""
    return path.with_name(path.name + suffix)


def refuse_link(path: Path) -> None:
    """Refuse a link where a file is about to be written: it may lead out of the folder, to a file of the user's."""
    if path.is_symlink():
        raise RunFolderError(f"{path} is a link, and nothing is written through it: remove it.")


# Claiming


@contextmanager
def locked(lock: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file for `what`; where another process holds it, wait for that one or refuse, naming it.

    A link is not followed. Without `flock` in the file system there is no lock, rather than one that outlives us.
    """
    from filelock import FileLock, Timeout  # a tenth of a second, which `namm --help` need not wait for

    try:
        held = FileLock(lock, -1 if wait else 0, fallback_to_soft=False, on_acquired=_sign).acquire()
    except Timeout:
        holder = "another process"
        with suppress(OSError, ValueError):  # it ended just now, and removed the file
            holder = read_text(lock).strip() or holder
        raise FolderInUseError(f"{what} is in use by {holder}: wait for it, or choose another one.") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(lock)
        raise
    with held:
        yield


def _sign(descriptor: int) -> None:
    """Write the holder's name into the lock file that it holds."""
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()}".encode())


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; a second process that asks for it meanwhile is refused."""
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / LOCK, f"the folder {folder}"))
        except OSError as error:
            raise RunFolderError(
                f"the folder {folder} cannot be written ({error.strerror}): choose another one."
            ) from error
        yield


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Be the one process that writes the file `path`; what the system refuses meanwhile is raised as a sentence."""
    lock = beside(path, LOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock, str(path)):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)  # while it is held: whoever opened it before us sees that it is gone
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error}): free space, or write elsewhere.") from error


@dataclass(frozen=True)
class Claim:
    """Whose a folder is: the JSON file `record` in it says so, and only the same settings may go on there."""

    folder: Path
    record: str
    kind: str
    """What it holds: "namm training"."""
    settings: Mapping[str, Any]
    """What tells it from others of its kind."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else the record says, which is not compared."""
    elsewhere: str = "another folder"
    """What to choose instead of a folder that is refused."""
    leftovers: tuple[str, ...] = ()
    """How names begin that may lie in a folder before it has a record."""

    def check(self) -> None:
        """Refuse a folder of other settings or of something else; changes nothing."""
        folder, name = self.folder, self.kind.removeprefix("namm ")
        if not folder.exists():
            return
        if not folder.is_dir():
            raise RunFolderError(f"{folder} is a file, and a {name} needs a folder: choose {self.elsewhere}.")
        if (folder / self.record).exists():
            there = read_claim(folder / self.record, self.kind, self.elsewhere)
            compared = {key: value for key, value in there.items() if key != "kind" and key not in self.about}
            require_same(folder, compared, as_json(self.settings), f"a {name} with other settings", self.elsewhere)
            return
        ours = (LOCK, f".{self.record}.", *self.leftovers)
        if foreign := sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(ours)):
            raise RunFolderError(
                f"{folder} is not empty and not a {name} of namm (it holds {', '.join(foreign[:3])}): choose "
                f"{self.elsewhere}."
            )

    def take(self) -> None:
        """Check the folder, which `owned` must hold, and write its record where there is none."""
        self.check()
        remove_partials(self.folder)
        if not (self.folder / self.record).exists():
            write_json(self.folder / self.record, {"kind": self.kind, **as_json(self.settings), **self.about})


# Comparing


def require_same(
    path: Path, there: Mapping[str, Any], asked: Mapping[str, Any], what: str, elsewhere: str = "another path"
) -> None:
    """Refuse `path`, which holds `what`, where it was made with other settings than those asked for."""
    if found := differences(there, asked):
        more = f"; and {len(found) - 6} more" if len(found) > 6 else ""
        raise RunFolderError(
            f"{path} holds {what} ({'; '.join(found[:6])}{more}) and is not overwritten: choose {elsewhere}, or remove "
            "what is there first."
        )


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


def as_json(value: Any) -> Any:
    """`value` as it comes back from a JSON file, to be compared with what did."""
    return json.loads(json.dumps(value, default=str))


def read_json(path: Path) -> Any:
    """The content of a JSON file of an artefact."""
    with damage_as(RunFolderError, f"{path} cannot be read ({REASON}): move it away, or choose another folder."):
        return load_json(path)


def read_claim(path: Path, kind: str, elsewhere: str = "another folder") -> dict[str, Any]:
    """What the record of a claimed folder says; refused where it is of another kind."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise RunFolderError(f"{path} was not written by a {kind.removeprefix('namm ')} of namm: choose {elsewhere}.")
    return found
