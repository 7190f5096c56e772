"""From an array in a file to float32 (N, C, H, W), and the refusals on the way.

Floats are taken as they are, rounded to float32. Bytes (uint8) are pixel values and are scaled, v/255, to
[0, 1]; booleans become 0 and 1. Other integers have no known scale and are refused.
"""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from namm.errors import DataError, UsageError

Layout = Literal["NCHW", "NHWC"]
LAYOUTS: tuple[str, ...] = get_args(Layout)
FEW = 4
"""No axis longer than this is called 'obviously the channels'."""


def require_layout(layout: str | None, place: str) -> Layout:
    """`layout` if it is one, else a sentence that says why it is asked for."""
    if layout is None:
        raise UsageError(
            f"{place} does not say which axis holds the channels: pass layout='NCHW' (images, channels, "
            "rows, columns) or layout='NHWC' (channels last)."
        )
    if layout not in LAYOUTS:
        raise UsageError(f"There is no layout {layout!r}; the layouts are {' and '.join(LAYOUTS)}.")
    return "NCHW" if layout == "NCHW" else "NHWC"


def require_images(shape: tuple[int, ...] | None, dtype: np.dtype[Any], layout: Layout, place: str) -> None:
    """Refuse what cannot be images in `layout`: wrong type, rank or channel axis, or nothing at all."""
    _require_type(dtype, place)
    axes = shape or ()
    if len(axes) != 4:
        raise DataError(
            f"{place} has {len(axes)} axes, {axes}, and images need 4 in the order {layout}."
            + (" Add the channel axis of length 1 that greyscale images lack." if len(axes) == 3 else "")
        )
    if 0 in axes:
        raise DataError(f"{place} is empty: its shape is {axes}.")
    _require_plausible(axes, layout, place)


def _require_type(dtype: np.dtype[Any], place: str) -> None:
    if dtype == np.uint8 or dtype.kind in "fb":
        return
    if dtype.kind in "iu":
        raise DataError(
            f"{place} holds {dtype} integers, whose scale is unknown (only uint8 is taken, as v/255): "
            "convert it to float32 in the units you want."
        )
    raise DataError(f"{place} holds values of type {dtype}, which are not images: convert it to float32.")


def _require_plausible(shape: tuple[int, ...], layout: Layout, place: str) -> None:
    # Few entries on the axis that the other layout calls channels, many on the one called so here, and the
    # images long and thin as a result.
    _, first, middle, last = shape
    axis, channels, rival, sides = (1, first, last, (middle, last))
    if layout == "NHWC":
        axis, channels, rival, sides = (3, last, first, (first, middle))
    if rival <= FEW < channels and max(sides) > FEW * min(sides):
        other = "NHWC" if layout == "NCHW" else "NCHW"
        raise DataError(
            f"{place} has shape {shape}, which {layout} reads as images of {channels} channels and "
            f"{sides[0]}×{sides[1]} pixels: axis {axis} is {channels} long while axis {4 - axis} is {rival}. "
            f"The file looks like {other}: pass layout='{other}'."
        )


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Values as float32, with bytes scaled to [0, 1]; a copy only where the type changes."""
    if array.dtype == np.uint8:
        return array.astype(np.float32) / np.float32(255)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
        return array.astype(np.float32, copy=False)


def to_nchw(array: NDArray[np.float32], layout: Layout) -> NDArray[np.float32]:
    """The array with channels second, contiguous."""
    return np.ascontiguousarray(array if layout == "NCHW" else array.transpose(0, 3, 1, 2))


def require_finite(array: NDArray[np.float32], place: str, rows: NDArray[np.int64] | None = None) -> None:
    """Refuse NaN and infinity, naming the first; `rows` are the images' own numbers, 0, 1, … by default."""
    if np.isfinite(array.sum(dtype=np.float64)):  # any NaN or infinity would survive the sum
        return
    first = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
    image = int(first[0]) if rows is None else int(rows[first[0]])
    index = (image, *(int(i) for i in first[1:]))
    raise DataError(
        f"{place} holds {array[first]} at index {index}, the first value that float32 cannot compute with: "
        "mend or drop that image."
    )
