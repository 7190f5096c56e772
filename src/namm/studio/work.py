"""One computation at a time: its name, its steps, and the way to stop it.

with work.doing("drawing samples"):
    work.expect(50)
    with ticking(model.network, work):
        model.sample(4, …)                # one tick for each call of the network
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock
from typing import Any

from torch import nn

from namm.errors import NammError


class Busy(NammError):
    """Something else is being computed."""


class Stopped(NammError):
    """Somebody asked to stop what was being computed."""


class Work:
    """What is being computed, if anything is; safe to be asked from any thread."""

    def __init__(self) -> None:
        self._lock, self._stop = Lock(), Event()
        self._name, self._done, self._total = "", 0, 0
        self._closed = False

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Compute what is called `name` inside; refused while something else is computed."""
        if not self._lock.acquire(blocking=False):
            raise Busy(f"the studio is {self._name or 'at work'}: wait until that is done, or stop it.")
        try:
            if self._closed:
                raise Stopped("the studio is closed: start it again.")
            self._stop.clear()
            self._name, self._done, self._total = name, 0, 0
            yield
        finally:
            self._name = ""
            self._lock.release()

    def expect(self, steps: int) -> None:
        """So many more steps are to come."""
        self._total += steps

    def tick(self) -> None:
        """A step begins; raises `Stopped` if somebody asked for it."""
        if self._stop.is_set():
            raise Stopped(f"stopped after {self._done} of {self._total} steps.")
        self._done += 1
        self._total = max(self._total, self._done)  # a sample that diverged is drawn again

    def stop(self) -> None:
        """Stop what is being computed at its next step."""
        self._stop.set()

    def close(self, seconds: float = 10.0) -> None:
        """Stop, let nothing else begin, and wait until the computation has ended, but no longer than `seconds`."""
        self._closed = True
        self.stop()
        if self._lock.acquire(timeout=seconds):
            self._lock.release()

    @property
    def state(self) -> dict[str, Any]:
        """What a page shows: the name, empty where nothing is computed, and how many of how many steps are done."""
        return {"doing": self._name, "done": self._done, "total": self._total}


@contextmanager
def ticking(network: nn.Module, work: Work) -> Iterator[None]:
    """Every call of `network` inside is a step of `work`, whoever makes it."""
    hook = network.register_forward_pre_hook(lambda *_: work.tick())
    try:
        yield
    finally:
        hook.remove()
