"""Being asked to stop: the first SIGTERM or Ctrl-C is remembered, so work can be saved; the second is immediate."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether, and by which signal, the process was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT inside this context. Signals reach the main thread only; elsewhere nothing is caught."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def remember(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, remember)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
