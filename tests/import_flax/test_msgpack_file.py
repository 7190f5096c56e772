"""Checkpoint files are read as msgpack and flax write them; anything else is refused and costs no memory."""

import sys
import tracemalloc

import msgpack
import numpy as np
import pytest
from flax_encoding import extension, packed
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import namm.import_flax.msgpack_file as module
from namm.cli import main
from namm.errors import CheckpointError
from namm.import_flax.msgpack_file import DTYPES, read_flax_file, unpack


def in_chunks(array: np.ndarray, size: int) -> dict:
    """Cut an array into flat chunks of `size` items, as flax does with more than 2³⁰ bytes."""
    flat = array.reshape(-1)
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(k): n for k, n in enumerate(array.shape)},
        "chunks": {str(k): flat[k * size : (k + 1) * size] for k in range(-(-flat.size // size))},
    }


numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=40) | st.binary(max_size=300)
trees = st.dictionaries(
    st.text(max_size=10),
    st.recursive(
        leaves,
        lambda value: st.lists(value, max_size=5) | st.dictionaries(st.text(max_size=10), value, max_size=5),
        max_leaves=8,
    ),
    max_size=5,
)
dtypes = st.sampled_from(sorted(DTYPES)).map(np.dtype)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("07", 7),
        ("e0", -32),
        ("cc ff", 255),
        ("d1 80 00", -32768),
        ("cf ff ff ff ff ff ff ff ff", 2**64 - 1),
        ("ca 3f c0 00 00", 1.5),
        ("cb bf f8 00 00 00 00 00 00", -1.5),
        ("c0", None),
        ("c3", True),
        ("a2 c3 a9", "é"),
        ("d9 01 61", "a"),
        ("c4 02 01 02", b"\x01\x02"),
        ("93 01 c2 a0", [1, False, ""]),
        ("dc 00 01 05", [5]),
        ("82 a1 61 01 a1 62 80", {"a": 1, "b": {}}),
        ("c7 0e 03 93 90 a5 69 6e 74 33 32 c4 04 17 11 00 00", 0x1117),
    ],
)
def test_values_of_the_specification(content, value):
    assert unpack(bytes.fromhex(content), "it") == value


@given(trees)
def test_trees_survive(tree):
    assert unpack(msgpack.packb(tree), "it") == tree


@given(arrays)
def test_arrays_keep_values_shape_and_type(array):
    found = unpack(packed({"a": {"b": array}}), "it")["a"]["b"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array, strict=True)
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


@given(dtypes, st.integers(0, 100))
def test_numpy_scalars_keep_value_and_type(dtype, number):
    scalar = dtype.type(number)
    found = unpack(msgpack.packb({"epoch": extension(np.asarray(scalar), 3)}), "it")["epoch"]
    assert found == scalar
    assert type(found) is type(scalar)


@given(
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=4), elements=st.floats(-1, 1, width=32)),
    st.integers(1, 300),
)
def test_chunks_are_joined(array, size):
    found = unpack(packed({"a": in_chunks(array, size)}), "it")["a"]
    np.testing.assert_array_equal(found, array, strict=True)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(content):
    try:
        unpack(content, "it")
    except CheckpointError as error:
        assert str(error).startswith("it is truncated or corrupt, or not a flax checkpoint: ")  # noqa: PT017


@given(trees, st.data())
def test_every_prefix_is_refused(tree, data):
    content = packed({"tree": tree, "array": np.ones((2, 3)), "epoch": 3})
    kept = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(CheckpointError, match="msgpack reports"):
        unpack(content[:kept], "it")


@given(st.binary(min_size=1, max_size=9))
def test_bytes_after_the_end_are_refused(extra):
    with pytest.raises(CheckpointError, match=f": {len(extra)} bytes follow its end"):
        unpack(packed({"epoch": 3}) + extra, "it")


def bad_array(*content, kind: int = 1) -> bytes:
    return msgpack.packb({"a": msgpack.ExtType(kind, msgpack.packb(content))})


