"""One HDF5 file per dataset: `train`, `val`, `test`, each float32 (N, C, H, W), and the recipe as attributes.

Writing can be stopped at any moment, `kill -9` included; the same call then goes on, and the file it
completes holds what an uninterrupted run would have written.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import h5py
from torch import Tensor

from namm._version import __version__
from namm.datasets import partial
from namm.datasets.base import BLOCK, SPLITS, Dataset
from namm.datasets.lazy import LazyImages
from namm.datasets.readers import open_hdf5
from namm.errors import DataError, UsageError
from namm.progress import ProgressBar


def write_store(
    path: str | Path,
    dataset: Dataset,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    quiet: bool = False,
) -> Path:
    """Write a dataset's splits to `path`, or go on where an interrupted call stopped.

    `sizes` gives the images per split, by default the paper's; a split it does not name is left empty. A
    complete file of the same recipe is left alone, one of another recipe is refused. A progress bar is shown where
    there is a terminal, unless `quiet`.
    """
    path = Path(path)
    counts = _counts(dataset.sizes if sizes is None else sizes)
    header = _header(dataset, counts, seed)
    arrays = {split: (n, *dataset.shape) for split, n in counts.items()}
    partial.grow(
        path, arrays, header, lambda file, blocks: _draw(file, blocks, dataset, seed, sum(counts.values()), quiet=quiet)
    )
    return path


def load(path: str | Path, split: str) -> Tensor:
    """All images of a split: float32, (N, C, H, W)."""
    with open_store(path) as store:
        return store[split][:]


def open_store(path: str | Path) -> "Store":
    """A file that `write_store` completed; close it, or use it in a `with`."""
    path = Path(path)
    file = open_hdf5(path)
    if "namm_version" not in file.attrs:
        file.close()
        raise DataError(f"{path} was not written by namm: read it with read_images and say its layout.")
    return Store(file, path)


class Store:
    """An open file: `store["train"]` is indexed like a tensor (N, C, H, W) and read on demand."""

    def __init__(self, file: h5py.File, path: Path):
        self._file, self.path = file, path
        self.parameters = dict(partial.attributes(file))
        """The recipe: dataset, its parameters, seed, images per split, version."""

    @property
    def sizes(self) -> dict[str, int]:
        """Images per split."""
        return {split: len(self._file[split]) for split in SPLITS}

    def __getitem__(self, split: str) -> LazyImages:
        if not self.sizes.get(split):
            raise DataError(f"{self.path} holds no {split!r} images: it has {self.sizes}.")
        return LazyImages(self._file[split], "NCHW", self.path)

    def damaged(self) -> list[partial.Block]:
        """(split, number) of every block of 64 images whose pixels no longer match their checksum."""
        return partial.unwritten(self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _counts(sizes: Mapping[str, int]) -> dict[str, int]:
    if set(sizes) - set(SPLITS) or min(sizes.values(), default=0) < 0 or not sum(sizes.values()):
        raise UsageError(
            f"Sizes must give images to some of the splits {', '.join(SPLITS)}, and {dict(sizes)} was given."
        )
    return {split: sizes.get(split, 0) for split in SPLITS}


def _header(dataset: Dataset, counts: dict[str, int], seed: int) -> partial.Header:
    recipe = {name: "none" if value is None else value for name, value in dataset.parameters().items()}
    given = {"seed": seed, "block": BLOCK, **{f"n_{split}": n for split, n in counts.items()}}
    return {"dataset": dataset.name, **recipe, **given, "namm_version": __version__}


def _draw(
    file: h5py.File, blocks: list[partial.Block], dataset: Dataset, seed: int, total: int, *, quiet: bool
) -> None:
    done = total - sum(_rows(file, block) for block in blocks)
    with ProgressBar(f"{dataset.name} images", total, start=done, visible=not quiet) as bar:
        for split in SPLITS:
            numbers = [k for name, k in blocks if name == split]
            for k, images in zip(numbers, dataset.blocks(seed, split, numbers), strict=True):
                n = _rows(file, (split, k))
                partial.write_block(file, (split, k), images[:n].numpy())
                bar.advance(n)


def _rows(file: h5py.File, block: partial.Block) -> int:
    """Images of a block; the last of a split may have fewer than the others."""
    split, k = block
    return min(BLOCK, len(file[split]) - k * BLOCK)
