"""A user's file as a dataset: which arrays, how many images, which of them in which split."""

from itertools import chain

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from namm.datasets import UnitCells, open_store, write_store
from namm.datasets.readers import LazyImages
from namm.datasets.user_files import OwnImages, content_hash, look
from namm.errors import DataError, UsageError

NONE = {"train": 0, "val": 0, "test": 0}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def numbered():
    """Image i holds i everywhere, so that it can be told where it went."""
    return np.broadcast_to(np.arange(100, dtype=np.float32)[:, None, None, None], (100, 3, 8, 8))


def write_h5(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def dataset(tmp_path, name, seed_sizes=NONE, **how):
    found = look(tmp_path / name, **how)
    sizes = found.sizes(seed_sizes)
    return OwnImages(found.path, how.get("key"), found.layout, content_hash(found.path), found.shape, sizes), sizes


def contents(own, sizes, seed=0):
    """Numbers of the images in each split."""
    return {split: own.images(seed, split, 0, n)[:, 0, 0, 0].int().tolist() for split, n in sizes.items()}


def test_a_single_array_is_split_into_disjoint_shares_by_the_seed(tmp_path, numbered):
    write_h5("a.h5", pictures=numbered, other=np.zeros(3))
    own, sizes = dataset(tmp_path, "a.h5")
    assert sizes == {"train": 80, "val": 10, "test": 10}
    found = contents(own, sizes)
    assert sorted(chain(*found.values())) == list(range(100))
    assert found["train"] != list(range(80))
    assert found == contents(own, sizes)
    assert found != contents(own, sizes, seed=1)


def test_asked_numbers_are_kept_and_the_rest_is_trained_on(tmp_path, numbered):
    np.save("a.npy", numbered)
    own, sizes = dataset(tmp_path, "a.npy", {"train": 0, "val": 7, "test": 30})
    assert sizes == {"train": 63, "val": 7, "test": 30}
    own, sizes = dataset(tmp_path, "a.npy", {"train": 20, "val": 7, "test": 30})
    found = contents(own, sizes)
    assert [len(part) for part in found.values()] == [20, 7, 30]
    assert len(set(chain(*found.values()))) == 57
    with pytest.raises(DataError, match="holds 100 images to take 80 for train, 10 for val, 30 for test"):
        dataset(tmp_path, "a.npy", {"train": 80, "val": 0, "test": 30})
    np.save("few.npy", numbered[:12])
    message = "holds 12 images to take 10 for train, 1 for val, 1 for test from: train and test need at least two"
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, "few.npy")
    assert dataset(tmp_path, "few.npy", {"train": 0, "val": 0, "test": 2})[1] == {"train": 9, "val": 1, "test": 2}


def test_splits_of_the_file_are_kept_and_their_images_shuffled(tmp_path, numbered):
    write_h5("a.h5", train=numbered[:50], val=numbered[50:60], test=numbered[60:])
    own, sizes = dataset(tmp_path, "a.h5")
    found = contents(own, sizes)
    assert {split: sorted(part) for split, part in found.items()} == {
        "train": list(range(50)),
        "val": list(range(50, 60)),
        "test": list(range(60, 100)),
    }
    assert found == contents(own, sizes)
    assert found != contents(own, sizes, seed=1)
    own, sizes = dataset(tmp_path, "a.h5", {"train": 5, "val": 0, "test": 3})
    assert sizes == {"train": 5, "val": 10, "test": 3}
    assert contents(own, sizes)["train"] == found["train"][:5]


