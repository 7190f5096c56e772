"""Where the checksums of an array should be is a type, or a folder: neither has a shape."""

import h5py
import numpy as np
import pytest
from hostile_hdf5 import IMAGES, file_with

from namm.datasets import open_store, read_images
from namm.errors import DataError

OTHERS = {
    "datatype": lambda file: file.__setitem__("checksums/train", np.dtype("i8")),
    "group": lambda file: file.create_group("checksums/train"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_checksums_of_another_kind_are_a_sentence(kind, tmp_path):
    def hostile(file):
        file.attrs["namm_version"], file["train"] = "1", IMAGES
        OTHERS[kind](file)

    file = file_with(tmp_path, hostile)
    with h5py.File(file) as there:
        assert not isinstance(there["checksums/train"], h5py.Dataset)
    with pytest.raises(DataError, match=f"its checksums are a {kind}, not an array"):
        read_images(file)
    if kind == "datatype":
        with open_store(file) as store, pytest.raises(DataError, match="its checksums are a datatype"):
            store.damaged()
