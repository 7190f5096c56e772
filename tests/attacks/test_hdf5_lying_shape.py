"""An array of 2⁴⁰ images in a file of a kilobyte: none was written, and all of them are read as zeros."""

import pytest
from hostile_hdf5 import file_with

from namm.datasets import open_images, read_images
from namm.errors import DataError


def test_what_the_file_does_not_hold_is_not_read(tmp_path):
    file = file_with(tmp_path, lambda f: f.create_dataset("images", (2**40, 1, 8, 8), "f4", chunks=(4, 1, 8, 8)))
    assert file.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"would unpack to 256 TiB: a file that grows more than 256-fold"):
        read_images(file, key="images", layout="NCHW")
    with open_images(file, key="images", layout="NCHW") as images:
        assert images[5].count_nonzero() == 0  # one by one they are what they are
