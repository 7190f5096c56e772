"""The processes of a run that torchrun started: one of them writes and prints, all train and sample.

What the main process does alone (drawing the data, measuring, the report) may take hours, longer than a collective
operation may wait. So the others wait at torchrun's key-value store instead, and look there every moment whether the
main process has come to its end, is still alive, or whether anybody has failed.

Without torchrun all of this is nothing, and torch is not imported.
"""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from namm.errors import Interrupted, NammError, RunFolderError

T = TypeVar("T")

FAILURES, PULSE = "failures", "pulse"
PULSE_SECONDS, DEAD_SECONDS, ERROR_GRACE_SECONDS = 5.0, 600.0, 2.0
_turns = count()


class ProcessLost(NammError):
    """Another process of the run has failed or is gone; it says why, where it can."""


def world() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def is_main() -> bool:
    """Whether this is the process that writes and prints."""
    return world() == 1 or int(os.environ.get("RANK") or 0) == 0


def on_main_process(function: Callable[[], T]) -> T:
    """What `function` returns, or raises, in the main process. All processes call this; the others wait for it."""
    if world() == 1:
        return function()
    key = f"turn/{next(_turns)}"
    if not is_main():
        succeeded, value = pickle.loads(_wait_for(key))
        if succeeded:
            return value
        raise value
    try:
        with _alive():
            result = function()
    except BaseException as error:
        _store().set(key, _pickled(error))
        raise
    _store().set(key, pickle.dumps((True, result)))
    return result


@cache
def first_to_fail() -> bool:
    """Whether nobody else has failed yet, so that it is this process that says why the run ends."""
    if world() == 1:
        return True
    try:
        return int(_store().add(FAILURES, 1)) == 1
    except Exception:  # the store went away with a process that failed, which has said why
        return is_main()


@contextmanager
def rank_zero_output() -> Iterator[None]:
    """Inside this context only the main process prints, and only the first process that fails says why.

    The others end silently, with the exit code that the same error would have had.
    """
    if world() == 1:
        yield
        return
    with ExitStack() as stack:
        if not is_main():
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        try:
            yield
        except BaseException as error:
            if not first_to_fail():
                wait_for_the_reason()
                raise SystemExit(getattr(error, "exit_code", 1)) from None
            if "gloo" in str(error) or type(error).__name__.startswith("Dist"):
                raise ProcessLost(
                    "another process of this run is gone and gave no reason: was it killed, or out of memory? The same "
                    "command goes on with what was saved."
                ) from error
            raise
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def wait_for_the_reason() -> None:
    """Wait before a silent end: torchrun ends all processes when one ends, and the one that says why may be slower."""
    time.sleep(ERROR_GRACE_SECONDS)


def require_shared(folder: Path, name: str) -> None:
    """Refuse a folder that not all processes see: `name` is a file in it that the main process has written."""
    deadline = time.monotonic() + 60  # network file systems show new files late
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            raise RunFolderError(
                f"{socket.gethostname()} does not see {folder / name}, which the main process has written: all "
                "machines need a file system that they share; choose a folder there with --out."
            )
        time.sleep(1)


# Waiting


def _wait_for(key: str) -> bytes:
    """The value of `key` in the store, once it is there."""
    pulse, last = -1, time.monotonic()
    try:
        store = _store()
        while not store.check([key]):
            if store.check([FAILURES]):
                raise ProcessLost("another process failed.")
            time.sleep(0.05)
            if (now := int(store.add(PULSE, 0))) != pulse:
                pulse, last = now, time.monotonic()
            if time.monotonic() - last > DEAD_SECONDS:
                raise ProcessLost(f"the main process has given no sign of life for {DEAD_SECONDS / 60:.0f} minutes.")
        return bytes(store.get(key))
    except RuntimeError as error:  # torch.distributed's errors are
        raise ProcessLost(f"the connection to the main process is lost: {error}") from error


@contextmanager
def _alive() -> Iterator[None]:
    """Give signs of life inside this context."""
    done, store = threading.Event(), _store()

    def beat() -> None:
        while not done.wait(PULSE_SECONDS):
            store.add(PULSE, 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _pickled(error: BaseException) -> bytes:
    """An error for the other processes; its message alone where it cannot be pickled."""
    if not isinstance(error, Exception):
        error = Interrupted("the main process was interrupted: the same command goes on from there.")
    content = pickle.dumps((False, ProcessLost(str(error))))
    with suppress(Exception):
        pickle.loads(whole := pickle.dumps((False, error)))
        content = whole
    return content


@cache
def _store() -> Any:
    """A key-value store of all processes: that of torchrun's agent, which outlives them, where there is one."""
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Store = distributed.TCPStore(host, port, is_master=False, timeout=timedelta(minutes=1))  # type: ignore[attr-defined]
    else:
        from namm.distributed import process_state

        process_state()
        store = _get_default_store()
    return PrefixStore(f"namm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
