"""HDF5 files are looked into by a process of their own before this one opens them.

libhdf5 can hang or crash on a damaged file, and nothing in the same process can end that. So a child, `hdf5_inspector`,
goes first: where it hangs it is ended, where it crashes nothing is lost, and the file is refused with a sentence. The
child stays for the next file (the first costs a third of a second) and ends with this process. What was found is
remembered as long as the file does not change.
"""

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from namm.errors import DataError
from namm.reading import REASON, Stamp, damage_as, is_settled, require_plain, stamp

INSPECTOR = Path(__file__).with_name("hdf5_inspector.py")
SECONDS, BYTES_PER_SECOND = 20.0, 20 * 2**20
"""What the inspection of a file may take, to begin with and by its size: slow disks are no damage."""
GRACE = 5.0
"""Seconds after which a child that did not end by itself is killed."""
START = 60.0
"""Seconds that a child may take to start, on a busy machine or a slow network's disk."""


@dataclass(frozen=True)
class Finding:
    """What the inspector says of a file.

    Attributes:
        damage: Why it cannot be read; None where it can.
        elsewhere: The first part of it that lies in another file; None where there is none.
    """

    damage: str | None
    elsewhere: str | None


def open_hdf5(path: Path, *, external: bool = False) -> h5py.File:
    """The file, open for reading; refused where it is damaged and, unless `external`, where parts of it are not in it.

    Every HDF5 file that the package reads is opened here.
    """
    if not path.exists():
        raise DataError(f"There is no file {path}.")
    sentence = f"{path} cannot be read as HDF5: it is truncated, corrupt, locked or of another kind ({REASON}). "
    with damage_as(DataError, f"{sentence}Copy or write it anew."):
        require_sound(path, external=external)
        return h5py.File(path, "r")


def attributes(file: h5py.File) -> dict[str, Any]:
    """The attributes of an open file as Python values."""
    with damage_as(DataError, f"the attributes of {file.filename} cannot be read ({REASON}): it is damaged."):
        return {name: value.item() if getattr(value, "size", 0) == 1 else value for name, value in file.attrs.items()}


def require_sound(path: Path, *, external: bool) -> None:
    """Refuse a file that libhdf5 cannot read safely and, unless `external`, one with parts in other files."""
    found = GUARD.inspect(path)
    if found.damage is not None:
        raise DataError(
            f"{path} cannot be read as HDF5: it is truncated, corrupt, locked or of another kind ({found.damage}). "
            "Copy or write it anew."
        )
    if found.elsewhere is not None and not external:
        raise DataError(
            f"{path} takes values from other files of this machine: {found.elsewhere}. Copy them into one file "
            "(h5repack, or h5py's `copy` with expand_external), or, if you know where they come from, read it with "
            "`read_images` or `open_images` and external=True."
        )


class Guard:
    """One child that inspects files, started when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None
        self.known: dict[Stamp, Finding] = {}

    def inspect(self, path: Path) -> Finding:
        """What the child says, asked once for each state of a file."""
        size = require_plain(path)
        key = stamp(path)
        with self.lock:
            if key in self.known:
                return self.known[key]
            found = self._ask(path, SECONDS + size / BYTES_PER_SECOND)
            if is_settled(key):
                self.known[key] = found
            return found

    def _ask(self, path: Path, seconds: float) -> Finding:
        new = self.child is None or self.child.poll() is not None
        child = self._start() if new else self.child
        assert child is not None
        assert child.stdin is not None
        question = json.dumps([os.path.abspath(path), seconds]) + "\n"
        try:
            child.stdin.write(question.encode())
            child.stdin.flush()
            answer = _line(child, seconds + GRACE + (START if new else 0))
        except OSError:
            answer = b""
        except BaseException:  # Ctrl-C: the answer would be taken for that of the next question
            self.stop()
            raise
        if answer:
            return Finding(**json.loads(answer))
        self.stop()
        ended = f"its inspection did not end within {seconds:.3g} seconds, or crashed"
        return Finding(f"{ended}, as libhdf5 does on damaged files", None)

    def _start(self) -> subprocess.Popen[bytes]:
        self.stop()
        self.child = subprocess.Popen(
            [sys.executable, "-P", str(INSPECTOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        return self.child

    def stop(self) -> None:
        """End the child."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def forget_child(self) -> None:
        """In a fork: the child is the parent's."""
        self.lock, self.child = threading.Lock(), None


def _line(child: subprocess.Popen[Any], seconds: float) -> bytes:
    """A line of the child's output; empty where none comes in time."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        line = b""
        while not line.endswith(b"\n"):
            if not selector.select(seconds) or not (part := child.stdout.read(4096)):
                return b""
            line += part
    return line


GUARD = Guard()
atexit.register(GUARD.stop)
os.register_at_fork(after_in_child=GUARD.forget_child)
