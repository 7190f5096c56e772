"""Files of samples: what is in them, that kills and division change nothing, and that memory does not grow."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from sample_file_child import source, write
from torch import nn

from namm.constraints import Constraint, TotalFlux
from namm.errors import DataError, RunFolderError, UsageError
from namm.generative import DPMSolver, sample_file
from namm.generative.sample_file import SampleFile, write_samples

VALUES = ("images", "mirror_images", "distances")


def in_a_process(*arguments):
    script = Path(__file__).with_name("sample_file_child.py")
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def values(path):
    with h5py.File(path) as file:
        return {name: file[name][:] for name in VALUES}


def assert_same(a, b):
    for name in VALUES:
        np.testing.assert_array_equal(a[name], b[name])


def test_the_file_holds_the_models_samples_and_their_distances(tmp_path):
    with SampleFile(write(tmp_path / "a.h5", n=70, batch_size=64)) as file:
        assert file.parameters["seed"] == 5
        assert file.parameters["weights"] == "random"
        assert file.images.shape == (70, 1, 8, 8)
        y = source().model.sample(70, generator=5, sampler=DPMSolver(3), progress=False)
        assert torch.equal(file.mirror_images[:], y)
        with torch.no_grad():
            torch.testing.assert_close(file.images[:], source().mirror.to_data(y), atol=1e-6, rtol=1e-5)
        np.testing.assert_allclose(file.distances, (file.images[:].sum((1, 2, 3)) - 3).abs(), rtol=1e-4)
        assert 0 < file.compute_seconds < 60


def test_kills_change_nothing(tmp_path):
    codes = in_a_process("kills", tmp_path)
    assert codes == [-9] * 9
    assert_same(values(tmp_path / "killed.h5"), values(tmp_path / "whole.h5"))
    assert len(values(tmp_path / "whole.h5")["images"]) == 400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.h5", "whole.h5"]


def test_a_part_of_a_batch_is_made_with_the_whole_of_it(tmp_path, monkeypatch):
    """As a kill between two blocks of a batch leaves it: values may depend on which samples are made together."""
    from namm.datasets import store

    write_block = store.write_block

    def dying(file, block, rows):
        if block == ("images", 3):
            raise KeyboardInterrupt
        write_block(file, block, rows)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_block", dying)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "a.h5")
    made, sample_pairs = [], type(source()).sample_pairs

    def noted(self, n, **options):
        made.append((options["first"], n))
        return sample_pairs(self, n, **options)

    monkeypatch.setattr(type(source()), "sample_pairs", noted)
    write(tmp_path / "a.h5")
    assert made == [(128, 128), (256, 128), (384, 16)]


def test_one_file_is_two_files_one_after_the_other(tmp_path):
    whole = values(write(tmp_path / "whole.h5", n=200, batch_size=64))
    a = values(write(tmp_path / "a.h5", n=128, batch_size=64))
    b = values(write(tmp_path / "b.h5", n=72, first=128, batch_size=64))
    assert_same(whole, {name: np.concatenate([a[name], b[name]]) for name in VALUES})
    odd = values(write(tmp_path / "odd.h5", n=30, first=50, batch_size=64))
    np.testing.assert_allclose(odd["mirror_images"], whole["mirror_images"][50:80], atol=1e-5)
    assert len(np.unique(whole["mirror_images"].reshape(200, -1), axis=0)) == 200


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path):
    few, many = in_a_process("memory", tmp_path)
    extra = 18_000 * 2 * 16 * 16 * 4
    assert many - few < extra / 5


def test_a_complete_file_is_left_alone_and_another_is_not_overwritten(tmp_path):
    path = write(tmp_path / "a.h5", n=10)
    before = path.read_bytes(), path.stat().st_mtime_ns
    write(path, n=10)
    with pytest.raises(RunFolderError, match="samples: 10 -> 11"):
        write(path, n=11)
    with pytest.raises(RunFolderError, match="first: 0 -> 64"):
        write(path, n=10, first=64)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("wrong", [{"n": 0}, {"first": -1}, {"batch_size": 0}])
def test_wrong_numbers_are_refused_before_anything_is_written(tmp_path, wrong):
    with pytest.raises(UsageError, match="at least"):
        write(tmp_path / "a.h5", **wrong)
    with pytest.raises(UsageError, match="at least"):
        write_samples(tmp_path / "a.h5", source(), 0, seed=0, description={})
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_of_samples_is_refused(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros((2, 1, 4, 4))
    with pytest.raises(DataError, match="not written by"):
        SampleFile(tmp_path / "other.h5")
    plain = write_samples(
        tmp_path / "plain.h5", source(), 3, seed=0, description={}, progress=False, sampler=DPMSolver(2)
    )
    with SampleFile(plain) as file, pytest.raises(DataError, match="without a constraint"):
        _ = file.distances


def test_the_batch_size_is_that_of_the_model(tmp_path, monkeypatch):
    mirrored, seen = source(), []
    sample = mirrored.model.sample

    def watched(n, **options):
        seen.append((n, options["batch_size"]))
        return sample(n, **options)

    monkeypatch.setattr(mirrored.model, "sample", watched)
    write_samples(tmp_path / "a.h5", mirrored, 100, seed=5, description={}, batch_size=8, sampler=DPMSolver(3))
    assert seen == [(64, 8), (36, 8)]


class Learned(Constraint):
    """A rule with a network, that counts what it is given."""

    def __init__(self):
        super().__init__()
        self.weight, self.sizes = nn.Parameter(torch.ones(1)), []

    def distance(self, x):
        self.sizes.append(len(x))
        return (self.weight * x).abs().mean((1, 2, 3))


def test_the_rule_is_given_no_more_images_than_the_model(tmp_path):
    rule = Learned()
    options = {"seed": 5, "description": {}, "sampler": DPMSolver(3), "progress": False}
    write_samples(tmp_path / "a.h5", source(), 100, constraint=rule, batch_size=24, **options)
    assert rule.sizes == [24, 24, 24, 16, 24, 12]  # the first of them dry
    with SampleFile(tmp_path / "a.h5") as file:
        np.testing.assert_allclose(file.distances, file.images[:].abs().mean((1, 2, 3)), rtol=1e-5)


def test_a_process_that_does_not_write_needs_no_gradients_either(tmp_path, monkeypatch):
    bounds = [(0, 4), None]
    monkeypatch.setattr(sample_file, "broadcast_object_list", lambda _: [bounds.pop(0)])
    monkeypatch.setattr(sample_file, "process_state", lambda: SimpleNamespace(is_main_process=False, num_processes=2))
    rule = Learned()
    write_samples(tmp_path / "a.h5", source(), 4, seed=5, description={}, constraint=rule, sampler=DPMSolver(3))
    assert rule.sizes == [4, 4]


def test_compiling_is_not_what_samples_took(tmp_path, monkeypatch):
    now = [0.0]

    def compile(network, **options):
        costs = [100.0]

        def call(y, t):
            now[0] += costs.pop() if costs else 1.0
            return network(y, t)

        return call

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(sample_file, "clock", lambda device: now[0])
    for name, options in (("a.h5", {}), ("b.h5", {"compile": True})):
        write_samples(tmp_path / name, source(), 5, seed=5, description={}, sampler=DPMSolver(3), **options)
    with SampleFile(tmp_path / "a.h5") as plain, SampleFile(tmp_path / "b.h5") as quick:
        assert torch.allclose(plain.images[:], quick.images[:], atol=1e-5)
        assert quick.compute_seconds == pytest.approx(3.0)  # the steps of one batch


def test_a_file_without_distances_is_not_one_with_them(tmp_path):
    write_samples(tmp_path / "a.h5", source(), 4, seed=5, description={}, sampler=DPMSolver(3))
    with pytest.raises(RunFolderError, match="rule"):
        write_samples(
            tmp_path / "a.h5", source(), 4, seed=5, description={}, sampler=DPMSolver(3), constraint=TotalFlux(3.0)
        )


def test_samples_that_are_not_finite_are_refused(tmp_path):
    mirrored = source()
    mirrored.model.scale.fill_(torch.inf)
    with pytest.raises(DataError, match=r"sample 7 is not finite.*predict v"):
        write_samples(tmp_path / "a.h5", mirrored, 4, seed=5, first=7, description={}, sampler=DPMSolver(3))
    assert not (tmp_path / "a.h5").exists()
