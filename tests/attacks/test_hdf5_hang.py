"""Bytes that let libhdf5 loop for ever. No such file is needed here: a child that sleeps hangs just as well."""

import subprocess
import sys
import time

import pytest
from hostile_hdf5 import IMAGES, file_with

import namm.hdf5
from namm import hdf5_inspector
from namm.datasets import read_images
from namm.errors import DataError

HANGING = "import signal, sys, json, time\nfor line in sys.stdin:\n  signal.alarm(0); %s"
ENDINGS = {
    "hangs": "signal.setitimer(signal.ITIMER_REAL, json.loads(line)[1]); time.sleep(60)",
    "crashes": "import os; os.abort()",
    "ends": "sys.exit(0)",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_file_whose_inspection_does_not_end_is_refused(tmp_path, monkeypatch, how):
    child = tmp_path / "child.py"
    child.write_text(HANGING % ENDINGS[how])
    guard = namm.hdf5.Guard()
    monkeypatch.setattr(namm.hdf5, "GUARD", guard)
    monkeypatch.setattr(namm.hdf5, "INSPECTOR", child)
    monkeypatch.setattr(namm.hdf5, "SECONDS", 0.1)
    file = file_with(tmp_path, lambda f: f.create_dataset("images", data=IMAGES))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"did not end within 0\.1 seconds, or crashed, as libhdf5 does on damaged"):
        read_images(file, key="images", layout="NCHW")
    assert time.monotonic() - began < 20
    assert guard.child is None


def test_the_next_file_is_read(tmp_path):
    """A new child takes the place of one that was ended."""
    namm.hdf5.GUARD.stop()
    file = file_with(tmp_path, lambda f: f.create_dataset("images", data=IMAGES))
    assert read_images(file, key="images", layout="NCHW").shape == IMAGES.shape


def test_an_inspection_that_outlives_its_process_is_in_no_writers_way(tmp_path, monkeypatch):
    path = file_with(tmp_path, lambda f: f.create_dataset("images", data=IMAGES))
    script = f"import h5py; h5py.File({str(path)!r}, 'r+').close()"
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)

    def meanwhile(self, root):
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
        return iter(())

    monkeypatch.setattr(hdf5_inspector.File, "objects", meanwhile)
    assert hdf5_inspector.File(str(path)).elsewhere is None


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(tmp_path, monkeypatch):
    guard, read = namm.hdf5.Guard(), namm.hdf5._line
    good = file_with(tmp_path, lambda f: f.create_dataset("images", data=IMAGES))
    bad = tmp_path / "bad.h5"
    bad.write_bytes(b"no HDF5" * 100)

    def interrupted(child, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(namm.hdf5, "_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        guard.inspect(good)
    monkeypatch.setattr(namm.hdf5, "_line", read)
    assert guard.inspect(bad).damage is not None
    assert guard.inspect(good).damage is None
    guard.stop()
