"""An array of 2⁴⁰ images in a file of a kilobyte: none was written, and all of them are read as zeros."""

import json

import pytest
from hostile_hdf5 import IMAGES, file_with

from namm.datasets import open_images, open_store, read_images
from namm.errors import DataError
from namm.experiments.assimilation.posterior_file import read_distances, read_scores, read_truth

LONG = {"shape": (2**40,), "dtype": "f8", "chunks": (2**10,)}


def test_what_the_file_does_not_hold_is_not_read(tmp_path):
    file = file_with(tmp_path, lambda f: f.create_dataset("images", (2**40, 1, 8, 8), "f4", chunks=(4, 1, 8, 8)))
    assert file.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"would unpack to 256 TiB: a file that grows more than 256-fold"):
        read_images(file, key="images", layout="NCHW")
    with open_images(file, key="images", layout="NCHW") as images:
        assert images[5].count_nonzero() == 0  # one by one they are what they are


def test_nor_read_bit_by_bit_for_ever(tmp_path):
    file = file_with(tmp_path, lambda f: f.create_dataset("images", (2**40, 1, 8, 8), "f4", chunks=(4, 1, 8, 8)))
    with open_images(file, key="images", layout="NCHW") as images:
        for endless in (images.pieces, lambda: images[::2], lambda: images[:]):
            with pytest.raises(DataError, match="more than 256-fold"):
                endless()


def ours(file):
    file.attrs["namm_version"], file["train"] = "1", IMAGES


@pytest.mark.parametrize("rows", [0, -1, 65, 2**40, "a"])
def test_checksums_of_no_blocks_of_ours_are_a_sentence(tmp_path, rows):
    def hostile(file):
        ours(file)
        file["checksums/train"] = [1]
        file["checksums/train"].attrs["rows"] = rows

    with pytest.raises(DataError, match=r"x\.h5 is damaged \('train' cannot be read"):
        read_images(file_with(tmp_path, hostile))


def test_neither_endless_checksums_nor_what_the_header_counts_is_read(tmp_path):
    def checksums(file):
        ours(file)
        file.create_dataset("checksums/train", **LONG)

    file = file_with(tmp_path, checksums)
    with pytest.raises(DataError, match="are not those of"):
        read_images(file)
    with open_store(file) as store, pytest.raises(DataError, match="are not those of"):
        store.damaged()

    def header(file):
        ours(file)
        file.attrs["sha256"] = "0"
        file.create_dataset("more", **LONG)

    with pytest.raises(DataError, match="more takes 0 bytes and would unpack to 8 TiB"):
        read_images(file_with(tmp_path, header))


def test_nor_are_posterior_samples(tmp_path):
    def hostile(file):
        file.attrs["made_from"] = json.dumps({"methods": {"dps": {"method": "dps"}}})
        file.attrs["methods"] = json.dumps(["dps"])
        for name in ("truth", "measurement", *(f"dps/{name}" for name in ("distance", "failed"))):
            file.create_dataset(name, **LONG)

    file = file_with(tmp_path, hostile)
    for read in (read_scores, read_distances):
        with pytest.raises(DataError, match="would unpack to 8 TiB"):
            read(file)
    assert set(read_truth(file, 5)[0]) == {"truth", "measurement"}
