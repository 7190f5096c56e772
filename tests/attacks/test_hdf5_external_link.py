"""A link to an array of another file: whoever is sent the samples reads, and publishes, a private file of their own."""

import h5py
import numpy as np
import pytest
from hostile_hdf5 import IMAGES, file_with

from namm.datasets import read_images
from namm.errors import DataError


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "private.h5", "w") as private:
        private["scans"] = IMAGES

    def link(file):
        file["own"] = IMAGES[:1]
        file["images"] = h5py.ExternalLink("private.h5", "/scans")

    return file_with(tmp_path, link)


@pytest.mark.parametrize("key", ["images", "own"])
def test_a_file_with_links_to_others_is_refused(file, key):
    with pytest.raises(DataError, match=r"takes values from other files.*images is a link to another file"):
        read_images(file, key=key, layout="NCHW")


def test_who_asks_for_them_gets_them(file):
    np.testing.assert_array_equal(read_images(file, key="images", layout="NCHW", external=True), IMAGES)
