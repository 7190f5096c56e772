"""`namm data`: the file against the recipe, and what is never overwritten."""

import h5py
import numpy as np
import pytest

from namm.cli import main
from namm.datasets import BlackHoles, BurgersTrajectories, Galaxies, KolmogorovFlow, UnitCells


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SIZES = ["--n-train", "70", "--n-val", "3", "--n-test", "0"]


@pytest.mark.parametrize(
    ("name", "options", "recipe"),
    [
        ("unit-cells", ["--size", "8", "--tiles", "4"], UnitCells(size=8, tiles=4)),
        ("periodic", ["--size", "8", "--threshold", "None"], UnitCells(size=8, threshold=None)),
        (
            "burgers",
            ["--size", "8", "--dt", "0.05", "--no-flipped"],
            BurgersTrajectories(size=8, dt=0.05, flipped=False),
        ),
    ],
)
def test_draws_what_was_asked_for(tmp_path, capsys, name, options, recipe):
    assert main(["data", name, *SIZES, "--seed", "5", "--out", "deep/x.h5", *options]) == 0
    assert "70 train, 3 val, 0 test images of 1×8×8" in capsys.readouterr().out
    with h5py.File(tmp_path / "deep" / "x.h5") as file:
        assert [len(file[split]) for split in ("train", "val", "test")] == [70, 3, 0]
        np.testing.assert_array_equal(file["train"][:], recipe.images(5, "train", 0, 70))


@pytest.mark.parametrize(
    ("names", "options", "recipe"),
    [
        (("black-holes", "flux"), ["--size", "16", "--total", "50"], BlackHoles(size=16, total=50.0)),
        (("galaxies", "count"), ["--size", "32", "--count", "3"], Galaxies(size=32, count=3)),
        (
            ("kolmogorov", "divergence"),
            ["--size", "16", "--rows", "1", "--columns", "2", "--start", "0.1"],
            KolmogorovFlow(size=16, rows=1, columns=2, start=0.1),
        ),
    ],
)
def test_a_dataset_has_its_own_name_and_its_experiments(tmp_path, names, options, recipe):
    for name in names:
        assert main(["data", name, "--n-train", "2", "--n-val", "0", "--n-test", "0", *options]) == 0
        with h5py.File(tmp_path / f"{name}.h5") as file:
            np.testing.assert_array_equal(file["train"][:], recipe.images(0, "train", 0, 2))


def test_a_file_of_other_settings_is_not_overwritten(tmp_path, capsys):
    assert main(["data", "periodic", *SIZES, "--size", "8"]) == 0
    before = (tmp_path / "periodic.h5").read_bytes()
    assert main(["data", "periodic", *SIZES, "--size", "8"]) == 0
    assert "already holds" in capsys.readouterr().out
    assert main(["data", "periodic", *SIZES, "--size", "12"]) == 1
    assert "size: 8 -> 12" in capsys.readouterr().err
    assert (tmp_path / "periodic.h5").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unitcells"], "Did you mean 'unit-cells'?"),
        (["periodic", "--siez", "8"], "--size"),
        (["periodic", "--size", "7"], "cannot be cut into 2 tiles"),
        (["periodic", "--n-train", "-1"], "n_train must be 0 or more, not -1"),
        (["periodic", "--n-train", "0", "--n-val", "0", "--n-test", "0"], "ask for some images"),
        (["--size", "8"], "which dataset?"),
        (["periodic", "--out", "."], "must name an HDF5 file, such as periodic.h5"),
        (["periodic", "--out", "cells.txt"], "not cells.txt"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, message):
    assert main(["data", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    assert not list(tmp_path.iterdir())
