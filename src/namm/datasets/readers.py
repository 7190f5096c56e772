"""Images in files: HDF5, NPY, NPZ or a folder of PNGs, as float32 (N, C, H, W).

The layout on disk is stated, never guessed: `NCHW` or `NHWC`. Files written by `namm` and PNGs know theirs.
Floats are taken as they are, rounded to float32. Bytes (uint8) are pixel values and are scaled, v/255, to [0, 1];
booleans become 0 and 1. Other integers have no known scale and are refused. No reader unpickles anything.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self, get_args
from zipfile import BadZipFile

import h5py
import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from namm.datasets.checksums import has_mark, require_header, require_rows
from namm.errors import DataError, UsageError

Layout = Literal["NCHW", "NHWC"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
FEW = 4
"""No axis longer than this is called 'obviously the channels'."""
HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
PNG_MODES = ("1", "L", "RGB")
PIECE_BYTES = 64 * 2**20
"""How much of a file `pieces` reads at a time."""


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
    if is_lazy(path):
        with open_images(path, key=key, layout=layout) as images:
            return images[:]
    if path.suffix.lower() == ".npz":
        return LazyImages(_load_npz(path, key), layout, f"{path}, {key}")[:]
    raise DataError(
        f"{path} has the suffix {path.suffix!r}: images are read from HDF5 ({', '.join(HDF5_SUFFIXES)}), "
        ".npy, .npz, or a folder of .png files."
    )


def open_images(path: str | Path, *, key: str | None = None, layout: str | None = None) -> "LazyImages":
    """The images of an HDF5 or NPY file, left on disk and read when indexed; close it, or use it in a `with`."""
    path = Path(path)
    if path.suffix.lower() == ".npy":
        return LazyImages(_map_npy(path, key), layout, path)
    file = open_hdf5(path)
    try:
        ours = has_mark(file, "namm_version")
        if ours:
            require_header(file)
        name = "train" if ours and key is None else key
        array = file.get(name) if name else None
        if not isinstance(array, h5py.Dataset):
            raise DataError(_no_key(path, key, hdf5_arrays(file)))
        return LazyImages(array, "NCHW" if ours else layout, path)
    except BaseException:
        file.close()
        raise


def is_lazy(path: Path) -> bool:
    """Whether `open_images` reads this kind of file."""
    return path.suffix.lower() in (*HDF5_SUFFIXES, ".npy") and not path.is_dir()


class LazyImages:
    """An array in a file, read on demand as float32 (N, C, H, W) whatever its layout on disk.

    A tensor x of that shape and a `LazyImages` answer the same questions, `len(x)`, `x.shape`, `x[3]`, `x[5:9]` and
    `x[indices]`, with the same values; only the memory differs.
    """

    def __init__(self, array: h5py.Dataset | NDArray[Any], layout: str | None, path: Path | str):
        """`array`: rank 4 in `layout`, in the file at `path` (named in errors)."""
        self._array = array
        self._place = f"{path}, {array.name}" if isinstance(array, h5py.Dataset) else str(path)
        self._layout = require_layout(layout, self._place)
        require_images(array.shape, array.dtype, self._layout, self._place)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        n, a, b, c = self._array.shape
        return (n, a, b, c) if self._layout == "NCHW" else (n, c, a, b)

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def __getitem__(self, index: int | slice | ArrayLike) -> Tensor:
        """Image `index` (C, H, W), or the images of a slice or of an array of indices (B, C, H, W)."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                self._require_whole(np.arange(start, stop))
                return self._tensor(self._array[start : max(start, stop)], np.arange(start, stop))
            index = np.arange(start, stop, step)
        rows = np.asarray(index)
        if rows.size and not np.issubdtype(rows.dtype, np.integer):
            raise TypeError(f"Images are indexed by integers, slices or integer arrays, not {rows.dtype}.")
        if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"Index outside the {len(self)} images of {self._place}.")
        images = self._rows(rows.astype(np.int64).reshape(-1) % max(1, len(self)))
        return images if rows.ndim else images[0]

    def _rows(self, rows: NDArray[np.int64]) -> Tensor:
        if not isinstance(self._array, h5py.Dataset):
            return self._tensor(self._array[rows], rows)
        self._require_whole(rows)
        # Row by row is three times faster than h5py's own selection by index array, and takes any order.
        array = np.empty((len(rows), *self._array.shape[1:]), self._array.dtype)
        for place, row in enumerate(rows):
            self._array.read_direct(array, np.s_[row], np.s_[place])
        return self._tensor(array, rows)

    def _require_whole(self, rows: NDArray[np.int64]) -> None:
        """Refuse rows of a file of ours that have changed since they were written."""
        if isinstance(self._array, h5py.Dataset):
            require_rows(self._array, rows)

    def _tensor(self, array: NDArray[Any], rows: NDArray[np.int64]) -> Tensor:
        values = _as_float32(array)
        _require_finite(values, self._place, rows)
        if self._layout == "NHWC":
            values = values.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def pieces(self) -> list[slice]:
        """Slices that cover all images, about 64 MiB each: `for s in x.pieces(): x[s]` reads them all."""
        image_bytes = 4 * int(np.prod(self.shape[1:]))
        step = max(1, PIECE_BYTES // image_bytes)
        return [slice(start, start + step) for start in range(0, len(self), step)]

    def close(self) -> None:
        """Close the file."""
        if isinstance(self._array, h5py.Dataset):
            self._array.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# From the file to an array


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


def hdf5_arrays(file: h5py.File) -> dict[str, h5py.Dataset]:
    """All arrays of an open file by name, those in groups included."""
    arrays: dict[str, h5py.Dataset] = {}
    file.visititems(lambda name, item: arrays.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    return arrays


def _no_key(path: Path, key: str | None, keys: Iterable[str]) -> str:
    problem = f"has no array {key!r}" if key else "may hold several arrays, and no key says which to read"
    return f"{path} {problem}; its keys are: {', '.join(keys) or 'none'}. Pass one of them as key=."


def _map_npy(path: Path, key: str | None) -> NDArray[Any]:
    """The array, mapped and not loaded: a wrong shape is refused before gigabytes are read."""
    if key is not None:
        raise DataError(f"{path} holds a single array, so the key {key!r} has no meaning: leave it out.")
    try:
        return open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise DataError(_not_loadable(path, "an NPY file", error)) from error


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
    if any(phrase in str(error) for phrase in ("Object arrays", "Python objects")):  # numpy's two ways to say it
        return (
            f"{path} holds Python objects, not numbers, and unpickling them could run foreign code: save it "
            "again as one float32 array."
        )
    return f"{path} cannot be read as {kind}: it is truncated, corrupt or of another kind ({error})."


def _read_pngs(folder: Path) -> Tensor:
    """Greyscale or RGB PNGs of one size, ordered by name."""
    paths = png_files(folder)
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
    return torch.from_numpy(np.ascontiguousarray(_as_float32(images).transpose(0, 3, 1, 2)))


def png_files(folder: Path) -> list[Path]:
    """The PNGs of a folder, ordered by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() == ".png")


def _read_png(path: Path) -> NDArray[np.uint8]:
    """One PNG as bytes, (H, W, C)."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            if image.mode not in PNG_MODES:
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


# From an array to images, and the refusals on the way


def require_layout(layout: str | None, place: str) -> Layout:
    """`layout` if it is one, else a sentence that says why it is asked for."""
    if layout is None:
        raise UsageError(
            f"{place} does not say which axis holds the channels: pass layout='NCHW' (images, channels, "
            "rows, columns) or layout='NHWC' (channels last)."
        )
    if layout not in LAYOUTS:
        raise UsageError(f"There is no layout {layout!r}; the layouts are {' and '.join(LAYOUTS)}.")
    return "NCHW" if layout == "NCHW" else "NHWC"


def require_images(shape: tuple[int, ...] | None, dtype: np.dtype[Any], layout: Layout, place: str) -> None:
    """Refuse what cannot be images in `layout`: wrong type, rank or channel axis, or nothing at all."""
    if dtype.kind in "iu" and dtype != np.uint8:
        raise DataError(
            f"{place} holds {dtype} integers, whose scale is unknown (only uint8 is taken, as v/255): "
            "convert it to float32 in the units you want."
        )
    if dtype.kind not in "fbu":
        raise DataError(f"{place} holds values of type {dtype}, which are not images: convert it to float32.")
    axes = shape or ()
    if len(axes) != 4:
        raise DataError(
            f"{place} has {len(axes)} axes, {axes}, and images need 4 in the order {layout}."
            + (" Add the channel axis of length 1 that greyscale images lack." if len(axes) == 3 else "")
        )
    if 0 in axes:
        raise DataError(f"{place} is empty: its shape is {axes}.")
    # Few entries on the axis that the other layout calls channels, many on the one called so here, and the
    # images long and thin as a result.
    axis, other = (1, "NHWC") if layout == "NCHW" else (3, "NCHW")
    channels, rival = axes[axis], axes[4 - axis]
    sides = [length for i, length in enumerate(axes) if i not in (0, axis)]
    if rival <= FEW < channels and max(sides) > FEW * min(sides):
        raise DataError(
            f"{place} has shape {axes}, which {layout} reads as images of {channels} channels and "
            f"{sides[0]}×{sides[1]} pixels: axis {axis} is {channels} long while axis {4 - axis} is {rival}. "
            f"The file looks like {other}: pass layout='{other}'."
        )


def _as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Values as float32, with bytes scaled to [0, 1]; a copy only where the type changes."""
    if array.dtype == np.uint8:
        return array.astype(np.float32) / np.float32(255)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
        return array.astype(np.float32, copy=False)


def _require_finite(array: NDArray[np.float32], place: str, rows: NDArray[np.int64]) -> None:
    """Refuse NaN and infinity, naming the first; `rows` are the images' own numbers."""
    if np.isfinite(array.sum(dtype=np.float64)):  # any NaN or infinity would survive the sum
        return
    first = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
    index = (int(rows[first[0]]), *(int(i) for i in first[1:]))
    raise DataError(
        f"{place} holds {array[first]} at index {index}, the first value that float32 cannot compute with: "
        "mend or drop that image."
    )
