"""Blocks made together, as a GPU makes them: the same images as one block at a time, in bounded memory."""

import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from namm.datasets import (
    DATASETS,
    BlackHoles,
    BurgersTrajectories,
    DarcyFlow,
    Galaxies,
    KolmogorovFlow,
    Simulated,
    UnitCells,
    load,
    write_store,
)
from namm.experiments.engine import build
from namm.experiments.presets import preset
from namm.numerics import generator

GPU = torch.cuda.is_available()  # asked before the tests hide it

SMALL = {
    "black-holes": BlackHoles(size=6),
    "burgers": BurgersTrajectories(size=8),
    "darcy": DarcyFlow(size=8),
    "kolmogorov": KolmogorovFlow(size=16, rows=1, columns=2, start=0.1, inner_steps=5),
    "galaxies": Galaxies(size=16, count=3),
    "unit-cells": UnitCells(size=8, threshold=None),
}
"""Each small, and its images continuous in its random numbers."""


@dataclass(frozen=True)
class Noise(Simulated):
    """Images that are their noise; remembers how many were made at a time, and by which threads drawn."""

    name: ClassVar[str] = "noise"
    sizes: ClassVar[dict[str, int]] = {"train": 10}
    made: ClassVar[list[int]] = []
    threads: ClassVar[set[int]] = set()

    @property
    def shape(self):
        return 2, 4, 4

    def ingredients(self, n, rng):
        self.threads.add(threading.get_ident())
        return torch.rand(n, generator=rng), torch.randn(n, *self.shape, generator=rng)

    def make(self, ingredients):
        scale, white = ingredients
        self.made.append(len(white))
        return scale[:, None, None, None] * white


@pytest.fixture
def noise(monkeypatch):
    monkeypatch.setattr(Noise, "made", [])
    monkeypatch.setattr(Noise, "threads", set())
    return Noise()


@pytest.mark.parametrize("name", SMALL)
def test_blocks_made_together_are_the_blocks_made_alone(name):
    recipe, numbers = SMALL[name], [0, 5, 2]
    together = list(recipe.blocks_on("cpu", 3, "val", numbers))
    assert [block.shape for block in together] == [(64, *recipe.shape)] * 3
    for k, block in zip(numbers, together, strict=True):
        torch.testing.assert_close(block, recipe.block(3, "val", k), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_an_image_is_made_of_its_own_random_numbers_alone(name):
    recipe = SMALL[name]
    ingredients = recipe.ingredients(4, generator(0))
    whole = recipe.make(ingredients)
    assert torch.equal(whole, recipe.draw(4, generator(0)))
    others = recipe.ingredients(4, generator(1))
    mixed = tuple(torch.cat([b[:3], a[2:3]]) for a, b in zip(ingredients, others, strict=True))
    torch.testing.assert_close(recipe.make(mixed)[3], whole[2], rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not GPU, reason="no GPU here")
@pytest.mark.parametrize("name", SMALL)
def test_a_gpu_makes_the_same_images_but_for_rounding(name):
    recipe = SMALL[name]
    for k, block in zip((1, 4), recipe.blocks_on("cuda", 0, "train", [1, 4]), strict=True):
        assert block.device.type == "cpu"
        torch.testing.assert_close(block, recipe.block(0, "train", k), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("at_once", "made"), [(2**24, [320]), (2 * 64 * 32, [128, 128, 64]), (1, [64] * 5)])
def test_no_more_are_made_at_a_time_than_fit(monkeypatch, noise, at_once, made):
    monkeypatch.setattr(Noise, "at_once", at_once)
    blocks = list(noise.blocks_on("cpu", 0, "test", range(5)))
    assert noise.made == made
    assert torch.equal(torch.cat(blocks), noise.images(0, "test", 0, 320))


@dataclass(frozen=True)
class Cramped(Noise):
    """On a device whose memory is too small for more than `most` images."""

    most: int = 128

    def make(self, ingredients):
        images = super().make(ingredients)
        if len(images) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return images


@pytest.mark.parametrize(("most", "tried"), [(128, [320, 128, 128, 64]), (64, [320, 128, *[64] * 5])])
def test_where_memory_is_short_fewer_blocks_are_made_together(noise, most, tried):
    expected = noise.images(0, "test", 0, 320)
    noise.made.clear()
    assert torch.equal(torch.cat(list(Cramped(most).blocks_on("cpu", 0, "test", range(5)))), expected)
    assert noise.made == tried


def test_memory_too_short_for_one_block_is_said(noise):
    with pytest.raises(torch.OutOfMemoryError):
        list(Cramped(63).blocks_on("cpu", 0, "test", range(5)))
    assert noise.made == [320, 128, 64]


def test_blocks_are_made_as_they_are_asked_for(monkeypatch, noise):
    monkeypatch.setattr(Noise, "at_once", 1)
    blocks = noise.blocks_on("cpu", 0, "test", range(1000))
    next(blocks)
    assert noise.made == [64]
    blocks.close()


def test_a_cpu_makes_block_after_block_in_the_calling_thread(noise):
    noise.images(0, "train", 30, 150)
    assert noise.made == [64, 64, 64]
    assert noise.threads == {threading.get_ident()}


def test_a_gpu_is_given_many_blocks_and_the_store_the_same_images(monkeypatch, tmp_path, noise):
    """The GPU's way on a CPU: what is written, and what is read in pieces, comes from few large batches."""
    expected = noise.images(4, "train", 0, 200)
    noise.made.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_the_way = Simulated.blocks_on
    asked = []

    def on_cpu(self, device, *which):
        asked.append(torch.device(device).type)
        return on_the_way(self, "cpu", *which)

    monkeypatch.setattr(Simulated, "blocks_on", on_cpu)
    path = write_store(tmp_path / "x.h5", noise, {"train": 200}, seed=4, quiet=True)
    assert noise.made == [256]
    assert torch.equal(noise.images(4, "train", 70, 130), expected[70:130])
    assert noise.made == [256, 128]
    assert set(asked) == {"cuda"}
    assert torch.equal(load(path, "train"), expected)


@pytest.mark.parametrize("experiment", ["flux", "burgers", "divergence", "periodic", "count"])
def test_the_default_recipes_and_sizes_are_the_paper_presets(experiment):
    data = preset(experiment, "paper").settings.data
    recipe = build.dataset(data)
    assert recipe == DATASETS[recipe.name]()
    assert data.sizes["train"] == recipe.sizes["train"]
