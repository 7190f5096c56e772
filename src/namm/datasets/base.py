"""What a dataset is: a recipe that draws images in fixed blocks.

Image i of a split is row i mod 64 of block ⌊i/64⌋, and a block is a pure function of (seed, split, ⌊i/64⌋).
An image therefore depends on (seed, split, i) only: not on how many are drawn, in which pieces, or after
which interruption. The three splits come from separate random streams.

The randomness of a `Simulated` dataset is apart from what is made of it, so that a GPU makes many blocks at once: a
block's random numbers come from its own stream on the CPU, whatever the images are made on, and every image is made
of its own row alone. How many blocks go together, and where, changes rounding and nothing else.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor

from namm.errors import UsageError
from namm.numerics import generator

BLOCK = 64
"""Images per block. Part of what a seed means, so not a setting."""

SPLITS = ("train", "val", "test")

Ingredients = tuple[Tensor, ...]
"""Everything that is random in n images: tensors (n, …), a row per image."""


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
        """Draw `n` images: float32, (n, C, H, W)."""

    def parameters(self) -> dict[str, bool | int | float | str | None]:
        """Everything that shapes an image besides the seed, as plain values."""
        return dataclasses.asdict(self)

    def stream(self, seed: int, split: str, k: int) -> torch.Generator:
        """Random numbers of block `k` of a split."""
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


class Simulated(Dataset):
    """A dataset made in two steps: random numbers, and images of them. It is made on a GPU where there is one."""

    at_once: ClassVar[int] = 2**24
    """Pixels, of all channels, that a GPU makes at a time: enough to keep it busy, few enough for its memory."""

    @abstractmethod
    def ingredients(self, n: int, rng: torch.Generator) -> Ingredients:
        """What is random in `n` images. Several threads call this at a time, each with a generator of its own."""

    @abstractmethod
    def make(self, ingredients: Ingredients) -> Tensor:
        """Images, float32 (n, C, H, W), of what `ingredients` drew, on its device, each of its own row alone."""

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        """Draw `n` images: float32, (n, C, H, W), on the generator's device."""
        return self._make_on(_device(), [self.ingredients(n, rng)]).to(rng.device)

    def blocks(self, seed: int, split: str, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Blocks of a split in the order of `numbers`: (64, C, H, W) each; one at a time on a CPU, many on a GPU."""
        device = _device()
        # A CPU's caches hold one block better than many, and its cores are busy without threads of ours.
        one_by_one = device.type == "cpu"
        return super().blocks(seed, split, numbers) if one_by_one else self.blocks_on(device, seed, split, numbers)

    def blocks_on(self, device: torch.device | str, seed: int, split: str, numbers: Sequence[int]) -> Iterator[Tensor]:
        """The same blocks, made on `device` as many at a time as `at_once` says and fit; they come back on the CPU."""
        together = fits = max(1, self.at_once // (BLOCK * math.prod(self.shape)))
        streams = [self.stream(seed, split, k) for k in numbers]
        with ThreadPoolExecutor(thread_name_prefix="namm-draw") as pool:

            def draw_from(start: int) -> list[Future[Ingredients]]:
                return [pool.submit(self.ingredients, BLOCK, rng) for rng in streams[start : start + together]]

            ahead = draw_from(0)
            for start in range(0, len(streams), together):
                now, ahead = ahead, draw_from(start + together)  # random numbers are drawn while the device works
                drawn = [each.result() for each in now]
                while drawn:
                    try:
                        images = self._make_on(device, drawn[:fits]).cpu()
                    except torch.OutOfMemoryError:
                        fits = min(fits, len(drawn)) // 2
                        if not fits:
                            raise
                        continue
                    drawn = drawn[fits:]
                    yield from images.split(BLOCK)

    def _make_on(self, device: torch.device | str, drawn: Sequence[Ingredients]) -> Tensor:
        return self.make(tuple(torch.cat([part.to(device) for part in parts]) for parts in zip(*drawn, strict=True)))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