@pytest.mark.parametrize("splits", [("train", "val", "test"), ("pictures",)])
def test_the_first_images_of_a_split_are_spread_over_a_file_that_drifts(tmp_path, numbered, splits):
    write_h5("a.h5", **dict.fromkeys(splits, numbered))
    own, sizes = dataset(tmp_path, "a.h5")
    for split, part in contents(own, sizes).items():
        first = np.array(part[: len(part) // 2])
        assert first.min() < 40, split
        assert first.max() > 60, split


def test_images_in_random_order_are_read_in_the_files_order(tmp_path, numbered, monkeypatch):
    """A compressed file unpacks many images to read one, and would do so for each."""
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("x", data=numbered, compression="gzip", chunks=(50, 1, 4, 4))
    own, _ = dataset(tmp_path, "a.h5")
    whole = own.images(0, "train", 0, 80)
    asked, read = [], LazyImages.__getitem__

    def noted(self, rows):
        asked.append(list(rows))
        return read(self, rows)

    monkeypatch.setattr(LazyImages, "__getitem__", noted)
    assert torch.equal(own.images(0, "train", 0, 80), whole)
    monkeypatch.setattr("namm.datasets.user_files.GROUP_BYTES", 1)
    assert torch.equal(own.images(0, "train", 0, 80), whole)
    assert [len(rows) for rows in asked] == [80, 64, 16]
    assert all(rows == sorted(rows) for rows in asked)


def test_a_split_that_the_file_lacks_comes_out_of_train(tmp_path, numbered):
    np.savez("a.npz", train=numbered[:90], test=numbered[90:])
    own, sizes = dataset(tmp_path, "a.npz")
    assert sizes == {"train": 80, "val": 10, "test": 10}
    found = contents(own, sizes)
    assert sorted(found["test"]) == list(range(90, 100))
    assert sorted(found["train"] + found["val"]) == list(range(90))


def test_an_empty_split_is_none(tmp_path, numbered):
    write_h5("a.h5", train=numbered, val=numbered[:0], test=numbered[:0])
    own, sizes = dataset(tmp_path, "a.h5")
    assert sizes == {"train": 80, "val": 10, "test": 10}
    assert sorted(chain(*contents(own, sizes).values())) == list(range(100))


def test_shapes_are_read_without_the_pixels_and_rows_of_npy_without_the_others(tmp_path, numbered, monkeypatch):
    def everything(*_, **__):
        raise AssertionError("all of the file was read")

    np.save("a.npy", numbered.transpose(0, 2, 3, 1))
    np.savez_compressed("a.npz", x=numbered, label=np.zeros(100))
    monkeypatch.setattr("namm.datasets.user_files.read_images", everything)
    monkeypatch.setattr(np, "load", everything)
    for name in ("a.npy", "a.npz"):
        assert (look(tmp_path / name).shape, look(tmp_path / name).sizes(NONE)["train"]) == ((3, 8, 8), 80)
    own, sizes = dataset(tmp_path, "a.npy")
    assert own.images(0, "train", 0, 3).shape == (3, 3, 8, 8)
    assert sorted(chain(*contents(own, sizes).values())) == list(range(100))


def test_a_value_that_is_no_number_is_found_by_its_own_place(tmp_path, numbered):
    broken = numbered.copy()
    broken[37, 1, 2, 3] = np.nan
    np.save("a.npy", broken)
    own, sizes = dataset(tmp_path, "a.npy")
    with pytest.raises(DataError, match=r"holds nan at index \(37, 1, 2, 3\)"):
        contents(own, sizes)


def test_more_than_a_block_is_copied(tmp_path, numbered):
    write_h5("a.h5", train=numbered, val=numbered[:3], test=numbered[:3])
    own, sizes = dataset(tmp_path, "a.h5")
    write_store("copy.h5", own, sizes, quiet=True)
    with open_store("copy.h5") as store:
        assert torch.equal(store["train"][:].sort(0).values, torch.from_numpy(numbered.copy()))
        assert store.sizes == sizes
        assert store.parameters["content"] == content_hash(tmp_path / "a.h5")


def test_the_layout_is_taken_where_only_one_axis_can_be_the_channels(tmp_path, numbered):
    np.save("first.npy", numbered)
    np.save("last.npy", numbered.transpose(0, 2, 3, 1))
    for name, layout in (("first.npy", "NCHW"), ("last.npy", "NHWC")):
        found = look(tmp_path / name)
        assert (found.layout, found.shape) == (layout, (3, 8, 8))
    np.save("both.npy", numbered[..., :3])
    with pytest.raises(UsageError, match=r"which axis of \(100, 3, 8, 3\) holds the channels: add --data.layout NCHW"):
        look(tmp_path / "both.npy")
    assert look(tmp_path / "both.npy", layout="NHWC").shape == (3, 3, 8)
    write_h5("many.h5", x=np.zeros((4, 8, 8, 8), np.float32))
    with pytest.raises(UsageError, match=r"add --data\.layout"):
        look(tmp_path / "many.h5")


def test_pngs_and_our_own_files_know_their_layout(tmp_path):
    (tmp_path / "pngs").mkdir()
    for k in range(20):
        Image.fromarray(np.full((8, 8), k, np.uint8)).save(tmp_path / "pngs" / f"{k}.png")
    own, sizes = dataset(tmp_path, "pngs")
    assert (own.shape, sizes) == ((1, 8, 8), {"train": 16, "val": 2, "test": 2})
    values = torch.cat([own.images(0, split, 0, n)[:, 0, 0, 0] for split, n in sizes.items()])
    assert sorted((values * 255).round().int().tolist()) == list(range(20))
    before = content_hash(tmp_path / "pngs")
    Image.fromarray(np.full((8, 8), 9, np.uint8)).save(tmp_path / "pngs" / "0.png")
    assert content_hash(tmp_path / "pngs") != before
    write_store("ours.h5", UnitCells(size=8), {"train": 5, "val": 2, "test": 3}, quiet=True)
    found = look(tmp_path / "ours.h5")
    assert (found.layout, found.sizes(NONE)) == (None, {"train": 5, "val": 2, "test": 3})


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("none.h5", {}, "There is no file or folder"),
        ("two.npz", {}, r"holds a \(100, 3, 8, 8\), b .*: say which array the images are \(--data.key NAME\)"),
        ("two.npz", {"key": "c"}, "has no array 'c'; its keys are: a, b"),
        ("flat.h5", {}, r"no array of four axes .*, but x \(100, 8, 8\)\. .* add the channel axis"),
        ("flat.npy", {}, "Add the channel axis"),
        ("flat.h5", {"key": "x"}, "has 3 axes"),
        ("mixed.h5", {}, "images of different shapes, 1×8×8, 3×8×8"),
        ("bad.h5", {}, "cannot be read as HDF5"),
        ("bad.npz", {}, "cannot be read as an NPZ file"),
        ("bad.npy", {}, "cannot be read as an NPY file"),
        ("a.txt", {}, "has the suffix '.txt'"),
        ("one.npy", {"key": "x"}, "the key 'x' has no meaning"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(tmp_path, numbered, name, how, message):
    np.savez("two.npz", a=numbered, b=numbered)
    np.save("one.npy", numbered)
    write_h5("flat.h5", x=numbered[:, 0])
    np.save("flat.npy", numbered[:, 0])
    write_h5("mixed.h5", train=numbered, test=numbered[:, :1])
    for bad in ("bad.h5", "bad.npz", "bad.npy", "a.txt"):
        (tmp_path / bad).write_bytes(b"junk")
    with pytest.raises(DataError, match=message):
        look(tmp_path / name, **how)


def test_a_file_that_became_another_is_noticed(tmp_path, numbered):
    np.save("a.npy", numbered)
    own, _ = dataset(tmp_path, "a.npy")
    np.save("a.npy", numbered[..., :4])
    with pytest.raises(DataError, match="holds other images than it did"):
        own.images(0, "train", 0, 4)


def test_images_of_a_file_are_not_drawn(tmp_path, numbered):
    np.save("a.npy", numbered)
    with pytest.raises(UsageError, match="not drawn"):
        dataset(tmp_path, "a.npy")[0].draw(3, torch.Generator())
