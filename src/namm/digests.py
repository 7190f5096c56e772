"""Digests: how a file that was damaged after it was written is told from a whole one.

Every file that a run or an export leaves can be checked by whoever reads it:

images and samples (HDF5)     a CRC-32 for every block of rows, one for the rest: `namm.datasets.checksums`
checkpoints, models, counters a SHA-256 in the file's own header: `namm.weights_file`
folders of a network          `digests.json`, the SHA-256 of every file in it: `seal`, `require_sealed`
JSON records                  a SHA-256 among their own entries: `signed`, `require_signed`
other small files of a stage  in its `stage.json`: `digests_of`, `require_unchanged`

What older versions wrote has no digests and is read without. A file is hashed once in a process: its digest is
remembered by inode, size and time of change. Imports no torch.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from namm.errors import CheckpointError, NammError
from namm.files import settle, write_json
from namm.reading import REASON, Stamp, damage_as, is_settled, load_json, stamp

DIGESTS = "digests.json"
"""File of a sealed folder: the SHA-256 of every other file in it, by name."""
SIGNATURE = "sha256"
"""Entry of a signed JSON object: the SHA-256 of all its other entries."""

LONGEST = 200
"""Bytes of a file's name within its folder; systems allow a few more."""

_known: dict[Stamp, str] = {}


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, read piece by piece."""
    key = stamp(path)
    if key in _known:
        return _known[key]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if is_settled(key):
        _known[key] = found
    return found


# Files of a folder


def digests_of(folder: Path, paths: Iterable[Path], of: Callable[[Path], str] = sha256) -> dict[str, str]:
    """Digests of files by their names relative to `folder`."""
    return {path.relative_to(folder).as_posix(): of(path) for path in sorted(paths)}


def require_unchanged(
    folder: Path,
    digests: Mapping[str, str],
    remedy: str,
    kind: type[NammError],
    of: Callable[[Path], str] = sha256,
) -> None:
    """Refuse a folder in which one of these files is missing or differs, with a sentence that ends in the remedy."""
    if strange := [name for name in digests if not _is_inside(name)]:
        raise kind(f"the digests of {folder} name {strange[0][:80]!r}, which is no file in it: {remedy}")
    missing = [name for name in digests if not (folder / name).is_file()]
    changed = [name for name in digests if name not in missing and of(folder / name) != digests[name]]
    problems = {"missing": missing, "changed": changed}
    if any(problems.values()):
        paths = {how: ", ".join(str(folder / name) for name in sorted(names)) for how, names in problems.items()}
        listed = [f"{how}: {named}" for how, named in paths.items() if named]
        raise kind(f"{folder} is not as it was written ({'; '.join(listed)}): {remedy}")


def _is_inside(name: str) -> bool:
    """Whether a name in a file of digests can be that of a file in its folder."""
    path = PurePosixPath(name)
    is_name = name.isprintable() and 0 < len(name.encode()) <= LONGEST
    return is_name and not path.is_absolute() and ".." not in path.parts


def seal(folder: Path) -> None:
    """Bring all files of a folder to the disk and write their digests beside them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS]
    settle(files)
    write_json(folder / DIGESTS, signed(digests_of(folder, files)))


def require_sealed(folder: Path, remedy: str) -> None:
    """Refuse a folder that is no longer as `seal` saw it; one without digests is of an older version."""
    path = folder / DIGESTS
    if not path.exists():
        return
    with damage_as(CheckpointError, f"{path} cannot be read ({REASON}): {remedy}"):
        digests = load_json(path)
    require_unchanged(folder, require_signed(path, digests, remedy, CheckpointError), remedy, CheckpointError)


# JSON


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content`, which is JSON, with its own digest as one more entry."""
    return {**content, SIGNATURE: _signature(content)}


def require_signed(path: Path, found: Any, remedy: str, kind: type[NammError]) -> dict[str, Any]:
    """What `signed` signed, as it was read from `path`; refused where it has changed, unsigned as it is."""
    if not isinstance(found, dict):
        raise kind(f"{path} is damaged (it holds no JSON object): {remedy}")
    content = {name: value for name, value in found.items() if name != SIGNATURE}
    if SIGNATURE in found and found[SIGNATURE] != _signature(content):
        raise kind(f"{path} is not as it was written (its {SIGNATURE} does not match its content): {remedy}")
    return content


def _signature(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
