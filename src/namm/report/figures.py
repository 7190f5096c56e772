"""Figures for people: drawn from arrays, without a display and without global state.

Values are shown with a perceptually uniform map, signed deviations with a diverging one whose middle is zero, so
that the colours mean the same on both sides.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from namm.errors import RunFolderError

VALUES, DEVIATIONS = "viridis", "RdBu_r"
PANEL = 3.2  # inches a side


def worst_residual_figure(image: NDArray[Any], residual: NDArray[Any] | None, title: str) -> Figure:
    """An image (C, H, W) beside its residual, one row per channel.

    A residual that is one number for the whole image is shown as a constant; one that is no picture at all (not three
    axes), or none, leaves the image alone.
    """
    deviations = _as_picture(residual, image)
    columns = 1 if deviations is None else 2
    channels = max(len(image), 0 if deviations is None else len(deviations))
    figure = Figure(figsize=(PANEL * columns + 1, PANEL * channels + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(channels, columns, squeeze=False)
    for row in range(channels):
        if row < len(image):
            _panel(figure, axes[row, 0], image[row], "image", channels, row, cmap=VALUES)
        else:
            axes[row, 0].axis("off")
        if deviations is not None:
            limit = float(np.abs(deviations).max()) or 1.0
            colours = {"cmap": DEVIATIONS, "vmin": -limit, "vmax": limit}
            if row < len(deviations):
                _panel(figure, axes[row, 1], deviations[row], "residual", channels, row, **colours)
            else:
                axes[row, 1].axis("off")
    figure.suptitle(title)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix of `path` says in which format."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"the picture {path} cannot be written ({error}): choose another path.") from error


def _as_picture(residual: NDArray[Any] | None, image: NDArray[Any]) -> NDArray[Any] | None:
    if residual is None or residual.ndim != 3:
        return None
    one_number = residual.shape[1:] == (1, 1)
    return np.broadcast_to(residual, (len(residual), *image.shape[1:])) if one_number else residual


def _panel(figure: Figure, axes: Any, values: NDArray[Any], name: str, channels: int, row: int, **colours: Any) -> None:
    shown = axes.imshow(values, interpolation="nearest", **colours)
    axes.set_title(f"{name}, channel {row}" if channels > 1 else name)
    axes.set_xticks([])
    axes.set_yticks([])
    figure.colorbar(shown, ax=axes, shrink=0.8)
