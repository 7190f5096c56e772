"""Runs that are killed, or meet a full disk, at some of the places where they write; and what tells two runs apart."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

import kill
from namm.errors import NammError
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.run import run

SCRIPT = Path(kill.__file__)
UNTIL = "map"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tiny run up to its map."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    kill.go(folder, UNTIL)
    return folder


def test_a_handful_of_kills_and_full_disks_end_as_if_they_had_not_been(tmp_path):
    """In a process of its own, which does not fork this one's threads."""
    command = [sys.executable, SCRIPT, "--places", "4", "--full", "2", "--until", UNTIL, "--out", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = kill.Results(tmp_path / "found.jsonl")  # as the next call with this folder knows it
    assert [each.kind for each in found.all] == ["place"] * 4 + ["full"] * 2
    assert not any(each.differences for each in found.all)
    assert all(found.has(each.kind, each.name) for each in found.all)
    assert "data" in {each.name.split()[0] for each in found.all}


def test_what_two_runs_leave_is_compared_but_for_times(whole, tmp_path):
    other = tmp_path / "other"
    kill.go(other, UNTIL)
    assert kill.differences(whole, other, UNTIL) == []
    (other / "map" / ".stage.json.7.partial").write_text("")
    with h5py.File(other / "data" / "images.h5", "r+") as file:
        file["train"][3, 0, 0, 0] += 1
    path = other / "map" / "training" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1'))
    assert kill.differences(whole, other, UNTIL) == [
        "only in other: map/.stage.json.7.partial",
        "data/images.h5",
        "map/training/metrics.jsonl",
    ]


def test_places_are_calls_and_the_lines_that_lead_to_them(whole, tmp_path):
    def note():
        watch = kill.Watch()
        kill.go(tmp_path / "run", "data")
        (tmp_path / "found").write_text(json.dumps(list(watch.calls)))

    assert kill.exit_code(kill.forked(note)) == 0
    places = json.loads((tmp_path / "found").read_text())
    assert {"create", "write", "fsync", "replace", "mkdir", "__setitem__", "flush"} <= {place[1] for place in places}
    rename = next(place for place in places if place[:2] == ["data", "replace"])
    assert rename[-1].startswith("files.py:")
    assert any(line.startswith("experiments/engine/run.py:") for line in rename)
    assert not any(place[1] == "write" and place[-1].startswith("hdf5.py:") for place in places)  # a pipe keeps nothing


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KiB, where this system lets us make one; and a way to make it larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and not mount(["-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)])
    if not mounted:
        pytest.skip("this user may not make a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def mount(arguments):
    return subprocess.run(["mount", *arguments], capture_output=True).returncode


def test_a_disk_that_is_full_stops_a_run_with_a_sentence_and_loses_nothing(small_disk, whole):
    folder = small_disk / "whole"
    said = []
    for size in ("64k", "128k", "256k", "384k"):
        mount(["-o", f"remount,size={size}", str(small_disk)])
        try:
            kill.go(folder, UNTIL)
        except NammError as error:
            said.append(str(error))
    assert said
    assert all("No space left on device" in each or re.search(r"will take .* and its disk has", each) for each in said)
    assert any("No space left on device" in each for each in said)
    mount(["-o", "remount,size=64m", str(small_disk)])
    kill.go(folder, UNTIL)
    assert read_record(folder / "map").attempts > 1
    assert kill.differences(folder, whole, UNTIL) == []


def test_a_disk_that_became_read_only_is_a_sentence(small_disk, whole):
    mount(["-o", "remount,size=64m", str(small_disk)])
    kill.go(small_disk / "run", "data")
    mount(["-o", "remount,ro", str(small_disk)])
    try:
        with pytest.raises(NammError, match=r"cannot be (written|used).*Read-only file system"):
            kill.go(small_disk / "run", UNTIL)
    finally:
        mount(["-o", "remount,rw", str(small_disk)])
    kill.go(small_disk / "run", UNTIL)
    assert kill.differences(small_disk / "run", whole, UNTIL) == []


def test_a_run_sweeps_what_killed_processes_left_anywhere(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in ("data/.stage.json.1.partial", "map/training/checkpoints/.x.2.partial", ".settings.yaml.3.partial"):
        (folder / name).write_text("{")
    (folder / "map" / "training" / ".mirror.partial").mkdir()
    run(kill.tiny(), folder, until=UNTIL, log=lambda line: None, progress=False, force=True)
    assert not list(folder.rglob("*.partial"))