FLAT, NAME = np.arange(6.0), "__msgpack_chunked_array__"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xc1", "0xc1 begins no value"),
        (b"\x81\x01\x02", "a key of type int, not the name of a field"),
        (b"\x81\xc4\x01a\x02", "a key of type bytes, not the name of a field"),
        (b"\x81\x90\x02", "a key of type list, not the name of a field"),
        (b"\x82\xa1a\x01\xa1a\x01", "'a' occurs twice"),
        (b"\xa1\xff", "not UTF-8"),
        (b"\xdd\xff\xff\xff\xff", "4294967295 exceeds"),
        (b"\xdf\xff\xff\xff\xff", "4294967295 exceeds"),
        (b"\xc6\xff\xff\xff\xff\x00", "incomplete"),
        (b"\xc9\xff\xff\xff\xff\x01\x00", "msgpack reports"),
        (b"\x91" * 70 + b"\x00", "nested more than 64 deep"),
        (b"\x91" * 9000 + b"\x00", "nested more than 64 deep"),
        (b"\x81\xa1a" * 9000 + b"\x00", "nested more than 64 deep"),
        (msgpack.packb(msgpack.Timestamp(1)), "a time stamp"),
        (b"\xd4\x02\x00", "an extension of type 2"),
        (b"\xd4\x01\x00", r"not \[shape, dtype, bytes\]"),
        (bad_array([], "int32", "text"), r"not \[shape, dtype, bytes\]"),
        (bad_array([], "int32", msgpack.ExtType(1, b"\x00")), r"not \[shape, dtype, bytes\]"),
        (bad_array([1], "int33", bytes(4)), "an array of 'int33'"),
        (bad_array([1], "object", bytes(8)), "an array of 'object'"),
        (bad_array([], "int32", bytes(3)), "has 3 bytes"),
        (bad_array([2], "int32", bytes(4)), "has 4 bytes"),
        (bad_array([-1], "int32", bytes(4)), "has 4 bytes"),
        (bad_array([True], "int32", bytes(4)), "has 4 bytes"),
        (bad_array([1.0], "int32", bytes(4), kind=3), "has 4 bytes"),
        (bad_array([0, 2**63], "int32", b""), "an array has shape"),
        (bad_array([0, 2**40, 2**40], "int32", b""), "an array has shape"),
        (packed({NAME: True}), "in chunks"),
        (packed(in_chunks(FLAT, 2) | {"chunks": {}}), "in chunks"),
        (packed(in_chunks(FLAT, 2) | {"chunks": {"0": FLAT, "2": FLAT}}), "in chunks"),
        (packed(in_chunks(FLAT, 2) | {"chunks": {"0": FLAT[:3], "1": FLAT[3:].astype("f4")}}), "in chunks"),
        (packed(in_chunks(FLAT, 2) | {"chunks": {"0": FLAT[None]}}), "in chunks"),
        (packed(in_chunks(FLAT, 2) | {"shape": {"0": 7}}), "has 48 bytes"),
        (packed(in_chunks(FLAT, 2) | {"shape": {"1": 6}}), "has 48 bytes"),
    ],
)
def test_what_flax_does_not_write_is_refused(content, message):
    with pytest.raises(CheckpointError, match=message):
        unpack(content, "it")


@pytest.mark.parametrize(
    "content",
    [
        (b"\xdd" + (10**6).to_bytes(4, "big")) * 1000 + bytes(10**6),
        (b"\xdf" + (10**6).to_bytes(4, "big") + b"\xa1a") * 1000 + bytes(10**6),
        (b"\xde\x27\x10\xa1a") * 1000 + bytes(10**6),
        b"\x91" + (b"\xdc\x00\x20" + b"\x80" * 32) * 30_000,
    ],
    ids=["nested lists", "nested maps", "nested maps within the limit", "empty maps"],
)
def test_hostile_files_cost_no_memory(content):
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        unpack(content, "it")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


def test_the_number_of_values_is_limited(monkeypatch):
    monkeypatch.setattr(module, "MOST_VALUES", 20)
    assert unpack(packed({"a": [{}] * 19}), "it") == {"a": [{}] * 19}
    for content in ({"a": [{}] * 20}, {"a": [{}] * 10, "b": [{}] * 9}, {"a": np.ones((1,) * 20)}):
        with pytest.raises(CheckpointError, match="more than 20 values"):
            unpack(packed(content), "it")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"{}", b"\x93\x01\x02\x03", b"\x89HDF\r\n"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a flax checkpoint"):
        read_flax_file(tmp_path / "file")


def test_what_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError, match=f"{path} cannot be read"):
            read_flax_file(path)


def test_without_msgpack_the_command_names_the_remedy(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoint").write_bytes(packed({"params": {}}))
    monkeypatch.setitem(sys.modules, "msgpack", None)
    assert main(["import", str(tmp_path / "checkpoint")]) == 2
    assert "msgpack, which is not installed: pip install 'namm[flax]'" in capsys.readouterr().err
