"""Images that stay on disk until they are indexed.

A tensor x of shape (N, C, H, W) and a `LazyImages` answer the same questions, `len(x)`, `x.shape`, `x[3]`,
`x[5:9]` and `x[indices]`, with the same float32 values; only the memory differs.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from namm.datasets.convert import Layout, as_float32, require_finite, require_images, to_nchw

PIECE_BYTES = 64 * 2**20
"""How much of a file `pieces` reads at a time."""


class LazyImages:
    """A dataset of an HDF5 file, read on demand as float32 (N, C, H, W) whatever its layout on disk."""

    def __init__(self, dataset: h5py.Dataset, layout: Layout, path: Path):
        """`dataset`: rank 4 in `layout`, in the file at `path` (named in errors)."""
        self._dataset, self._layout, self._path = dataset, layout, path
        self._place = f"{path}, {dataset.name}"
        require_images(dataset.shape, dataset.dtype, layout, self._place)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        n, a, b, c = self._dataset.shape
        return (n, a, b, c) if self._layout == "NCHW" else (n, c, a, b)

    def __len__(self) -> int:
        return int(self._dataset.shape[0])

    def __getitem__(self, index: int | slice | ArrayLike) -> Tensor:
        """Image `index` (C, H, W), or the images of a slice or of an array of indices (B, C, H, W)."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._tensor(self._dataset[start : max(start, stop)], np.arange(start, stop))
            index = np.arange(start, stop, step)
        rows = np.asarray(index)
        if rows.size and not np.issubdtype(rows.dtype, np.integer):
            raise TypeError(f"Images are indexed by integers, slices or integer arrays, not {rows.dtype}.")
        if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"Index outside the {len(self)} images of {self._place}.")
        images = self._rows(rows.astype(np.int64).reshape(-1) % max(1, len(self)))
        return images if rows.ndim else images[0]

    def _rows(self, rows: NDArray[np.int64]) -> Tensor:
        # Row by row is three times faster than h5py's own selection by index array, and takes any order.
        array = np.empty((len(rows), *self._dataset.shape[1:]), self._dataset.dtype)
        for place, row in enumerate(rows):
            self._dataset.read_direct(array, np.s_[row], np.s_[place])
        return self._tensor(array, rows)

    def _tensor(self, array: NDArray[Any], rows: NDArray[np.int64]) -> Tensor:
        values = as_float32(array)
        require_finite(values, self._place, rows)
        return torch.from_numpy(to_nchw(values, self._layout))

    def pieces(self) -> list[slice]:
        """Slices that cover all images, about 64 MiB each: `for s in x.pieces(): x[s]` reads them all."""
        image_bytes = 4 * int(np.prod(self.shape[1:]))
        step = max(1, PIECE_BYTES // image_bytes)
        return [slice(start, start + step) for start in range(0, len(self), step)]

    def close(self) -> None:
        """Close the file."""
        self._dataset.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
