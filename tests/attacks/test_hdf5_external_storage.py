"""An array whose bytes are those of another file: an upload of "samples" shows /etc/passwd as pixels."""

import numpy as np
import pytest
from hostile_hdf5 import file_with, secret

from namm.datasets import open_images, read_images
from namm.datasets.user_files import look
from namm.errors import DataError

SHAPE = (2, 1, 8, 8)


@pytest.fixture
def file(tmp_path):
    parts = [(str(secret(tmp_path)), 0, 128)]
    return file_with(tmp_path, lambda f: f.create_dataset("images", SHAPE, "u1", external=parts))


def test_other_files_bytes_are_not_images(file):
    for reader in (read_images, open_images):
        with pytest.raises(DataError, match=r"x\.h5 takes values from other files.*/images.*external=True"):
            reader(file, key="images", layout="NCHW")
    with pytest.raises(DataError, match="takes values from other files"):
        look(file, "images", "NCHW")


def test_who_asks_for_them_gets_them(file, tmp_path):
    x = read_images(file, key="images", layout="NCHW", external=True)
    pixels = np.frombuffer(secret(tmp_path).read_bytes()[:128], np.uint8).reshape(SHAPE)
    np.testing.assert_allclose(x, pixels / 255, atol=1e-7)
