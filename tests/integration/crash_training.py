"""A training of a small map, as a command; run, killed and run again by the tests.

crash_training.py FOLDER            trains, from where the folder stands
crash_training.py FOLDER STEP ...   the same once for each of the steps, killed as soon as it is past that step

What costs seconds is importing torch, so the attempts that are killed are processes forked from one that has.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from namm import MirrorMap, Periodic, train_map
from namm.datasets.unit_cells import UnitCells
from namm.maps import ICNN, ResNet
from namm.training.objectives import UniformNoise, Weights
from namm.training.settings import TrainSettings


def train(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mirror = MirrorMap(ICNN(layers=1, filters=4), ResNet(filters=4, blocks=1, dropout=0.3))
    settings = TrainSettings(
        budget="120 steps", batch_size=4, checkpoint_seconds=0.0, log_every=5, milestones=3, validations=4
    )
    dataset = UnitCells(size=16)
    data, validation = dataset.images(0, "train", 0, 50), dataset.images(0, "val", 0, 8)
    chosen = {"noise": UniformNoise(0.1), "weights": Weights(), "settings": settings, "progress": False}
    train_map(mirror, data, Periodic(), **chosen, validation=validation, folder=folder)


def has_passed(folder: Path, step: int) -> bool:
    """Whether there is a checkpoint of this step or of a later one."""
    names = [path.stem for path in (folder / "checkpoints").glob("step-*.safetensors")]
    return bool(names) and max(names) >= f"step-{step:09d}"


def train_and_be_killed(folder: Path, step: int) -> None:
    """Train in another process, and kill it in mid-training, past `step`."""
    pid = os.fork()
    if not pid:
        try:
            train(folder)
        finally:
            os._exit(1)
    while not has_passed(folder, step):
        ended, _ = os.waitpid(pid, os.WNOHANG)
        assert not ended, f"the training never reached step {step}"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the training ended before it was killed"


def main(folder: Path, *steps: str) -> None:
    for step in steps:
        train_and_be_killed(folder, int(step))
    if not steps:
        train(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
