"""What a dataset is: a recipe that draws images in fixed blocks.

Image i of a split is row i mod 64 of block ⌊i/64⌋, and a block is a pure function of (seed, split, ⌊i/64⌋).
An image therefore depends on (seed, split, i) only: not on how many are drawn, in which pieces, or after
which interruption. The three splits come from separate random streams.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from namm.errors import UsageError
from namm.numerics import generator

BLOCK = 64
"""Images per block. Part of what a seed means, so not a setting."""

SPLITS = ("train", "val", "test")


@dataclasses.dataclass(frozen=True)
class Dataset(ABC):
    """A recipe for images; subclasses are frozen dataclasses whose fields are the generating parameters."""

    name: ClassVar[str]
    sizes: ClassVar[dict[str, int]]
    """Images per split as in the paper."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""

    @abstractmethod
    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """`n` images: float32, (n, C, H, W)."""

    def parameters(self) -> dict[str, bool | int | float | str | None]:
        """Everything that shapes an image besides the seed, as plain values."""
        return dataclasses.asdict(self)

    def stream(self, seed: int, split: str, k: int) -> torch.Generator:
        """What the randomness of block `k` of a split comes from."""
        if split not in SPLITS:
            raise UsageError(f"There is no split {split!r}; the splits are {', '.join(SPLITS)}.")
        return generator(seed, "dataset", self.name, split, k)

    def blocks(self, seed: int, split: str, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Blocks of a split in the order of `numbers`: (64, C, H, W) each."""
        for k in numbers:
            yield self.draw(BLOCK, self.stream(seed, split, k))

    def block(self, seed: int, split: str, k: int) -> Tensor:
        """Block `k` of a split: (64, C, H, W)."""
        return next(self.blocks(seed, split, [k]))

    def pieces(self, seed: int, split: str, start: int, stop: int) -> Iterator[Tensor]:
        """Images `start` to `stop` of a split in order, a block or the needed part of one at a time."""
        if not 0 <= start <= stop:
            raise UsageError(f"Images {start} to {stop} were asked for; need 0 <= start <= stop.")
        numbers = range(start // BLOCK, -(-stop // BLOCK) if start < stop else 0)
        for k, block in zip(numbers, self.blocks(seed, split, numbers), strict=True):
            yield block[max(0, start - k * BLOCK) : stop - k * BLOCK]

    def images(self, seed: int, split: str, start: int, stop: int) -> Tensor:
        """Images `start` to `stop` of a split: float32, (stop − start, C, H, W)."""
        images = torch.empty(max(0, stop - start), *self.shape)
        done = 0
        for piece in self.pieces(seed, split, start, stop):
            images[done : done + len(piece)] = piece
            done += len(piece)
        return images
