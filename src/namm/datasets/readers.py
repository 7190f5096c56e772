"""Images in files: HDF5, NPY, NPZ or a folder of PNGs, as float32 (N, C, H, W).

The layout on disk is stated, never guessed: `NCHW` or `NHWC`. Files written by `namm` and PNGs know theirs.
Floats are taken as they are, rounded to float32. Bytes (uint8) are pixel values and are scaled, v/255, to [0, 1];
booleans become 0 and 1. Other integers have no known scale and are refused. No reader unpickles anything, and what a
file costs is bounded before it is read (`namm.reading`, `namm.hdf5`).
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Self, get_args
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import h5py
import numpy as np
import torch
from numpy.lib.format import open_memmap, read_array, read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from namm.datasets.checksums import has_mark, require_header, require_rows
from namm.errors import DataError, NammError, UsageError
from namm.hdf5 import open_hdf5
from namm.reading import REASON, damage_as, reason, require_credible, require_plain, require_room

Layout = Literal["NCHW", "NHWC"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
FEW = 4
"""No axis longer than this is called 'obviously the channels'."""
HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
DEFLATE = 1032
"""Times its own size that deflate, and so a PNG, can hold at most."""
PACKED_BY_NUMPY = (ZIP_STORED, ZIP_DEFLATED)
"""Python unpacks all others a quarter of a megabyte at a time, of which bzip2 can make five gigabytes."""
PNG_MODES = ("1", "L", "RGB")
PIECE_BYTES = 64 * 2**20
"""How much of a file `pieces` reads at a time."""


def read_images(
    path: str | Path, *, key: str | None = None, layout: str | None = None, external: bool = False
) -> Tensor:
    """All images of a file or of a folder of PNGs: float32, (N, C, H, W).

    Args:
        path: The file or folder.
        key: Name of the dataset in an HDF5 or NPZ file.
        layout: 'NCHW' or 'NHWC'; needed for every file but our own.
        external: Whether an HDF5 file may take values from other files, by external links, external storage or
            virtual datasets. Unless you know where they lead, it may show you any file that you can read.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    if path.is_dir():
        return _read_pngs(path)
    if is_lazy(path):
        with open_images(path, key=key, layout=layout, external=external) as images:
            return images[:]
    if path.suffix.lower() == ".npz":
        return LazyImages(_load_npz(path, key), layout, f"{path}, {key}")[:]
    raise DataError(
        f"{path} has the suffix {path.suffix!r}: images are read from HDF5 ({', '.join(HDF5_SUFFIXES)}), "
        ".npy, .npz, or a folder of .png files."
    )


