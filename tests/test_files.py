"""Locks, claims, and files that are written whole and never through a link, which may lead to a file of the user's."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest

from namm import files
from namm.datasets.store import grow, write_block
from namm.errors import FolderInUseError, RunFolderError
from namm.files import Claim, only_writer, owned, publish, sweep, write_atomically
from namm.training.log import open_metrics

CONTENT = "years of work"
HOLDER = """
import sys, time, pathlib, namm.files
with getattr(namm.files, sys.argv[2])(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def precious(tmp_path):
    """A file of the user's, beside a stranger's folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text(CONTENT)
    return tmp_path / "precious"


def test_a_lock_of_a_run_that_is_a_link_is_refused(precious):
    lock = precious.parent / "run" / ".lock"
    lock.symlink_to(precious)
    with pytest.raises(RunFolderError, match=r"run/\.lock is a link"), owned(precious.parent / "run"):
        pytest.fail("held")
    assert precious.read_text() == CONTENT
    lock.unlink()
    lock.symlink_to(precious.parent / "not there")
    with pytest.raises(RunFolderError, match=r"run/\.lock is a link"), owned(precious.parent / "run"):
        pytest.fail("held")
    assert not (precious.parent / "not there").exists()


def test_a_lock_of_a_file_that_is_a_link_is_refused(precious):
    path = precious.parent / "run" / "x.h5"
    (path.parent / "x.h5.lock").symlink_to(precious)
    with pytest.raises(RunFolderError, match=r"x\.h5\.lock is a link"), only_writer(path):
        pytest.fail("held")
    assert precious.read_text() == CONTENT


def test_a_lock_says_who_holds_it_and_keeps_saying_so(tmp_path):
    with owned(tmp_path):
        for _ in range(2):
            message = f"in use by process {os.getpid()}:"
            with pytest.raises(FolderInUseError, match=message), owned(tmp_path):
                pytest.fail("held twice")
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()}"


@pytest.mark.parametrize("hold", [owned, only_writer])
def test_a_lock_ends_with_its_process(tmp_path, hold):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "x"), hold.__name__], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    with pytest.raises(FolderInUseError, match=f"in use by process {child.pid}:"), hold(tmp_path / "x"):
        pytest.fail("held twice")
    child.kill()
    child.communicate()
    with hold(tmp_path / "x"):
        pass


def test_a_claimed_folder_is_that_of_its_settings(tmp_path):
    settings = {"rate": 0.1, "betas": (0.9, 0.99), "network": {"filters": 64}}
    claim = Claim(tmp_path, "claim.json", "namm study", settings, about={"created": "today"})
    (tmp_path / ".claim.json.7.partial").write_text("{")  # of a process that was killed
    claim.take()
    replace(claim, about={"created": "tomorrow"}).take()
    assert json.loads((tmp_path / "claim.json").read_text())["created"] == "today"
    assert [entry.name for entry in tmp_path.iterdir()] == ["claim.json"]
    other = replace(claim, settings=settings | {"rate": 0.2, "network": {"filters": 32}})
    with pytest.raises(
        RunFolderError, match=r"a study with other settings \(network.filters: 64 -> 32; rate: 0.1 -> 0.2\)"
    ):
        other.take()
    with pytest.raises(RunFolderError, match=r"claim.json was not written by a run of namm: choose another folder"):
        replace(claim, kind="namm run").check()


def test_a_file_is_not_written_through_the_name_that_it_grows_under(precious):
    path = precious.parent / "run" / "settings.yaml"
    path.with_name(f".settings.yaml.{os.getpid()}.partial").symlink_to(precious)
    path.symlink_to(precious)
    write_atomically(path, "new")
    assert (path.read_text(), path.is_symlink(), precious.read_text()) == ("new", False, CONTENT)


@pytest.mark.parametrize(("mode", "expected"), [(0o666, 0o640), (0o600, 0o600)])
def test_the_mode_of_a_new_file_is_what_was_asked_for_less_the_umask(tmp_path, mode, expected):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", b"", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == expected


def test_a_growing_file_is_not_written_through_links(precious):
    path = precious.parent / "run" / "x.h5"
    rows = np.ones((2, 3), np.float32)

    def fill(file, blocks):
        for block in blocks:
            write_block(file, block, rows)

    partial = path.with_name("x.h5.partial")
    partial.symlink_to(precious)
    with pytest.raises(RunFolderError, match=r"x\.h5\.partial is a link"):
        grow(path, {"a": (2, 3)}, {"namm_version": "0"}, fill)
    partial.unlink()
    path.with_name("x.h5.partial.draft").symlink_to(precious)
    grow(path, {"a": (2, 3)}, {"namm_version": "0"}, fill)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["a"], rows)
    assert precious.read_text() == CONTENT


def test_a_log_is_not_begun_through_a_link(precious):
    target = precious.parent / "not there"
    (precious.parent / "run" / "metrics.jsonl").symlink_to(target)
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl is a link"):
        open_metrics(precious.parent / "run" / "metrics.jsonl", after_step=0)
    assert not target.exists()


def test_files_of_other_libraries_get_the_modes_of_ours(tmp_path, precious, monkeypatch):
    draft = tmp_path / ".map.partial"
    (draft / "g").mkdir(parents=True)
    for name in ("config.json", "g/weights"):
        descriptor = os.open(draft / name, os.O_WRONLY | os.O_CREAT, 0o600)  # as tempfile and safetensors do
        os.close(descriptor)
    precious.chmod(0o600)
    (draft / "link").symlink_to(precious)
    monkeypatch.setattr(files, "UMASK", 0o027)
    publish(draft, tmp_path / "map")
    modes = [stat.S_IMODE((tmp_path / "map" / name).stat().st_mode) for name in ("config.json", "g/weights")]
    assert modes == [0o640, 0o640]
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600
    assert not draft.exists()


def test_only_leftovers_are_swept(precious):
    run = precious.parent / "run"
    for name in (".a.json.7.partial", "map/training/.b.8.partial", "map/.new.partial/g/x", "data/images.h5.partial"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{")
    (run / ".link.partial").symlink_to(precious.parent)
    sweep(run)
    assert sorted(path.name for path in run.rglob("*") if path.is_file()) == ["images.h5.partial"]
    assert precious.read_text() == CONTENT
