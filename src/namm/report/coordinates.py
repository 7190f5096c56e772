"""What the rows and columns of an image stand for, so that a pixel has coordinates; imports nothing.

An experiment declares those of its images (`Data.coordinates`), still figures name them, and the report's page tells
those of the pixel under the pointer. What nothing is known of is counted in pixels.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A side of a picture, or time: pixel or state i lies at `first + i * step`."""

    name: str
    first: float = 0.0
    step: float = 1.0

    def ends(self, size: int) -> tuple[float, float]:
        """Where the first and the last of `size` pixels lie."""
        return self.first, self.first + (size - 1) * self.step

    def range_in_words(self, size: int) -> str:
        """Such as "10 to 0"."""
        first, last = self.ends(size)
        return f"{first:.3g} to {last:.3g}"

    def places_in_words(self, size: int) -> str:
        """Such as "t = 3, 3.2", or "t = 3, 3.2, …, 4.4" of more than three."""
        places = [f"{self.first + i * self.step:.3g}" for i in range(size)]
        return f"{self.name} = {', '.join(places if size <= 3 else [*places[:2], '…', places[-1]])}"


@dataclass(frozen=True)
class Coordinates:
    """The axes of images (N, C, H, W) and of the pictures that people see of them.

    Attributes:
        rows, columns: What lies down and across a picture, or, where it shows several states, each state.
        state: Points along a side of a state, where a picture is several laid out row by row; else 0.
        time: When the states are, where they follow each other: those laid out, or, if `state` is 0, the columns.
        residual: Where in a picture the first pixel of its residual lies, in pixels down and across.
    """

    rows: Axis = Axis("row")
    columns: Axis = Axis("column")
    state: int = 0
    time: Axis | None = None
    residual: tuple[float, float] = (0.0, 0.0)

    def in_words(self, height: int, width: int) -> str:
        """One line for below a picture of that size; empty where its axes count pixels."""
        if self == PIXELS:
            return ""
        shown = (self.state, self.state) if self.state else (height, width)
        down, across = (axis.range_in_words(n) for axis, n in zip((self.rows, self.columns), shown, strict=True))
        between = ", " if down == across else f", {down}; "
        line = f"down {self.rows.name}{between}across {self.columns.name}, {across}"
        if self.state and self.time is not None:
            states = (height // self.state) * (width // self.state)
            line += f"; states at {self.time.places_in_words(states)}"
        return line


PIXELS = Coordinates()
"""Rows and columns, counted from the top left."""
