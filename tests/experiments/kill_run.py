"""A run that is killed again and again, as a command: kill_run.py FOLDER SEED. Prints where each kill hit.

What costs seconds is importing torch, so that is done once, here; every attempt is a forked process that calls the
command line as `namm` does, and dies by SIGKILL. The moments are random, but no attempt may get further than its share
of the training, so that all kills surely happen before the end.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.utils.tensorboard

import namm.experiments.engine.stages.data
import namm.experiments.engine.stages.map  # noqa: F401
from namm.cli import main

KILLS, STEPS = 20, 400

ARGUMENTS = [
    *("run", "periodic", "--preset", "demo", "--until", "map"),
    *("--data.size", "8", "--data.n-train", "40000", "--data.n-val", "64", "--data.n-test", "0"),
    *("--map.g.layers", "1", "--map.g.filters", "4"),
    *("--map.f.filters", "4", "--map.f.blocks", "1", "--map.f.downsamplings", "1", "--map.f.dropout", "0.3"),
    *("--map.train.budget", f"{STEPS} steps", "--map.train.batch-size", "4"),
    *("--map.train.checkpoint-seconds", "0.05", "--map.train.milestones", "3"),
]


def start(folder: Path) -> int:
    """Begin `namm run` in another process and return its number."""
    if pid := os.fork():
        return pid
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    code = 1
    try:
        code = main([*ARGUMENTS, "--out", str(folder)])
    finally:
        os._exit(code)


def finish(folder: Path) -> None:
    """Let a run come to its end."""
    _, status = os.waitpid(start(folder), 0)
    assert os.waitstatus_to_exitcode(status) == 0


def steps_done(folder: Path) -> int:
    """Steps of the newest checkpoint; −1 before there is one."""
    names = [path.stem for path in (folder / "map" / "training" / "checkpoints").glob("step-*.safetensors")]
    return max((int(name.removeprefix("step-")) for name in names), default=-1)


def at_the_start(folder: Path, before: int) -> bool:
    """The moment to count from: none in particular."""
    return True


def in_the_data(folder: Path, before: int) -> bool:
    """The moment to count from: images are being drawn, or have been."""
    return any((folder / "data").glob("images.h5*"))


def in_the_map(folder: Path, before: int) -> bool:
    """The moment to count from: the training is further than it was `before`."""
    return steps_done(folder) > before


def kill_once(folder: Path, moment: Callable[[Path, int], bool], seconds: float, most_steps: float) -> str:
    """Start the run, kill it so many seconds after `moment`, and say where it was."""
    before = steps_done(folder)
    pid = start(folder)
    give_up = time.monotonic() + 60
    while not moment(folder, before) and time.monotonic() < give_up:
        time.sleep(0.001)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and steps_done(folder) < most_steps:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the run ended by itself"
    if (folder / "map").exists():
        return f"map {steps_done(folder)}"
    return "data" if (folder / "data").exists() else "before"


def run(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    plan = [(at_the_start, 0.1)] * 3 + [(in_the_data, 0.05)] * 4 + [(at_the_start, 1.0)] * 4 + [(in_the_map, 0.2)] * 9
    assert len(plan) == KILLS
    hits = []
    for k, (moment, longest) in enumerate(plan):
        share = STEPS * (k + 1) / (KILLS + 10)
        hits.append(kill_once(folder / "killed", moment, rng.uniform(0, longest), share))
    finish(folder / "killed")
    finish(folder / "whole")
    print(json.dumps(hits))


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