def open_images(
    path: str | Path, *, key: str | None = None, layout: str | None = None, external: bool = False
) -> "LazyImages":
    """The images of an HDF5 or NPY file, left on disk and read when indexed; close it, or use it in a `with`.

    The arguments are those of `read_images`.
    """
    path = Path(path)
    if path.suffix.lower() == ".npy":
        return LazyImages(_map_npy(path, key), layout, path)
    file = open_hdf5(path, external=external)
    try:
        ours = has_mark(file, "namm_version")
        if ours:
            require_header(file)
        name = "train" if ours and key is None else key
        with damage_as(DataError, f"{path}, {name} cannot be read ({REASON}): write the file anew."):
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
        with self._damage():
            shape, kind = array.shape, array.dtype
        require_images(shape, kind, self._layout, self._place)

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
            self._require_room(len(range(start, stop, step)))
            if step == 1:
                stop = max(start, stop)
                self._require_whole(np.arange(start, stop))
                with self._damage():
                    array = self._array[start:stop]
                return self._tensor(array, np.arange(start, stop))
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
        self._require_room(len(rows))
        with self._damage():
            array = np.empty((len(rows), *self._array.shape[1:]), self._array.dtype)
            for place, row in enumerate(rows):
                self._array.read_direct(array, np.s_[row], np.s_[place])
        return self._tensor(array, rows)

    def _require_room(self, images: int) -> None:
        """Refuse to read what the file does not hold, or memory does not."""
        require_room(self._place, self._packed * images // max(1, len(self)), images * self._image_bytes)

    @property
    def _image_bytes(self) -> int:
        """Bytes of an image in memory, where it is read and made float32."""
        return max(4, self._array.dtype.itemsize) * math.prod(self._array.shape[1:])

    @property
    def _packed(self) -> int:
        """Bytes of all images in the file."""
        return self._array.id.get_storage_size() if isinstance(self._array, h5py.Dataset) else self._array.nbytes

    def _require_whole(self, rows: NDArray[np.int64]) -> None:
        """Refuse rows of a file of ours that have changed since they were written."""
        if isinstance(self._array, h5py.Dataset):
            require_rows(self._array, rows)

    def _damage(self) -> AbstractContextManager[None]:
        return damage_as(DataError, f"{self._place} cannot be read ({REASON}): the file is damaged; write it anew.")

    def _tensor(self, array: NDArray[Any], rows: NDArray[np.int64]) -> Tensor:
        values = _as_float32(array)
        _require_finite(values, self._place, rows)
        if self._layout == "NHWC":
            values = values.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def pieces(self) -> list[slice]:
        """Slices that cover all images, about 64 MiB each: `for s in x.pieces(): x[s]` reads them all."""
        step = max(1, PIECE_BYTES // (4 * math.prod(self.shape[1:])))
        require_credible(self._place, self._packed, self._image_bytes * len(self))  # else that would never end
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


def hdf5_arrays(file: h5py.File) -> dict[str, h5py.Dataset]:
    """All arrays of an open file by name, those in groups included."""
    arrays: dict[str, h5py.Dataset] = {}

    def note(name: str | bytes, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name if isinstance(name, str) else name.decode(errors="replace")] = item  # a name may be no text

    with damage_as(DataError, f"{file.filename} cannot be read ({REASON}): it is damaged; write it anew."):
        file.visititems(note)
    return arrays


def _no_key(path: Path, key: str | None, keys: Iterable[str]) -> str:
    problem = f"has no array {key!r}" if key else "may hold several arrays, and no key says which to read"
    return f"{path} {problem}; its keys are: {', '.join(keys) or 'none'}. Pass one of them as key=."


def _map_npy(path: Path, key: str | None) -> NDArray[Any]:
    """The array, mapped and not loaded: a wrong shape is refused before gigabytes are read."""
    if key is not None:
        raise DataError(f"{path} holds a single array, so the key {key!r} has no meaning: leave it out.")
    return map_array(path)


def map_array(path: Path) -> NDArray[Any]:
    """The array of an NPY file, mapped and not loaded."""
    with _loading(path, "an NPY file"):
        require_plain(path)
        return open_memmap(path, mode="r")


def _load_npz(path: Path, key: str | None) -> NDArray[Any]:
    with _loading(path, "an NPZ file"):
        require_plain(path)
        with ZipFile(path) as archive:
            members = npz_members(archive)
            if key is None or key not in members:
                raise DataError(_no_key(path, key, members))
            return _unpacked(archive, members[key], f"{path}, {key}")


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an NPZ file by name."""
    with _loading(path, "an NPZ file"):
        require_plain(path)
        with ZipFile(path) as archive:
            members = npz_members(archive)
            together = sum(member.file_size for member in members.values())
            require_room(path, path.stat().st_size, together)
            return {name: _unpacked(archive, member, f"{path}, {name}") for name, member in members.items()}


def _unpacked(archive: ZipFile, member: ZipInfo, place: str) -> NDArray[Any]:
    """An array of an NPZ file, whose size is believed only where header, directory and packed bytes agree."""
    shape, kind = npy_header(archive, member)
    require_room(place, member.compress_size, math.prod(shape) * max(4, kind.itemsize))  # as float32, at least
    if math.prod(shape) * kind.itemsize > member.file_size:
        raise ValueError(f"its header says {shape} of {kind}, more than its {member.file_size} bytes")
    with archive.open(member) as file:
        array: NDArray[Any] = read_array(file, allow_pickle=False)
    return array


def npz_members(archive: ZipFile) -> dict[str, ZipInfo]:
    """The arrays in an NPZ file, by name."""
    members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    found = {info.filename.removesuffix(".npy"): info for info in members}
    if len(found) < len(members):
        raise ValueError("it holds two arrays of one name")
    return found


def npy_header(archive: ZipFile, member: ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array in an NPZ file, without unpacking more than its header, which says how long it is."""
    if member.compress_type not in PACKED_BY_NUMPY:
        raise ValueError(f"{member.filename} is packed in a way that NumPy does not write, and grows without bounds")
    require_room(f"{member.filename} of {archive.filename}", member.compress_size, member.file_size)
    with archive.open(member) as file:
        read = read_array_header_1_0 if read_magic(file) == (1, 0) else read_array_header_2_0
        shape, _, kind = read(file)
    return shape, kind


@contextmanager
def _loading(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except NammError:
        raise
    except Exception as error:  # what zipfile, zlib, tokenize and NumPy raise on damaged files
        raise DataError(_not_loadable(path, kind, error)) from error


def _not_loadable(path: Path, kind: str, error: Exception) -> str:
    if any(phrase in str(error) for phrase in ("Object arrays", "Python objects")):  # numpy's two ways to say it
        return (
            f"{path} holds Python objects, not numbers, and unpickling them could run foreign code: save it "
            "again as one float32 array."
        )
    return f"{path} cannot be read as {kind}: it is truncated, corrupt or of another kind ({reason(error)})."


def _read_pngs(folder: Path) -> Tensor:
    """Greyscale or RGB PNGs of one size, ordered by name."""
    paths = png_files(folder)
    if not paths:
        raise DataError(f"The folder {folder} is empty of images: it holds no .png file.")
    first = _read_png(paths[0])
    require_room(folder, sum(path.stat().st_size for path in paths), 4 * first.size * len(paths))
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
    with damage_as(DataError, f"{path} cannot be read as a PNG: {REASON}."), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we have a limit of our own
        packed = require_plain(path)
        with Image.open(path, formats=("PNG",)) as image:
            if image.mode not in PNG_MODES:
                raise DataError(
                    f"{path} has the colour mode {image.mode!r}, and 8-bit greyscale or RGB is read: convert "
                    "it first, without palette or transparency."
                )
            values = image.width * image.height * len(image.getbands())
            require_room(path, packed, 4 * values)
            if values // (8 if image.mode == "1" else 1) > DEFLATE * packed:  # Pillow takes missing rows for black
                raise ValueError(f"{image.width}×{image.height} pixels do not fit into {packed} bytes")
            pixels = np.asarray(image.convert("L") if image.mode == "1" else image)
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
            "rows, columns) or layout='NHWC' (channels last); on the command line, --layout NCHW."
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
