"""Processes that find each other as those of torchrun do, forked from one, so that torch is imported once."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable


def run_ranks(world: int, work: Callable[[], None]) -> None:
    """Do `work` in `world` processes; where one fails, the others are killed and this one ends with exit code 1."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    left = {_forked(work, shared | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(world)}
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _forked(work: Callable[[], None], environment: dict[str, object]) -> int:
    if pid := os.fork():
        return pid
    os.environ.update({name: str(value) for name, value in environment.items()})
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
