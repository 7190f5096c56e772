"""The HDF5 store: contents against the recipe, and against everything that can cut a writer short."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm import __version__
from namm.datasets import (
    SPLITS,
    BurgersTrajectories,
    UnitCells,
    load,
    open_store,
    read_images,
    write_store,
)
from namm.errors import DataError, RunFolderError, UsageError

RECIPE = UnitCells(size=8)
SIZES = {"train": 200, "val": 64, "test": 10}
TOTAL_BLOCKS = 4 + 1 + 1


class StoppedError(Exception):
    """Stands for anything that ends a writer."""


class Interrupted(UnitCells):
    """Draws a few blocks, then fails."""

    left = 0

    def draw(self, n, rng):
        if Interrupted.left == 0:
            raise StoppedError
        Interrupted.left -= 1
        return super().draw(n, rng)


def write_part(path, blocks, **parameters):
    """Leave a `.partial` file with so many blocks written; how many were drawn is returned."""
    Interrupted.left = blocks
    try:
        write_store(path, Interrupted(size=8, **parameters), SIZES, quiet=True)
    except StoppedError:
        return blocks
    return blocks - Interrupted.left


def assert_holds_the_recipe(path, recipe=RECIPE, sizes=SIZES, seed=0):
    with h5py.File(path, "r") as file:  # without our reader
        for split in SPLITS:
            assert file[split].dtype == np.float32
            np.testing.assert_array_equal(file[split][:], recipe.images(seed, split, 0, sizes.get(split, 0)))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_splits_and_recipe_are_in_the_file(tmp_path):
    path = tmp_path / "deep" / "cells.h5"
    recipe = UnitCells(size=8, threshold=None, length=0.3)
    assert write_store(path, recipe, SIZES, seed=7, quiet=True) == path
    assert_holds_the_recipe(path, recipe, seed=7)
    with h5py.File(path, "r") as file:
        assert file["train"].chunks is not None
        assert {name: value for name, value in file.attrs.items() if name != "sha256"} == {
            "dataset": "unit-cells",
            "size": 8,
            "tiles": 2,
            "scale": 0.7,
            "length": 0.3,
            "mean": 0.5,
            "threshold": "none",
            "seed": 7,
            "block": 64,
            "n_train": 200,
            "n_val": 64,
            "n_test": 10,
            "namm_version": __version__,
        }


def test_reading_back(tmp_path):
    path = write_store(tmp_path / "x.h5", RECIPE, {"train": 100, "val": 5}, quiet=True)
    expected = RECIPE.images(0, "train", 0, 100)
    assert torch.equal(load(path, "train"), expected)
    assert torch.equal(read_images(path, key="train"), expected)
    with open_store(path) as store:
        assert store.sizes == {"train": 100, "val": 5, "test": 0}
        assert store.parameters["length"] == 0.7
        assert torch.equal(store["train"][[99, 0]], expected[[99, 0]])
        assert store.damaged() == []
        with pytest.raises(DataError, match="holds no 'test' images"):
            store["test"]
        with pytest.raises(DataError, match="holds no 'valid' images"):
            store["valid"]


def test_paper_sizes_are_the_default():
    assert BurgersTrajectories.sizes == {"train": 10_000, "val": 1000, "test": 10_000}
    assert UnitCells.sizes == {"train": 30_000, "val": 300, "test": 10_000}


@pytest.mark.parametrize("blocks", range(TOTAL_BLOCKS + 1))
def test_an_interrupted_call_goes_on_where_it_stopped(tmp_path, blocks):
    path = tmp_path / "x.h5"
    assert write_part(path, blocks) == blocks
    assert path.exists() == (blocks == TOTAL_BLOCKS)
    assert write_part(path, TOTAL_BLOCKS) == TOTAL_BLOCKS - blocks
    assert_holds_the_recipe(path)


def test_a_complete_file_is_left_alone(tmp_path):
    path = write_store(tmp_path / "x.h5", RECIPE, SIZES, quiet=True)
    before = path.stat()
    assert write_part(path, 0) == 0
    assert write_store(path, RECIPE, SIZES, quiet=True) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("blocks", [2, TOTAL_BLOCKS], ids=["partial", "complete"])
def test_other_parameters_are_refused_and_named(tmp_path, blocks):
    path = tmp_path / "x.h5"
    write_part(path, blocks)
    found = path if blocks == TOTAL_BLOCKS else tmp_path / "x.h5.partial"
    before = found.read_bytes()
    with pytest.raises(RunFolderError, match=r"length: 0\.7 -> 0\.2; n_val: 64 -> 1; seed: 0 -> 5"):
        write_store(path, UnitCells(size=8, length=0.2), {**SIZES, "val": 1}, seed=5, quiet=True)
    with pytest.raises(RunFolderError, match=r"dataset: unit-cells -> burgers"):
        write_store(path, BurgersTrajectories(size=8), SIZES, quiet=True)
    assert found.read_bytes() == before


def test_foreign_files_are_not_overwritten(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["mine"] = 1
    with pytest.raises(RunFolderError, match="dataset: absent -> unit-cells"):
        write_store(path, RECIPE, SIZES, quiet=True)
    with pytest.raises(DataError, match="was not written by namm"):
        open_store(path)
    path.write_text("mine")
    with pytest.raises(RunFolderError, match="not a readable HDF5 file"):
        write_store(path, RECIPE, SIZES, quiet=True)
    assert path.read_text() == "mine"


def test_another_version_finishes_nothing_but_may_have_finished(tmp_path, monkeypatch):
    write_part(tmp_path / "x.h5", 3)
    write_part(tmp_path / "y.h5", TOTAL_BLOCKS)
    monkeypatch.setattr("namm.datasets.store.__version__", "99")
    assert write_part(tmp_path / "x.h5", TOTAL_BLOCKS) == TOTAL_BLOCKS
    assert write_part(tmp_path / "y.h5", 0) == 0


@given(blocks=st.integers(0, TOTAL_BLOCKS - 1), keep=st.floats(0, 1))
def test_a_truncated_partial_file_is_begun_anew(tmp_path_factory, blocks, keep):
    path = tmp_path_factory.mktemp("cut") / "x.h5"
    write_part(path, blocks)
    partial = path.with_name("x.h5.partial")
    os.truncate(partial, int(keep * partial.stat().st_size))
    write_store(path, RECIPE, SIZES, quiet=True)
    assert_holds_the_recipe(path)


def test_a_file_whose_inspection_fails_is_filled_all_the_same(tmp_path, monkeypatch):
    """The process that looks into files may be ended, as where memory is short: nothing is then known to be written."""

    def refuse(path):
        raise DataError(f"{path} cannot be read as HDF5")

    path = tmp_path / "images.h5"
    with monkeypatch.context() as patch:
        patch.setattr("namm.datasets.store.open_hdf5", refuse)
        write_store(path, RECIPE, SIZES, quiet=True)
    assert_holds_the_recipe(path)


def spoil(path, split, image):
    """Change one bit of an image's pixels behind HDF5's back."""
    with h5py.File(path, "r") as file:
        chunk = file[split].id.get_chunk_info(0)
        assert file[split].chunks[0] > image
        offset = chunk.byte_offset + image * file[split][0].nbytes + 5
    with path.open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 64]))


@given(split=st.sampled_from(["train", "val"]), image=st.integers(0, 63))
def test_a_damaged_block_is_drawn_again_and_no_other(tmp_path_factory, split, image):
    path = tmp_path_factory.mktemp("bit") / "x.h5"
    write_part(path, 5)
    spoil(path.with_name("x.h5.partial"), split, image)
    assert write_part(path, TOTAL_BLOCKS) == 2
    assert_holds_the_recipe(path)
    spoil(path, split, image)
    with open_store(path) as store:
        assert store.damaged() == [(split, 0)]


def test_two_writers_do_not_meet(tmp_path):
    path = tmp_path / "x.h5"
    with (tmp_path / "x.h5.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="in use by another process"):
            write_store(path, RECIPE, SIZES, quiet=True)
        assert not path.exists()
    write_store(path, RECIPE, SIZES, quiet=True)
    assert_holds_the_recipe(path)


def test_a_writer_is_alone_while_it_writes(tmp_path):
    path = tmp_path / "x.h5"

    class Nested(UnitCells):
        def draw(self, n, rng):
            with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}:"):
                write_store(path, RECIPE, SIZES, quiet=True)
            return super().draw(n, rng)

    write_store(path, Nested(size=8), SIZES, quiet=True)
    assert_holds_the_recipe(path)


def test_the_layout_is_final_before_the_first_block(tmp_path):
    """Where every chunk lies is fixed at the start, so that a kill cannot catch HDF5's index half changed."""

    def chunks(path):
        with h5py.File(path, "r") as file:
            ids = [file[split].id for split in SPLITS]
            return [i.get_chunk_info(k).byte_offset for i in ids for k in range(i.get_num_chunks())]

    path = tmp_path / "x.h5"
    write_part(path, 0)
    before, size = chunks(tmp_path / "x.h5.partial"), (tmp_path / "x.h5.partial").stat().st_size
    write_part(path, TOTAL_BLOCKS)
    assert chunks(path) == before
    assert None not in before
    assert path.stat().st_size == size


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"file/x\.h5 cannot be written"):
        write_store(tmp_path / "file" / "x.h5", RECIPE, SIZES, quiet=True)


