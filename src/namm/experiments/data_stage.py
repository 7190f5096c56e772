"""The stage `data`: the images of an experiment in one HDF5 file."""

from pathlib import Path

from namm.datasets import open_store, write_store
from namm.experiments.build import constraint, dataset
from namm.experiments.stages import Outcome, Work

FILE = "images.h5"
CHECKED = 256
"""Images on which the data's own distance is measured."""


def make_data(work: Work) -> Outcome:
    """Draw the images, or go on drawing them, and measure how well they keep their rule."""
    data = work.settings.data
    path = write_store(images_file(work.folder), dataset(data), data.sizes, seed=data.seed, quiet=not work.progress)
    with open_store(path) as store:
        report = constraint(data.rule).check(store["train"][:CHECKED])
        shape = "×".join(map(str, store["train"].shape[1:]))
    report.require_obeyed()
    results = {
        "images": sum(data.sizes.values()),
        "shape": shape,
        "distance_mean": report.mean,
        "distance_max": report.max,
        "distance_noisy": report.noisy_mean,
    }
    return Outcome(results, (FILE,))


def images_file(folder: Path) -> Path:
    """Where the stage keeps its images."""
    return folder / FILE
