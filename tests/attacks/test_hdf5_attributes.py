"""Attributes of other types than ours: arrays where a number belongs, and text that is no JSON."""

import h5py
import numpy as np
import pytest
from hostile_hdf5 import IMAGES, file_with

from namm.cli.options import file_attributes, rule_settings
from namm.datasets import open_store
from namm.errors import DataError
from namm.generative.sample_file import SampleFile


def samples(file):
    file["images"] = IMAGES
    file["after"] = file["before"] = np.zeros((2, 2))
    file.attrs.update({"samples": np.arange(5), "namm_version": "0", "rule": h5py.Empty("f4"), "nu": np.zeros((3, 3))})


def test_values_of_other_types_end_in_sentences(tmp_path):
    file = file_with(tmp_path, samples)
    with SampleFile(file) as found:
        assert found.images[:].shape == IMAGES.shape
        for read in (lambda: found.certificate, lambda: found.mirror_images, lambda: found.compute_seconds):
            with pytest.raises(DataError, match=r"x\.h5"):
                read()
    with open_store(file) as store, pytest.raises(DataError, match=r"no array 'train'"):
        _ = store["train"]
    assert file_attributes(file)["samples"].shape == (5,)
    assert rule_settings("burgers", file) == rule_settings("burgers", None)