@pytest.mark.parametrize("sizes", [{}, {"train": 0}, {"train": -1, "val": 5}, {"valid": 5}])
def test_sizes_without_meaning_are_refused(tmp_path, sizes):
    with pytest.raises(UsageError, match="Sizes must give images to some of the splits train, val, test"):
        write_store(tmp_path / "x.h5", RECIPE, sizes)
    assert not list(tmp_path.iterdir())


def test_progress_is_shown_on_a_terminal_unless_quiet(tmp_path, capsys, monkeypatch):
    write_store(tmp_path / "a.h5", RECIPE, SIZES)
    monkeypatch.setenv("FORCE_COLOR", "1")  # stderr counts as a terminal
    write_store(tmp_path / "b.h5", RECIPE, SIZES, quiet=True)
    assert capsys.readouterr() == ("", "")
    write_store(tmp_path / "c.h5", RECIPE, SIZES)
    printed = capsys.readouterr()
    assert (printed.out, "274/274" in printed.err) == ("", True)


KILLED = {"size": 32}
KILLED_SIZES = {"train": 6000, "val": 100, "test": 70}

# A writer that kills itself the nth time it reaches a function; without one it is killed from outside.
WRITER = f"""
import os, signal, sys
path, place, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
import h5py
from namm import files
from namm.datasets import UnitCells, write_store
owner, name = {{
    "lay out": (h5py.AttributeManager, "__setitem__"),
    "begin": (os, "replace"),
    "write": (h5py.Dataset, "__setitem__"),
    "flush": (h5py.File, "flush"),
    "publish": (files, "rename_durably"),
}}.get(place, (None, None))
if owner:
    real = getattr(owner, name)
    def deadly(*args, **kwargs):
        global count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(owner, name, deadly)
print("ready", flush=True)
write_store(path, UnitCells(**{KILLED}), {KILLED_SIZES}, quiet=True)
"""


