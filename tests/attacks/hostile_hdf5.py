"""HDF5 files of attackers, for the tests of this folder."""

import os
from pathlib import Path

import h5py
import numpy as np

IMAGES = np.random.default_rng(0).normal(size=(4, 1, 6, 6)).astype(np.float32)


def secret(folder: Path) -> Path:
    """A file of somebody else, whose bytes could be shown as images."""
    path = folder / "secret.bin"
    path.write_bytes(b"the key to the house is under the third stone" * 100)
    return path


def file_with(folder: Path, make) -> Path:
    """`x.h5` as `make` fills it; old enough for its state to be known by its date."""
    path = folder / "x.h5"
    with h5py.File(path, "w") as file:
        make(file)
    os.utime(path, (1e9, 1e9))
    return path
