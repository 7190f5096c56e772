"""Headers of NPY files are Python literals: unbalanced or endless they raise whatever they like."""

import numpy as np
import pytest

from namm.datasets import read_images
from namm.datasets.user_files import look
from namm.errors import DataError

HEADERS = [
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, (",
    b"(" * 5000,
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 9223372036854775807, 2, 2), }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 1, 2, 2), }",
    b"{'descr': '<V2147483647', 'fortran_order': False, 'shape': (1, 1, 2, 2), }",
    b"{'descr': ('<f4', (99999, 99999)), 'fortran_order': False, 'shape': (1, 1, 2, 2), }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }",
    b"{'descr': '\xff', 'fortran_order': False, 'shape': (1, 1, 2, 2), }",
    b"\x00" * 50,
]


@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_numpy_cannot_read_are_a_sentence(tmp_path, header):
    file = tmp_path / "x.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    for reader in (read_images, look):
        with pytest.raises(DataError, match=r"x\.npy"):
            reader(file, layout="NCHW")


def test_an_array_longer_than_its_file_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 1, 8, 8)))
    content = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(content.replace(b"(4, 1, 8, 8), }    ", b"(4444, 1, 8, 8), } "))
    with pytest.raises(DataError, match="cannot be read as an NPY file"):
        read_images(tmp_path / "x.npy", layout="NCHW")
