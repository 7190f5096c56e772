"""How metrics read images."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from namm.errors import DataError
from namm.evaluation import mmd, mmd_floor
from namm.evaluation.rows import View, held, read


class Disk:
    """Images that count how often they are read."""

    def __init__(self, images):
        self.images, self.shape, self.reads = images, tuple(images.shape), 0

    def __getitem__(self, index):
        self.reads += 1
        return self.images[index]


@pytest.fixture
def images():
    return torch.randn(20, 1, 3, 2, generator=torch.Generator().manual_seed(0))


def test_what_is_held_is_read_once(images):
    disk = Disk(images)
    copy = held(disk)
    assert isinstance(copy, torch.Tensor)
    assert torch.equal(copy, images)
    assert held(copy) is copy
    assert disk.reads == 1


def test_subsets_are_drawn_from_memory(images):
    disk = Disk(images)
    assert mmd(disk, images + 1, subsets=5, size=8) == mmd(images, images + 1, subsets=5, size=8)
    assert disk.reads == 1
    assert mmd_floor(disk, subsets=5, size=8) == mmd_floor(images, subsets=5, size=8)
    assert disk.reads == 2


def test_a_view_keeps_its_rows_and_their_numbers(images):
    images[7] = torch.nan
    view = held(View(Disk(images), np.array([2, 5, 7])))
    assert torch.equal(view[:2], images[[2, 5]])
    with pytest.raises(DataError, match="image 7 of the samples"):
        read(view, slice(None), "samples")


def test_what_would_fill_the_memory_stays_on_disk(images, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * 4 * images.numel() - 1))
    disk = Disk(images)
    assert held(disk) is disk
    assert disk.reads == 0
