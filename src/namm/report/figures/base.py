"""Figures for people: drawn from arrays, without a display and without global state.

Values are shown with a perceptually uniform map, signed deviations with a diverging one whose middle is zero, so
that the colours mean the same on both sides. Everything is drawn `WIDTH` inches wide, so that letters can be read where
the page is a telephone, on a transparent ground, in the ink of a light or of a dark page:

    with look("dark"):
        figure = samples_figure(methods)
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from namm.errors import DataError, RunFolderError
from namm.formatting import format_number
from namm.report.coordinates import PIXELS, Coordinates

VALUES, DEVIATIONS = "viridis", "RdBu_r"
OURS_COLOUR, BASELINE_COLOUR, OTHER_COLOUR, DATA_COLOUR = "#1b9e77", "#d95f02", "#7570b3", "#7f7f7f"
"""Colours of the method, the baseline, a variant and the data in every figure; legible on light and on dark ground."""
WIDTH, BAR = 4.4, 0.75  # inches of a figure, and of a colour bar in it
CLIPPED = 0.005  # of all pixels lie beyond either end of a colour scale
BINS = 40

Array = NDArray[Any]
Theme = Literal["light", "dark"]
INK: dict[Theme, str] = {"light": "#1d2530", "dark": "#e4e8ee"}


@dataclass(frozen=True)
class View:
    """What people see of images (N, C, H, W): pictures (N, H, W)."""

    show: Callable[[Array], Array] = lambda images: images[:, 0]
    label: str = "pixel value"  # what a pixel of the picture is, with its unit
    symbol: str = "value"  # the same in short
    signed: bool = False  # whether its sign means something, so that zero is to be the middle of the colours
    coordinates: Coordinates = PIXELS  # where its pixels lie


RAW = View()
"""The first channel, as it is."""


# The look


@contextmanager
def look(theme: Theme = "light") -> Iterator[None]:
    """What is drawn inside has the ink of that theme."""
    colours = {f"{name}color": INK[theme] for name in ("text.", "axes.edge", "axes.label", "xtick.", "ytick.")}
    style = {
        **{"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8.5, "legend.frameon": False},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.4},
    }
    with mpl.rc_context(colours | style):
        yield


class NotebookFigure(Figure):
    """A figure that notebooks display by itself, without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", pil_kwargs={"optimize": True})
        return buffer.getvalue()


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inches."""
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(draw: Callable[[], Figure], theme: Theme, dpi: int = 150) -> bytes:
    """The PNG of the figure that `draw` makes, in the ink of a theme, on a transparent ground."""
    with look(theme):
        buffer = io.BytesIO()
        draw().savefig(buffer, format="png", dpi=dpi, transparent=True, pil_kwargs={"optimize": True})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix of `path` says in which format."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"the picture {path} cannot be written ({error}): choose another path.") from error


def require_finite(values: Array, what: str) -> Array:
    """`values` as they are, refused where they hold NaN or inf or nothing at all."""
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        place = ", ".join(map(str, bad[0]))
        raise DataError(f"{what}: the value at [{place}] is {values[tuple(bad[0])]}, which no figure can show.")
    if not values.size:
        raise DataError(f"{what}: there is nothing to show.")
    return values


# Pictures


@dataclass(frozen=True)
class Block:
    """Rows of pictures that share one scale of colours."""

    names: Sequence[str]  # of the rows
    rows: Sequence[Array]  # (K, H, W) each, or (K, H, W, 4) in colour
    label: str  # what a pixel is
    symbol: str = ""  # the same in short
    signed: bool = False
    captions: Sequence[Sequence[str]] = ()  # of each row, one for each picture
    offset: tuple[float, float] = (0.0, 0.0)  # where in an image their first pixel lies

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the scale."""
        return limits(np.concatenate([row.ravel() for row in self.rows]), self.signed)


def distance_captions(distances: Iterable[float]) -> list[str]:
    """ℓ of each picture of a row, to stand above it."""
    return [f"ℓ {format_number(distance, '.2g')}" for distance in distances]


def limits(values: Array, signed: bool) -> tuple[float, float]:
    """Ends of a colour scale that leaves out few pixels; never without extent, and symmetric where the sign counts."""
    if signed:
        end = float(np.quantile(np.abs(values), 1 - CLIPPED)) or float(np.abs(values).max()) or 1.0
        return -end, end
    low, high = (float(end) for end in np.quantile(values, (CLIPPED, 1 - CLIPPED)))
    if low == high:
        low, high = float(values.min()), float(values.max())
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def gap(width: int) -> int:
    """Pixels between pictures of that width in a mosaic."""
    return max(1, round(0.05 * width))


