"""A virtual data set is put together from other files when it is read, from whatever files it names."""

import h5py
import numpy as np
import pytest
from hostile_hdf5 import IMAGES, file_with

from namm.datasets import read_images
from namm.errors import DataError


def test_a_virtual_data_set_is_read_only_where_that_is_asked_for(tmp_path):
    with h5py.File(tmp_path / "private.h5", "w") as private:
        private["scans"] = IMAGES
    layout = h5py.VirtualLayout(IMAGES.shape, "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "private.h5"), "scans", IMAGES.shape)
    file = file_with(tmp_path, lambda f: f.create_virtual_dataset("images", layout))
    with pytest.raises(DataError, match=r"/images is a virtual data set"):
        read_images(file, key="images", layout="NCHW")
    np.testing.assert_array_equal(read_images(file, key="images", layout="NCHW", external=True), IMAGES)
