"""Values as flax encodes them, written with msgpack itself."""

import msgpack
import numpy as np


def extension(array: np.ndarray, kind: int = 1) -> msgpack.ExtType:
    """Encode an array as flax does."""
    return msgpack.ExtType(kind, msgpack.packb((array.shape, array.dtype.name, array.tobytes("C"))))


def packed(value) -> bytes:
    return msgpack.packb(value, default=extension)
