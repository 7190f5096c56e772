"""Datasets whose randomness is apart from what is made of it, so that a GPU makes many blocks at once.

A block's random numbers come from its own stream on the CPU, whatever it is made on and with. What is then made of
them treats every image by itself: how many blocks go together, and where, changes rounding and nothing else.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor

from namm.datasets.base import BLOCK, Dataset

Ingredients = tuple[Tensor, ...]
"""Everything that is random in n images: tensors (n, …), a row per image."""


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
        """`n` images: float32, (n, C, H, W), on the generator's device."""
        return self._made([self.ingredients(n, rng)], _device()).to(rng.device)

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
                        made = self._made(drawn[:fits], device).cpu()
                    except torch.OutOfMemoryError:
                        fits = min(fits, len(drawn)) // 2
                        if not fits:
                            raise
                        continue
                    drawn = drawn[fits:]
                    yield from made.split(BLOCK)

    def _made(self, drawn: Sequence[Ingredients], device: torch.device | str) -> Tensor:
        return self.make(tuple(torch.cat([part.to(device) for part in parts]) for parts in zip(*drawn, strict=True)))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
