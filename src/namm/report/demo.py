"""The figure of the demonstration: images in both spaces above the distances from the rule."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

ROWS = 3
COLOURS = ("#7f7f7f", "#d95f02", "#1b9e77", "#7570b3")
ZERO = 1e-5  # where a distance of zero stands on the logarithmic axis


def demo_figure(images: Mapping[str, Tensor], distances: Mapping[str, Tensor], title: str) -> Figure:
    """Columns of images (N, 1, H, W) by name, on one grey scale, and histograms of ℓ (N,) by name."""
    figure = Figure(figsize=(2.0 * len(images), 2.0 * ROWS + 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.0 * ROWS, 2.8])  # type: ignore[misc]
    axes = top.subplots(ROWS, len(images), squeeze=False)
    for column, (name, batch) in enumerate(images.items()):
        axes[0, column].set_title(name)
        for row in range(ROWS):
            axis = axes[row, column]
            shown = axis.imshow(batch[row, 0].cpu().numpy(), cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
    top.colorbar(shown, ax=axes, shrink=0.6, extend="both", label="pixel value")
    _histograms(bottom.subplots(), distances)
    return figure


def _histograms(axis: Axes, distances: Mapping[str, Tensor]) -> None:
    values = {name: np.maximum(distance.cpu().numpy(), ZERO) for name, distance in distances.items()}
    bins = np.geomspace(ZERO / 1.5, 1.5 * max(v.max() for v in values.values()), 60)
    for (name, v), colour in zip(values.items(), COLOURS, strict=False):
        axis.hist(v, bins=bins.tolist(), color=colour, alpha=0.7, label=f"{name}: mean {distances[name].mean():.2g}")
    axis.set_xscale("log")
    axis.set_xlabel(f"constraint distance ℓ (values below {ZERO:g} are drawn there)")
    axis.set_ylabel("images")
    axis.legend(frameon=False)
