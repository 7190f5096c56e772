"""A user's own images: HDF5, NPY, NPZ or a folder of PNGs, as float32 (N, C, H, W).

The layout on disk is stated, never guessed: `NCHW` or `NHWC`. Files written by `namm` and PNGs know theirs.
No reader unpickles anything.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from namm.datasets.convert import as_float32, require_finite, require_images, require_layout, to_nchw
from namm.datasets.lazy import LazyImages
from namm.errors import DataError

HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
PNG_CHANNELS = {"1": 1, "L": 1, "RGB": 3}


def read_images(path: str | Path, *, key: str | None = None, layout: str | None = None) -> Tensor:
    """All images of a file or of a folder of PNGs: float32, (N, C, H, W).

    `key` names the dataset in an HDF5 or NPZ file. `layout`, 'NCHW' or 'NHWC', is needed for every file but
    our own.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    if path.is_dir():
        return _read_pngs(path)
    if path.suffix.lower() in HDF5_SUFFIXES:
        with open_images(path, key=key, layout=layout) as images:
            return images[:]
    if path.suffix.lower() == ".npy":
        return _tensor(_load_npy(path, key), layout, str(path))
    if path.suffix.lower() == ".npz":
        array = _load_npz(path, key)
        return _tensor(array, layout, f"{path}, {key}")
    raise DataError(
        f"{path} has the suffix {path.suffix!r}: images are read from HDF5 ({', '.join(HDF5_SUFFIXES)}), "
        ".npy, .npz, or a folder of .png files."
    )


def open_images(path: str | Path, *, key: str | None = None, layout: str | None = None) -> LazyImages:
    """The images of an HDF5 file, left on disk and read when indexed; close it, or use it in a `with`."""
    path = Path(path)
    file = open_hdf5(path)
    try:
        dataset = _dataset(file, key, path)
        stated = "NCHW" if "namm_version" in file.attrs else layout
        return LazyImages(dataset, require_layout(stated, f"{path}, {key}"), path)
    except BaseException:
        file.close()
        raise


def open_hdf5(path: Path) -> h5py.File:
    """The file, open for reading."""
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read as HDF5: it is truncated, corrupt, locked or of another kind ({error}). "
            "Copy or write it anew."
        ) from error


def _dataset(file: h5py.File, key: str | None, path: Path) -> h5py.Dataset:
    if key is None and "namm_version" in file.attrs:
        key = "train"  # one of our own files
    found = file.get(key) if key else None
    if isinstance(found, h5py.Dataset):
        return found
    keys: list[str] = []
    file.visititems(lambda name, item: keys.append(name) if isinstance(item, h5py.Dataset) else None)
    raise DataError(_no_key(path, key, keys))


def _no_key(path: Path, key: str | None, keys: Iterable[str]) -> str:
    problem = f"has no array {key!r}" if key else "may hold several arrays, and no key says which to read"
    return f"{path} {problem}; its keys are: {', '.join(keys) or 'none'}. Pass one of them as key=."


def _load_npy(path: Path, key: str | None) -> NDArray[Any]:
    if key is not None:
        raise DataError(f"{path} holds a single array, so the key {key!r} has no meaning: leave it out.")
    try:
        # Mapped, not loaded: a wrong shape is refused before gigabytes are read.
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(_not_loadable(path, "an NPY file", error)) from error
    return array


def _load_npz(path: Path, key: str | None) -> NDArray[Any]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as arrays:
            if key is None or key not in arrays.files:
                raise DataError(_no_key(path, key, arrays.files))
            array: NDArray[Any] = arrays[key]
            return array
    except (ValueError, EOFError, OSError, BadZipFile, AttributeError, TypeError) as error:
        raise DataError(_not_loadable(path, "an NPZ file", error)) from error


def _not_loadable(path: Path, kind: str, error: Exception) -> str:
    if any(words in str(error) for words in ("Object arrays", "Python objects")):  # numpy's two ways to say it
        return (
            f"{path} holds Python objects, not numbers, and unpickling them could run foreign code: save it "
            "again as one float32 array."
        )
    return f"{path} cannot be read as {kind}: it is truncated, corrupt or of another kind ({error})."


def _tensor(array: NDArray[Any], layout: str | None, place: str) -> Tensor:
    stated = require_layout(layout, place)
    require_images(array.shape, array.dtype, stated, place)
    values = as_float32(array)
    require_finite(values, place)
    values = to_nchw(values, stated)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _read_pngs(folder: Path) -> Tensor:
    """Greyscale or RGB PNGs of one size, ordered by name."""
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".png")
    if not paths:
        raise DataError(f"The folder {folder} is empty of images: it holds no .png file.")
    first = _read_png(paths[0])
    images = np.empty((len(paths), *first.shape), np.uint8)
    for i, path in enumerate(paths):
        image = _read_png(path)
        if image.shape != first.shape:
            raise DataError(
                f"PNGs must share one size and colour mode: {path} is {_size(image)} and {paths[0]} is "
                f"{_size(first)}. Resize or remove one of them."
            )
        images[i] = image
    return torch.from_numpy(to_nchw(as_float32(images), "NHWC"))


def _read_png(path: Path) -> NDArray[np.uint8]:
    """One PNG as bytes, (H, W, C)."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            if image.mode not in PNG_CHANNELS:
                raise DataError(
                    f"{path} has the colour mode {image.mode!r}, and 8-bit greyscale or RGB is read: convert "
                    "it first, without palette or transparency."
                )
            pixels = np.asarray(image.convert("L") if image.mode == "1" else image)
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises on damaged files
        raise DataError(f"{path} cannot be read as a PNG: {error}.") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def _size(image: NDArray[np.uint8]) -> str:
    height, width, channels = image.shape
    return f"{height}×{width} with {channels} channel{'s' if channels > 1 else ''}"
