"""`kill -9` in mid-training, then the same command: the same bytes as if nothing had happened."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from namm.training.log import read_metrics

SCRIPT = Path(__file__).with_name("crash_training.py")


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, SCRIPT, folder], stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until the training is past `step` (and not yet done)."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        names = [path.stem for path in (folder / "checkpoints").glob("step-*.safetensors")]
        if names and max(names) >= f"step-{step:09d}":
            return
        time.sleep(0.01)
    raise AssertionError(f"the training never reached step {step}: {process.stderr.read()}")


def result_bytes(folder: Path) -> dict[str, bytes]:
    """The weights that the training leaves, by file."""
    assert len(list(folder.glob("milestones/*"))) == 3
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("mirror/**/*.safetensors")}
    assert len(files) == 2
    return files


def test_killed_and_restarted_training_ends_with_the_same_bytes(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    for step in (7, 40, 90):
        process = start(killed)
        wait_for_checkpoint(killed, step, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (killed / "mirror").exists()
    assert start(killed).wait() == 0
    assert result_bytes(killed) == result_bytes(whole)
    losses = [
        [(line["step"], line["loss"], line.get("val/loss")) for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (killed, whole)
    ]
    assert [step for step, *_ in losses[0]] == [step for step, *_ in losses[1]]
    assert losses[0][-1][2] == losses[1][-1][2]


def test_same_seed_twice_same_bytes(tmp_path):
    for name in "ab":
        assert start(tmp_path / name).wait() == 0
    assert result_bytes(tmp_path / "a") == result_bytes(tmp_path / "b")
