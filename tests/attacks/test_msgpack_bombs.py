"""Flax files that promise more than they hold: lengths, nested lists, maps and arrays of 2⁶² numbers."""

import numpy as np
import pytest

from namm.errors import CheckpointError
from namm.import_flax import read_official

msgpack = pytest.importorskip("msgpack")


def array(shape, kind="float32", raw=b""):
    return msgpack.packb({"params": msgpack.ExtType(1, msgpack.packb((shape, kind, raw)))})


@pytest.mark.parametrize(
    "content",
    [
        b"\xdf\xff\xff\xff\xff",  # a map of 2³² − 1 entries
        b"\x81\xa1a\xdd\xff\xff\xff\xff",  # a list of as many
        b"\x81\xa1a" + b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000 + b"\xc0",
        array([2**62, 2**62]),
        array([0, 2**63]),
        array([-1]),
        array([2**40], raw=b"1234"),
        array([1], "O", b"12345678"),
        array([1], "V9999999999", b""),
        array(["a"], raw=b"1234"),
        np.random.default_rng(0).bytes(2000),
    ],
)
def test_promises_are_not_believed(tmp_path, content):
    (tmp_path / "checkpoint_1").write_bytes(content)
    with pytest.raises(CheckpointError, match="checkpoint_1"):
        read_official(tmp_path / "checkpoint_1")
