"""Eight images of every dataset, each as one picture; those in `docs/experiments/gallery.md` were made by this.

python examples/gallery.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.image import imsave
from torch import Tensor

from namm.datasets import BlackHoles, BurgersTrajectories, Dataset, Galaxies, KolmogorovFlow, UnitCells
from namm.simulators.fluid import cut, lay_out, vorticity

GALLERY: dict[str, tuple[Dataset, str]] = {
    "black_holes": (BlackHoles(), "afmhot"),
    "burgers": (BurgersTrajectories(), "viridis"),
    "kolmogorov": (KolmogorovFlow(), "RdBu_r"),
    "unit_cells": (UnitCells(), "gray"),
    "galaxies": (Galaxies(), "inferno"),
}
GAP = 4  # pixels between images


def shown(dataset: Dataset, images: Tensor) -> Tensor:
    """What is looked at, scaled to [0, 1], each image by itself: (B, H, W).

    Of a flow that is its first state's vorticity; flows are scaled together, so that 0 has one colour and strong
    vortices look strong.
    """
    if isinstance(dataset, KolmogorovFlow):
        states = vorticity(cut(images, dataset.size), dataset.grid.spacing).unsqueeze(-3)
        images = lay_out(states[:, :1, :1])
        return 0.5 + 0.5 * (images[:, 0] / images.abs().amax())
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return ((images - low) / (high - low))[:, 0]


def sheet(pictures: Tensor, colours: str, columns: int = 4) -> Tensor:
    """Pictures (B, H, W) in rows of `columns`, twice enlarged, on white: (H′, W′, 3)."""
    painted = torch.from_numpy(colormaps[colours](pictures.numpy())[..., :3])
    large = painted.repeat_interleave(2, 1).repeat_interleave(2, 2)
    framed = torch.nn.functional.pad(large, (0, 0, GAP, GAP, GAP, GAP), value=1.0)
    rows = [torch.cat(list(row), 1) for row in framed.split(columns)]
    return torch.cat(rows)


def main(folder: str | Path = "gallery", gallery: dict[str, tuple[Dataset, str]] = GALLERY) -> list[Path]:
    """Draw the first eight test images of every dataset of `gallery` and write one PNG each."""
    paths = []
    for name, (dataset, colours) in gallery.items():
        images = dataset.images(0, "test", 0, 8)
        paths.append(Path(folder) / f"{name}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        imsave(paths[-1], sheet(shown(dataset, images), colours).numpy())
        print(paths[-1])
    return paths


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gallery")
