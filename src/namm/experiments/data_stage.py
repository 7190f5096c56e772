"""The stage `data`: the images of an experiment in one HDF5 file."""

from pathlib import Path

from namm.constraints.contract import check_at
from namm.datasets import open_store, write_store
from namm.datasets.batches import check_values
from namm.experiments.build import constraint, dataset
from namm.experiments.stages import Outcome, Work

FILE = "images.h5"
CHECKED = 256
"""Images on which the data's own distance is measured."""


def make_data(work: Work) -> Outcome:
    """Draw the images, or go on drawing them, and measure how well they keep their rule.

    What cannot be trained on is refused here: constant images, a broken rule, a rule that does not notice σ_max.
    """
    data = work.settings.data
    path = write_store(images_file(work.folder), dataset(data), data.sizes, seed=data.seed, quiet=not work.progress)
    with open_store(path) as store:
        check_values(store["train"])
        rule, some = constraint(data.rule), store["train"][:CHECKED]
        report = rule.check(some)
        shape = "×".join(map(str, store["train"].shape[1:]))
    report.require_obeyed()
    check_at(rule, some, work.settings.map.sigma_max).require_active()
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
