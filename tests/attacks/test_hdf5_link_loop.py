"""Links that lead to each other, and a group that holds itself: a walk without memory never ends."""

import h5py
import numpy as np
import pytest
from hostile_hdf5 import IMAGES, file_with

from namm.datasets import read_images
from namm.errors import DataError


def loops(file):
    file["images"] = IMAGES
    file["a"], file["b"] = h5py.SoftLink("/b"), h5py.SoftLink("/a")
    file.create_group("inner")["again"] = file["/"]


def test_loops_end_in_a_sentence_or_are_not_walked(tmp_path):
    file = file_with(tmp_path, loops)
    with pytest.raises(DataError, match=r"x\.h5"):
        read_images(file, key="a", layout="NCHW")
    np.testing.assert_array_equal(read_images(file, key="inner/again/images", layout="NCHW"), IMAGES)
