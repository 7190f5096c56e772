"""The `namm` command on however many processes torchrun starts, one of which may fail: distributed_run.py FAULT ...

FAULT is `none`, `raise` (the second process raises after it has trained the map) or `die` (it is killed there).
"""

import os
import signal
import sys

import torch

from namm.cli import main
from namm.experiments.engine.stages import map as map_stage


def fault(*_: object, **__: object) -> None:
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("the second process divides by zero")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] != "none" and os.environ["RANK"] == "1":
        map_stage.measure = fault
    sys.exit(main(sys.argv[2:]))
