"""`namm run` and `namm sample` on two processes do what one process does, and end together if one of them fails."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from namm.cli import main
from namm.experiments.engine.folder import read_record, stage_states
from namm.experiments.engine.settings_file import to_yaml

SCRIPT = Path(__file__).with_name("distributed_run.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "two_nodes.sh"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(folder: Path, *arguments: object, fault: str = "none") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, fault]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT, cwd=folder, timeout=300
    )


@pytest.fixture(scope="module")
def two(tiny_preset, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run on two processes up to its samples, and what it printed."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "tiny.yaml").write_text(to_yaml(tiny_preset))
    done = torchrun(folder, "run", "--config", "tiny.yaml", "--out", "run", "--until", "samples", "--force")
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def test_every_stage_is_told_once(two):
    told = [line.split()[:2] for line in two[1].splitlines() if line.split()[1:2] in (["running"], ["done"])]
    assert told == [[stage, state] for stage in ("data", "map", "mdm", "samples") for state in ("running", "done")]
    states = {row.folder: row.state for row in stage_states(two[0])}
    assert [name for name, state in states.items() if state == "complete"] == ["data", "map", "mdm", "samples"]
    assert read_record(two[0] / "mdm").attempts == 1


def test_the_data_are_the_same_bytes(two, whole_run):
    with h5py.File(two[0] / "data" / "images.h5") as ours, h5py.File(whole_run / "data" / "images.h5") as theirs:
        assert all(np.array_equal(ours[split][:], theirs[split][:]) for split in ("train", "val", "test"))


@pytest.mark.parametrize("stage", ["map", "mdm"])
def test_the_weights_are_those_of_one_process(two, whole_run, stage):
    trained = [
        path for path in (whole_run / stage).glob("training/m*/**/*.safetensors") if "milestone" not in str(path)
    ]
    trained += (whole_run / stage).glob("training/model.safetensors")
    assert trained
    for path in trained:
        one, both = load_file(path), load_file(two[0] / path.relative_to(whole_run))
        assert one.keys() == both.keys()
        for name, weights in one.items():
            np.testing.assert_allclose(both[name], weights, rtol=1e-4, atol=1e-6)


def test_the_samples_are_those_of_one_process(two, whole_run):
    for name in ("train.h5", "held_out.h5"):
        with h5py.File(two[0] / "samples" / name) as ours, h5py.File(whole_run / "samples" / name) as theirs:
            for array in ("images", "mirror_images", "distances"):
                np.testing.assert_allclose(ours[array][:], theirs[array][:], rtol=1e-4, atol=1e-5)


def test_a_failure_of_one_process_ends_both_with_one_message(tiny_preset, tmp_path):
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny_preset))
    began = time.monotonic()
    done = torchrun(
        tmp_path, "run", "--config", "tiny.yaml", "--out", "run", "--until", "mdm", "--force", fault="raise"
    )
    assert time.monotonic() - began < 120
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("namm: ")]
    assert "the second process divides by zero" in said
    assert 'distributed_run.py", line' not in done.stderr  # torchrun's traceback is its own, and there is none of ours
    main(["run", "--config", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run"), "--until", "map"])
    assert read_record(tmp_path / "run" / "map").status == "complete"


def test_two_nodes_meet_and_train_one_map(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**ENVIRONMENT, "PYTHON": sys.executable, "PORT": str(port)}
    done = subprocess.run([EXAMPLE, tmp_path / "run"], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run" / "map")
    assert (record.status, record.attempts, record.results["steps"]) == ("complete", 1, 40)
    result = json.loads((tmp_path / "run" / "map" / "training" / "result.json").read_text())
    assert result["images"] == 40 * 16  # of both nodes together
    assert record.results["distance_map"] < 0.75 * record.results["distance_noise"]
