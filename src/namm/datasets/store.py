"""One HDF5 file per dataset: `train`, `val`, `test`, each float32 (N, C, H, W), and the recipe as attributes.

Writing can be stopped at any moment, `kill -9` included; the same call then goes on, and the file it
completes holds what an uninterrupted run would have written.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import h5py
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from namm._version import __version__
from namm.datasets import partial
from namm.datasets.base import BLOCK, SPLITS, Dataset
from namm.datasets.lazy import LazyImages
from namm.datasets.readers import open_hdf5
from namm.errors import DataError, RunFolderError, UsageError
from namm.files import differences

Header = dict[str, bool | int | float | str]


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
    complete file of the same recipe is left alone, one of another recipe is refused.
    """
    path = Path(path)
    counts = _counts(dataset.sizes if sizes is None else sizes)
    header = _header(dataset, counts, seed)
    with partial.only_writer(path):
        if path.exists():
            _require_same(path, _read_header(path), header)
            return path
        growing = partial.beside(path, ".partial")
        blocks = _unwritten(growing, header)
        if blocks is None:
            partial.begin(growing, dataset.shape, counts, header)
            blocks = _unwritten(growing, header) or []
        _draw(growing, blocks, dataset, seed, quiet=quiet)
        partial.publish(growing, path)
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
        self.parameters = _attributes(file)
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


def _header(dataset: Dataset, counts: dict[str, int], seed: int) -> Header:
    recipe = {name: "none" if value is None else value for name, value in dataset.parameters().items()}
    given = {"seed": seed, "block": BLOCK, **{f"n_{split}": n for split, n in counts.items()}}
    return {"dataset": dataset.name, **recipe, **given, "namm_version": __version__}


def _attributes(file: h5py.File) -> Header:
    return {name: value.item() if hasattr(value, "item") else value for name, value in file.attrs.items()}


def _read_header(path: Path) -> Header:
    try:
        with h5py.File(path, "r") as file:
            return _attributes(file)
    except OSError as error:
        raise RunFolderError(f"{path} exists and is not a readable HDF5 file ({error}): move it away.") from error


def _require_same(path: Path, there: Header, asked: Header) -> None:
    # Another version's complete file is as good as ours: what it was drawn from is in the other attributes.
    if found := differences(there, asked | {"namm_version": there.get("namm_version", "absent")}):
        raise RunFolderError(
            f"{path} holds other data than asked for ({'; '.join(found)}) and is not overwritten: write to "
            "another path, or remove that file first."
        )


def _unwritten(growing: Path, header: Header) -> list[partial.Block] | None:
    """What is left to draw; None where there is no usable file, so that it is begun anew."""
    try:
        with h5py.File(growing, "r") as file:
            there = _attributes(file)
            _require_same(growing, there, header)
            blocks = partial.unwritten(file)
    except (OSError, KeyError, RuntimeError):
        return None
    return blocks if there["namm_version"] == header["namm_version"] else None


def _draw(growing: Path, blocks: list[partial.Block], dataset: Dataset, seed: int, *, quiet: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with h5py.File(growing, "r+") as file, Progress(*columns, disable=quiet) as bar:
        sizes = {(split, k): min(BLOCK, len(file[split]) - k * BLOCK) for split, k in blocks}
        total = sum(len(file[split]) for split in SPLITS)
        task = bar.add_task(f"{dataset.name} images", total=total, completed=total - sum(sizes.values()))
        for (split, k), n in sizes.items():
            images = dataset.images(seed, split, k * BLOCK, k * BLOCK + n)
            partial.write_block(file, (split, k), images.numpy())
            bar.advance(task, n)
