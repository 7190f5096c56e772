"""Legacy flax checkpoints without flax: a reader of the part of msgpack that they use.

A file is one msgpack value: maps with string keys down to numbers, strings and arrays. An array is an extension of type
1 whose payload is again msgpack, [shape, name of the dtype, raw little-endian bytes in C order]; type 3 is a NumPy
scalar in the same encoding. Everything else is refused, and so is every length that exceeds what is left of the file:
a foreign or damaged file costs neither memory nor time. Nothing in a file is ever executed.
"""

import struct
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from namm.errors import CheckpointError

DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
)
ARRAY, SCALAR = 1, 3
DEEPEST = 64
"""Nesting beyond which a file is taken for damaged; a real one has about ten levels."""

# What the first byte of a value says. Bytes below 0x80 and from 0xe0 on are small integers themselves.
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
SIZED: dict[int, tuple[str, str | int]] = {  # kind, and its size or the format of the number that tells it
    **{0x80 + size: ("map", size) for size in range(16)},
    **{0x90 + size: ("list", size) for size in range(16)},
    **{0xA0 + size: ("string", size) for size in range(32)},
    **{0xC4 + k: ("binary", layout) for k, layout in enumerate((">B", ">H", ">I"))},
    **{0xC7 + k: ("extension", layout) for k, layout in enumerate((">B", ">H", ">I"))},
    **{0xD4 + k: ("extension", 2**k) for k in range(5)},
    **{0xD9 + k: ("string", layout) for k, layout in enumerate((">B", ">H", ">I"))},
    **{0xDC + k: ("list", layout) for k, layout in enumerate((">H", ">I"))},
    **{0xDE + k: ("map", layout) for k, layout in enumerate((">H", ">I"))},
}


def read_flax_file(path: Path) -> dict[str, Any]:
    """The nested map in a file; its arrays are read-only views of the file's bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror or error}.") from error
    if not content or SIZED.get(content[0], ("", 0))[0] != "map":
        raise CheckpointError(
            f"{path} is not a flax checkpoint: it does not begin with a map of names. Expected is a file that flax's "
            "legacy checkpoints wrote, often called checkpoint_N."
        )
    found: dict[str, Any] = unpack(content, str(path))
    return found


def unpack(content: bytes | memoryview, name: str) -> Any:
    """The one value that `content` encodes; `name` is what errors call it."""
    reader = _Reader(memoryview(content), name)
    value = reader.value(0)
    if reader.left:
        reader.fail(f"{reader.left} bytes follow its end")
    return value


class _Reader:
    """A position in a buffer that only moves forward."""

    def __init__(self, buffer: memoryview, name: str) -> None:
        self.buffer, self.name, self.position = buffer, name, 0

    @property
    def left(self) -> int:
        return len(self.buffer) - self.position

    def fail(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.name} is corrupt or no flax checkpoint: at byte {self.position}, {why}.")

    def take(self, count: int) -> memoryview:
        self._plausible(count)
        self.position += count
        return self.buffer[self.position - count : self.position]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            self.fail(f"values are nested more than {DEEPEST} deep")
        first = self.number(">B")
        if first < 0x80 or first >= 0xE0:
            return first if first < 0x80 else first - 0x100
        if first in CONSTANTS:
            return CONSTANTS[first]
        if first in NUMBERS:
            return self.number(NUMBERS[first])
        if first not in SIZED:
            self.fail(f"the byte 0x{first:02x} begins no value")
        kind, size = SIZED[first]
        return self._sized(kind, self.number(size) if isinstance(size, str) else size, depth)

    def _sized(self, kind: str, size: int, depth: int) -> Any:
        match kind:
            case "map":
                return self._map(size, depth)
            case "list":
                return self._list(size, depth)
            case "string":
                return self._string(size)
            case "extension":
                return self._extension(size)
        return self.take(size)

    def _string(self, count: int) -> str:
        try:
            return str(self.take(count), "utf-8")
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8")

    def _list(self, count: int, depth: int) -> list[Any]:
        self._plausible(count)
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        self._plausible(2 * count)
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str) or key in found:
                self.fail(f"{key!r} is no name of a field" if not isinstance(key, str) else f"{key!r} occurs twice")
            found[key] = self.value(depth + 1)
        return found

    def _plausible(self, count: int) -> None:
        """Bytes, or values of a byte each at least, can still come."""
        if count > self.left:
            raise CheckpointError(
                f"{self.name} is truncated or corrupt: after byte {self.position} at least {count} bytes must follow, "
                f"and {self.left} do."
            )

    def _extension(self, count: int) -> Any:
        kind = self.number(">b")
        payload = self.take(count)
        if kind not in (ARRAY, SCALAR):
            self.fail(f"there is an extension of type {kind}; only arrays (1) and NumPy scalars (3) are understood")
        array = self._array(unpack(payload, f"an array in {self.name}"))
        return array if kind == ARRAY else array[()]

    def _array(self, content: Any) -> np.ndarray:
        match content:
            case [[*shape], str(dtype), memoryview() as raw] if all(type(n) is int and n >= 0 for n in shape):
                if dtype not in DTYPES:
                    self.fail(f"there is an array of {dtype!r}, which is not understood")
                kind = np.dtype(dtype).newbyteorder("<")
                if prod(shape) * kind.itemsize != len(raw):
                    self.fail(f"an array of shape {shape} and type {dtype} has {len(raw)} bytes")
                return np.frombuffer(raw, kind).reshape(shape)
        return self.fail("an array is not [shape, dtype, bytes]")
