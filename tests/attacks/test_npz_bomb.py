"""A zip bomb: a megabyte of NPZ that unpacks to a gigabyte of zeros."""

import struct
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_LZMA, ZipFile

import numpy as np
import pytest
from numpy.lib.format import magic, write_array_header_1_0

from namm.datasets import read_images
from namm.datasets.user_files import look
from namm.errors import DataError


def npz(path, shape, zeros):
    """An NPZ file whose header says `shape`, and with so many bytes after it."""
    with ZipFile(path, "w", ZIP_DEFLATED, compresslevel=1) as archive, archive.open("images.npy", "w") as file:
        write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for _ in range(zeros // 2**22):
            file.write(bytes(2**22))
    return path


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    file = npz(tmp_path / "x.npz", (2**17, 1, 32, 32), 2**26)  # claims eight times what it has, to be made faster
    with pytest.raises(DataError, match=r"x\.npz, images takes .* would unpack to 512 MiB.* more than 256-fold"):
        read_images(file, key="images", layout="NCHW")
    assert look(file, layout="NCHW").counts["images"] == 2**17  # the header alone is read


def test_a_header_that_claims_more_than_there_is_is_refused(tmp_path):
    with pytest.raises(DataError, match="its header says"):
        read_images(npz(tmp_path / "x.npz", (1024, 1, 64, 64), 2**22), key="images", layout="NCHW")


def test_what_compresses_well_is_read(tmp_path):
    bits = (np.random.default_rng(0).random((100, 1, 16, 16)) > 0.5).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", images=bits)
    np.testing.assert_array_equal(read_images(tmp_path / "x.npz", key="images", layout="NCHW"), bits)


def test_a_header_is_not_unpacked_however_long_it_says_that_it_is(tmp_path):
    with ZipFile(tmp_path / "x.npz", "w", ZIP_DEFLATED) as archive, archive.open("images.npy", "w") as file:
        file.write(magic(2, 0) + struct.pack("<I", 2**29))
        for _ in range(2**7):
            file.write(b" " * 2**22)
    with pytest.raises(DataError, match=r"images\.npy of .*x\.npz takes .* would unpack to 512 MiB"):
        read_images(tmp_path / "x.npz", key="images", layout="NCHW")


@pytest.mark.parametrize("how", [ZIP_BZIP2, ZIP_LZMA])
def test_what_python_unpacks_without_bounds_is_not_unpacked(tmp_path, how):
    """A directory may claim a kilobyte of what unpacks to gigabytes; with deflate alone Python stops there."""
    with ZipFile(tmp_path / "x.npz", "w", how) as archive, archive.open("images.npy", "w") as file:
        np.save(file, np.zeros((2, 1, 8, 8), np.float32))
    with pytest.raises(DataError, match="packed in a way that NumPy does not write"):
        read_images(tmp_path / "x.npz", key="images", layout="NCHW")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_of_two_arrays_of_one_name_neither_is_read(tmp_path):
    with ZipFile(tmp_path / "x.npz", "w") as archive:
        for value in (0, 1):
            with archive.open("images.npy", "w") as file:
                np.save(file, np.full((2, 1, 8, 8), value, np.float32))
    with pytest.raises(DataError, match="two arrays of one name"):
        read_images(tmp_path / "x.npz", key="images", layout="NCHW")
