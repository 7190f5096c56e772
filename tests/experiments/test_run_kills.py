"""Twenty kills in a row, then an uninterrupted end: the same bytes as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

SCRIPT = Path(__file__).with_name("kill_run.py")


def weights(run: Path) -> dict[str, bytes]:
    """The trained maps, by file."""
    mirror = run / "map" / "training" / "mirror"
    return {str(path.relative_to(mirror)): path.read_bytes() for path in mirror.rglob("*.safetensors")}


def test_a_run_killed_twenty_times_ends_with_the_same_bytes(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "0"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    hits = json.loads(done.stdout)
    assert len(hits) == 20
    assert "data" in hits
    assert len({hit for hit in hits if hit.startswith("map")}) >= 9  # as many different steps
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    records = {run: json.loads((run / "map" / "stage.json").read_text()) for run in (killed, whole)}
    assert records[killed]["attempts"] > 5
    assert records[whole]["attempts"] == 1
    for name in ("key", "status", "results", "settings"):
        assert records[killed][name] == records[whole][name]
    assert len(weights(whole)) == 2
    assert weights(killed) == weights(whole)
    with h5py.File(killed / "data" / "images.h5") as a, h5py.File(whole / "data" / "images.h5") as b:
        assert len(b["train"]) == 40_000
        for split in ("train", "val", "test"):
            np.testing.assert_array_equal(a[split][:], b[split][:])
    assert sorted(p.name for p in killed.iterdir()) == sorted(p.name for p in whole.iterdir())