def start(path, place="outside", count=0):
    command = [sys.executable, "-c", WRITER, str(path), place, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "moments",
    [[("lay out", 3), ("write", 7), ("publish", 1)], [("begin", 1), ("flush", 2)]],
    ids=["three", "two"],
)
def test_killed_at_chosen_moments_the_writer_goes_on(tmp_path, moments):
    path = tmp_path / "x.h5"
    for place, count in moments:
        with start(path, place, count) as writer:
            assert writer.wait() == -signal.SIGKILL
        assert not path.exists()
        assert path.with_name("x.h5.partial").exists() == (place not in ("lay out", "begin"))
    write_store(path, UnitCells(**KILLED), KILLED_SIZES, quiet=True)
    assert_holds_the_recipe(path, UnitCells(**KILLED), KILLED_SIZES)


def test_killed_at_random_moments_the_writer_goes_on(tmp_path):
    path, rng = tmp_path / "x.h5", random.Random(0)
    partial = tmp_path / "x.h5.partial"
    for _ in range(3):
        with start(path) as writer:
            writer.stdout.readline()
            while writer.poll() is None and not partial.exists():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.15))
            writer.kill()
    write_store(path, UnitCells(**KILLED), KILLED_SIZES, quiet=True)
    assert_holds_the_recipe(path, UnitCells(**KILLED), KILLED_SIZES)


def test_a_file_is_checked_where_it_was_opened(tmp_path, monkeypatch):
    """By its handle: neither another working folder nor another file of its name changes which one that is."""
    monkeypatch.chdir(tmp_path)
    write_store("cells.h5", RECIPE, SIZES, quiet=True)
    with open_store(Path("cells.h5")) as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        before = store["train"][:]
        Path(tmp_path / "cells.h5").rename(tmp_path / "old.h5")
        write_store(tmp_path / "cells.h5", RECIPE, SIZES, quiet=True)
        with h5py.File(tmp_path / "cells.h5", "r+") as file:
            file["train"][0, 0, 0, 0] = 99
        assert np.array_equal(store["train"][:], before)
    with open_store(tmp_path / "cells.h5") as store, pytest.raises(DataError, match="do not match their checksum"):
        store["train"][:]
