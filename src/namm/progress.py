"""The progress bar of everything that takes long: training, sampling, drawing data.

    map ━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 812/3000 0:01:42
      loss 0.0312  cycle 0.0201  constraint 0.0022  …

Title, bar, steps and time left have the first line to themselves; the bar takes the width that the others leave. The
values have a second line, from which whole terms are dropped on the right where they do not fit.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from namm.formatting import format_duration

LINE_SECONDS = 15.0  # between lines where there is no terminal to redraw
WARM_SECONDS = 4.0  # of steps that are watched before the time left is told
TITLE_WIDTH = 28  # columns of the longest title: at 60 columns this still leaves a bar


class ProgressBar:
    """Steps done, time left and values on stderr; lines now and then where there is no terminal.

    Args:
        title: What is going on.
        total: Steps in all.
        start: Steps that were done before.
        visible: Whether to show anything.
        console: Where; stderr by default.
    """

    def __init__(
        self, title: str, total: int, *, start: int = 0, visible: bool = True, console: Console | None = None
    ) -> None:
        self.console = console or Console(stderr=True)
        self.title, self.total, self.visible = title, total, visible
        self._bar = _TwoLines(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=TITLE_WIDTH)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            expand=True,
            disable=not (visible and self.console.is_terminal),
        )
        self._task = self._bar.add_task(title, total=total, completed=start)
        self._next_line = time.monotonic() + LINE_SECONDS / 3
        self._pace = Pace()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show `step` and its values, the most important ones first."""
        self._bar.terms = terms = [f"{name} {value:.4g}" for name, value in values.items()]
        self._bar.update(self._task, completed=step)
        self._pace.note(time.monotonic(), step)
        if not self.visible or self.console.is_terminal:
            return
        if time.monotonic() >= self._next_line or step == self.total:
            seconds = self._pace.seconds_for(self.total - step)
            left = f"about {format_duration(seconds)} left" if seconds else ""
            line = "  ".join(filter(None, [self.title, f"{step}/{self.total}", left, *terms]))
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._next_line = time.monotonic() + LINE_SECONDS

    def advance(self, steps: int = 1) -> None:
        """Show that so many more steps are done."""
        self._bar.advance(self._task, steps)

    def extend(self, steps: int) -> None:
        """Show that so many more steps are to do."""
        self.total += steps
        self._bar.update(self._task, total=self.total)

    def start(self) -> None:
        """Begin to draw."""
        self._bar.start()

    def stop(self) -> None:
        """Leave the last state on the terminal."""
        self._bar.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Pace:
    """How fast steps are made, by the clock on the wall: with validations, checkpoints and whatever else takes time.

    Only the later half of the time watched counts, so that a slow beginning is forgotten. Watching begins with the
    first step noted: what came before it may have been compilation.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._steps: list[int] = []

    def note(self, now: float, step: int) -> None:
        """`step` was done at `now`."""
        self._times.append(now)
        self._steps.append(step)

    def seconds_for(self, steps: int) -> float | None:
        """How long so many more steps take; None before a few seconds were watched."""
        began, now = self._times[0], self._times[-1]
        if now - began < WARM_SECONDS:
            return None
        half = min(bisect_left(self._times, (began + now) / 2), len(self._times) - 2)
        made = self._steps[-1] - self._steps[half]
        return steps * (now - self._times[half]) / made if made > 0 else None


class _TwoLines(Progress):
    """Rich's table of columns, and the terms below it."""

    terms: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.terms:
            yield Text(fitted(self.terms, self.console.width), no_wrap=True, overflow="ellipsis")


def fitted(terms: Sequence[str], width: int) -> str:
    """The first of `terms` in a line of at most `width` characters, with … for those left out.

    The first term stays whatever the width.
    """
    for count in range(len(terms), 0, -1):
        line = "  " + "  ".join([*terms[:count], *["…"][: len(terms) - count]])
        if len(line) <= width or count == 1:
            return line
    return ""
