"""Legacy flax checkpoints without flax: nested maps of arrays from a msgpack file.

A file is one msgpack value: maps with string keys down to numbers, strings and arrays. An array is an extension of type
1 whose payload is again msgpack, [shape, name of the dtype, raw little-endian bytes in C order]; type 3 is a NumPy
scalar in the same encoding. Flax cuts an array of more than 2³⁰ bytes into flat chunks and stores it as a map,
{"__msgpack_chunked_array__": true, "shape": {"0": …}, "chunks": {"0": …}}.

Everything else is refused, and nothing in a file is ever executed. msgpack refuses lengths that exceed the file; lists
and maps have limits here in addition, because msgpack reserves their memory before it reads their values, and the
number of values has one, because an empty map takes one byte in a file and 64 in memory.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from namm.errors import CheckpointError, UsageError
from namm.reading import read_bytes

INSTALL = "pip install 'namm[flax]'"
DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
)
ARRAY, SCALAR = 1, 3
CHUNKED = "__msgpack_chunked_array__"
MAP_BYTES = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
"""First bytes of a msgpack map."""
DEEPEST = 64
"""Nesting beyond which a file is taken for damaged; a real one has about ten levels."""
LONGEST_LIST = 32
"""Items of a list. The longest in a real file is an array's shape, and NumPy 1 has at most 32 axes."""
LARGEST_MAP = 10_000
"""Entries of a map. The largest in a real file has one for each module of a network, about a hundred."""
LARGEST_FILE = 2**32
"""Bytes of a file; the largest of the authors' has half a gigabyte."""
MOST_VALUES = 1_000_000
"""List items and map entries of a whole file. A real one has tens of thousands."""


def read_flax_file(path: Path) -> dict[str, Any]:
    """Read a checkpoint file as nested maps; their arrays are read-only."""
    try:
        content = read_bytes(path, LARGEST_FILE)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error.strerror or error}.") from error
    if not content or content[0] not in MAP_BYTES:
        raise CheckpointError(
            f"{path} is not a flax checkpoint: it does not begin with a map of names. Expected is a file that flax's "
            "legacy checkpoints wrote, often called checkpoint_N."
        )
    return dict(unpack(content, str(path)))


def unpack(content: bytes, name: str) -> Any:
    """Decode the one value in `content`; `name` is what errors call it."""
    decoder = _Decoder(name)
    return decoder.checked(decoder.decode(content, ext_hook=decoder.extension))


class _Decoder:
    """Limits and hooks for msgpack while it decodes one file."""

    def __init__(self, name: str) -> None:
        try:
            import msgpack
        except ImportError as error:
            raise UsageError(f"flax checkpoints are read by msgpack, which is not installed: {INSTALL}") from error
        self.name, self.values, self.msgpack = name, 0, msgpack

    def fail(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.name} is truncated or corrupt, or not a flax checkpoint: {why}.")

    def decode(self, content: bytes, **hooks: Any) -> Any:
        try:
            return self.msgpack.unpackb(
                content,
                strict_map_key=False,  # `fields` is stricter
                list_hook=self.items,
                object_pairs_hook=self.fields,
                max_array_len=LONGEST_LIST,
                max_map_len=LARGEST_MAP,
                **hooks,
            )
        except self.msgpack.ExtraData as error:
            self.fail(f"{len(error.extra)} bytes follow its end")
        except self.msgpack.FormatError:
            self.fail("the byte 0xc1 begins no value")
        except self.msgpack.StackError:
            self.fail(f"values are nested more than {DEEPEST} deep")
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8")
        except ValueError as error:  # incomplete input, or a length beyond its limit
            self.fail(f"msgpack reports: {error}")

    def items(self, items: list[Any]) -> list[Any]:
        self.count(len(items))
        return items

    def fields(self, pairs: list[tuple[Any, Any]]) -> Any:
        self.count(len(pairs))
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if not isinstance(key, str):
                self.fail(f"a map has a key of type {type(key).__name__}, not the name of a field")
            if key in fields:
                self.fail(f"{key[:80]!r} occurs twice in a map")
            fields[key] = value
        return self.joined(fields) if CHUNKED in fields else fields

    def count(self, values: int) -> None:
        self.values += values
        if self.values > MOST_VALUES:
            self.fail(f"it has more than {MOST_VALUES} values")

    def extension(self, kind: int, payload: bytes) -> Any:
        if kind not in (ARRAY, SCALAR):
            self.fail(f"it has an extension of type {kind}; only arrays (1) and NumPy scalars (3) are understood")
        match self.decode(payload):
            case [[*shape], str(dtype), bytes(raw)]:
                array = self.array(shape, dtype, raw)
                return array if kind == ARRAY else array[()]
        return self.fail("an array is not [shape, dtype, bytes]")

    def array(self, shape: Sequence[Any], dtype: str, raw: bytes) -> np.ndarray:
        if dtype not in DTYPES:
            self.fail(f"it has an array of {dtype[:80]!r}, which is not understood")
        kind = np.dtype(dtype).newbyteorder("<")
        if len(raw) % kind.itemsize:
            self.fail(f"an array of shape {shape} and type {dtype} has {len(raw)} bytes")
        return self.shaped(np.frombuffer(raw, kind), shape)

    def joined(self, fields: dict[str, Any]) -> np.ndarray:
        """Join the chunks of a large array."""
        match fields:
            case {"shape": dict(shape), "chunks": dict(chunks)} if len(fields) == 3 and chunks:
                parts = [chunks.get(str(k)) for k in range(len(chunks))]
                axes = [shape.get(str(k)) for k in range(len(shape))]
                flat = [part for part in parts if isinstance(part, np.ndarray) and part.ndim == 1]
                if len(flat) == len(parts) and len({part.dtype for part in flat}) == 1:
                    return self.shaped(np.concatenate(flat), axes)
        return self.fail("an array in chunks is not a shape and flat arrays of one type")

    def shaped(self, flat: np.ndarray, shape: Sequence[Any]) -> np.ndarray:
        """View a flat array in a shape that the file gives."""
        if any(type(n) is not int or n < 0 for n in shape) or prod(shape) != flat.size:
            self.fail(f"an array of shape {shape} and type {flat.dtype} has {flat.nbytes} bytes")
        try:
            array = flat.reshape(shape)
        except (ValueError, OverflowError) as error:  # an empty array whose other axes are beyond NumPy
            self.fail(f"an array has shape {shape}: {error}")
        array.flags.writeable = False
        return array

    def checked(self, value: Any, depth: int = 0) -> Any:
        """Refuse deep nesting, and values that msgpack knows and flax does not write."""
        if depth > DEEPEST:
            self.fail(f"values are nested more than {DEEPEST} deep")
        if isinstance(value, self.msgpack.Timestamp):
            self.fail("it has a time stamp, which flax does not write")
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self.checked(part, depth + 1)
        return value