def mosaic(pictures: Array, columns: int) -> np.ma.MaskedArray[Any, Any]:
    """Pictures (N, H, W), or (N, H, W, 4) in colour, in rows of `columns` as one, with masked gaps between them."""
    n, height, width = pictures.shape[:3]
    down, right = height + gap(width), width + gap(width)
    rows = -(-n // columns)
    shape = (rows * down - gap(width), columns * right - gap(width), *pictures.shape[3:])
    canvas = np.ma.array(np.zeros(shape), mask=True)
    for k, picture in enumerate(pictures):
        top, left = k // columns * down, k % columns * right
        canvas[top : top + height, left : left + width] = picture
    return canvas


def show_mosaic(axes: Axes, pictures: Array, columns: int, ends: tuple[float, float], signed: bool) -> Any:
    """Draw a mosaic without ticks and return what a colour bar needs."""
    colours: dict[str, Any] = {"cmap": DEVIATIONS if signed else VALUES, "vmin": ends[0], "vmax": ends[1]}
    bare(axes)
    return axes.imshow(mosaic(pictures, columns), interpolation="nearest", **colours)


def bare(axes: Axes) -> None:
    """No ticks and no frame."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def colour_bar(figure: Any, shown: Any, axes: Any, values: Array, label: str, **place: Any) -> None:
    """A colour bar whose ends say whether values lie beyond them; `place` as matplotlib's `colorbar` takes it."""
    low, high = shown.get_clim()
    beyond = (bool(values.min() < low), bool(values.max() > high))
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[beyond]
    how = {"aspect": 25, "pad": 0.02, "shrink": 0.9, "extend": extend, "extendfrac": 0.04, "label": label} | place
    bar = figure.colorbar(shown, ax=axes, **how)
    bar.outline.set_visible(False)
    bar.formatter.set_powerlimits((-3, 4))


def picture_rows(
    part: Any,
    axes: Sequence[Axes],
    names: Sequence[str],
    rows: Sequence[Array],
    *,
    label: str,
    signed: bool = False,
    captions: Sequence[Sequence[str]] = (),
    columns: int | None = None,
    from_zero: bool = False,
) -> None:
    """Rows of pictures (K, H, W), one on each of `axes`, on one scale of colours with one bar in `part`.

    Above the pictures of each row stand its `captions`; `columns` leave room for as many pictures; `from_zero` is for
    what cannot be negative.
    """
    values = np.concatenate([row[np.isfinite(row)] for row in rows])
    low, high = limits(values, signed)
    ends = (0.0, high or 1.0) if from_zero else (low, high)
    for axis, name, row, texts in zip(axes, names, rows, captions or [()] * len(rows), strict=True):
        shown = show_mosaic(axis, row, columns or len(row), ends, signed)
        axis.set_ylabel(name)
        write_above(axis, texts, row.shape[2])
    colour_bar(part, shown, axes, values, label)


def write_above(axes: Axes, texts: Sequence[str], width: int) -> None:
    """Write a text above each picture of a row, all `width` pixels wide."""
    for column, text in enumerate(texts):
        axes.text(column * (width + gap(width)) + width / 2, -0.6, text, ha="center", va="bottom", fontsize=8)


def row_height(shape: tuple[int, ...], columns: int) -> float:
    """Inches that a row of pictures (…, H, W) beside a colour bar is high."""
    height, width = shape[-2:]
    return (WIDTH - BAR) * height / (width * columns)


def as_picture(residual: Array | None, image: Array) -> Array | None:
    """The residual (C′, H′, W′) of an image (C, H, W) as something to look at, or none."""
    if residual is None or residual.ndim != 3:
        return None
    one_number = residual.shape[1:] == (1, 1)
    return np.broadcast_to(residual, (len(residual), *image.shape[1:])) if one_number else residual


def one_channel(picture: Array) -> Array:
    """(C, H, W) → (H, W); several channels as their root mean square, signed as the first is."""
    return picture[0] if len(picture) == 1 else np.sign(picture[0]) * np.sqrt(np.mean(picture**2, axis=0))


def residual_pictures(residuals: Array | None, images: Array, what: str) -> Array | None:
    """The residuals of images (K, C, H, W) as pictures (K, H′, W′), if the rule has pictures of them."""
    found = [as_picture(r, x) for r, x in zip(residuals, images, strict=True)] if residuals is not None else [None]
    pictures = [one_channel(require_finite(each, what)) for each in found if each is not None]
    return np.stack(pictures) if len(pictures) == len(found) else None


# Curves and histograms


def histograms(
    axes: Axes, distances: Mapping[str, Array], colours: Mapping[str, Any], floor: float | None = None
) -> None:
    """Histograms of ℓ (N,) by name on one logarithmic axis, with their means and the data's own mean, the floor.

    A distance of zero has no place on such an axis and is counted in the first bin.
    """
    for name, values in distances.items():
        require_finite(values, f"distances of {name}")
    positive = np.concatenate([values[values > 0] for values in distances.values()])
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (1e-9, 1e-9)
    bins = np.geomspace(low / 1.2, high * 1.2, BINS)
    for name, values in distances.items():
        label = f"{name}: mean {format_number(values.mean(), '.2g')}"
        axes.hist(np.maximum(values, low), bins=bins.tolist(), color=colours[name], alpha=0.75, label=label)
    label_floor(axes, floor)
    axes.set_xscale("log")
    plain_ticks(axes.xaxis, low, high)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set(xlabel="constraint distance ℓ of a sample", ylabel="samples")
    legend_above(axes)


def label_floor(axes: Axes, floor: float | None) -> None:
    """The data's own mean ℓ as a line of the legend."""
    if floor is not None:
        axes.plot([], [], " ", label=f"data: mean {format_number(floor, '.2g')}")


def legend_above(axes: Axes, columns: int = 2) -> None:
    """A legend where it covers nothing; in one column if its lines are too long."""
    handles, labels = axes.get_legend_handles_labels()
    columns = columns if max(map(len, labels)) < 28 else 1
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0)


def plain_ticks(axis: Any, low: float, high: float) -> None:
    """Numbers as people write them on a logarithmic axis from `low` to `high`, be it short or many decades long."""
    decades = np.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 1.7 else (1.0,)
    axis.set_major_locator(MaxNLocator(4) if decades < 0.7 else LogLocator(subs=subs, numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
