"""`kill -9` in mid-training, then the same command: the same bytes as if nothing had happened."""

import subprocess
import sys
from pathlib import Path

from namm.training.log import read_metrics

SCRIPT = Path(__file__).with_name("crash_training.py")


def train(folder: Path, *killed_past: int) -> None:
    """Train in a process of its own to the end, or in one for each step, past which it is killed."""
    command = [sys.executable, SCRIPT, folder, *map(str, killed_past)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def result_bytes(folder: Path) -> dict[str, bytes]:
    """The weights that the training leaves, by file."""
    assert len(list(folder.glob("milestones/*"))) == 3
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("mirror/**/*.safetensors")}
    assert len(files) == 2
    return files


def test_killed_and_restarted_training_ends_with_the_same_bytes(tmp_path):
    """And so does the same seed in another process: nothing else is shared by the two that end."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole)
    train(killed, 7, 40, 90)
    assert not (killed / "mirror").exists()
    train(killed)
    assert result_bytes(killed) == result_bytes(whole)
    losses = [
        [(line["step"], line["loss"], line.get("val/loss")) for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (killed, whole)
    ]
    assert [step for step, *_ in losses[0]] == [step for step, *_ in losses[1]]
    assert losses[0][-1][2] == losses[1][-1][2]
