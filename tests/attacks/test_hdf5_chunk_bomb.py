"""A chunk that claims 4 kB and unpacks to a gigabyte: libhdf5 doubles its buffer until all of it is out."""

import zlib

import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t
from hostile_hdf5 import file_with

from namm import hdf5_inspector
from namm.datasets import read_images
from namm.errors import DataError


def bomb(file):
    array = file.create_dataset("images", (1, 1, 32, 32), "f4", chunks=(1, 1, 32, 32), compression="gzip")
    packer = zlib.compressobj(1)
    zeros = bytes(2**24)
    packed = b"".join(packer.compress(zeros) for _ in range(5)) + packer.flush()  # of 80 MiB
    array.id.write_direct_chunk((0, 0, 0, 0), packed)


def test_a_chunk_is_not_unpacked_beyond_its_size(tmp_path):
    file = file_with(tmp_path, bomb)
    assert file.stat().st_size < 2**20
    with pytest.raises(DataError, match=r"cannot be read as HDF5.*a chunk is packed into more bytes than it can hold"):
        read_images(file, key="images", layout="NCHW")


def test_a_chunk_that_looks_honest_is_unpacked_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5_inspector, "SUSPECT", 1000)

    def bomb(file):
        array = file.create_dataset("images", (1, 1, 32, 32), "f4", chunks=(1, 1, 32, 32), compression="gzip")
        array.id.write_direct_chunk((0, 0, 0, 0), zlib.compress(bytes(2**21), 1))

    assert (
        hdf5_inspector.inspect(str(file_with(tmp_path, bomb)))["damage"] == "a chunk unpacks to more than it can hold"
    )


def test_large_honest_chunks_are_read(tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 1, 256, 256)).astype(np.float32)
    file = file_with(tmp_path, lambda f: f.create_dataset("images", data=x, chunks=x.shape, compression="gzip"))
    np.testing.assert_array_equal(read_images(file, key="images", layout="NCHW"), x)


def test_what_is_packed_twice_is_refused(tmp_path):
    """A kilobyte of deflate in deflate is a megabyte of it, and a gigabyte of images."""

    def bomb(file):
        plan, space = h5p.create(h5p.DATASET_CREATE), h5s.create_simple((1, 1, 32, 32))
        plan.set_chunk((1, 1, 32, 32))
        plan.set_deflate(9)
        plan.set_deflate(9)
        array = h5d.create(file.id, b"images", h5t.IEEE_F32LE, space, plan)
        array.write_direct_chunk((0, 0, 0, 0), zlib.compress(zlib.compress(bytes(2**24), 9), 9))

    file = file_with(tmp_path, bomb)
    assert file.stat().st_size < 8192
    with pytest.raises(DataError, match="an array is packed more than once"):
        read_images(file, key="images", layout="NCHW")
