"""The stage `data`: the images of an experiment in one HDF5 file, and what its rule needs beside them."""

from pathlib import Path
from typing import Any

from namm.constraints import Constraint
from namm.constraints.contract import check_at
from namm.datasets import open_store, write_store
from namm.datasets.batches import check_values
from namm.experiments.engine import build
from namm.experiments.engine.processes import on_main_process
from namm.experiments.engine.stages import Outcome, Work

FILE = "images.h5"
CHECKED = 256
"""Images on which the data's own distance is measured."""


def make_data(work: Work) -> Outcome:
    """Draw the images, prepare the rule, or go on with either, and measure how well the rule is kept.

    What cannot be trained on is refused here: constant images, a broken rule, a rule that does not notice σ_max.
    """
    data, file = work.settings.data, images_file(work.folder)
    on_main_process(lambda: write_store(file, build.dataset(data), data.sizes, seed=data.seed, quiet=not work.progress))
    made = data.prepare_rule(work.folder, progress=work.progress)
    rule = build.rule_of(data, lambda _: work.folder)
    return Outcome(on_main_process(lambda: _measured(work, rule)) | made.results, (FILE, *made.files))


def images_file(folder: Path) -> Path:
    """Where the stage keeps its images."""
    return folder / FILE


def _measured(work: Work, rule: Constraint) -> dict[str, Any]:
    """How many images there are, and how well they keep their rule; refused where they break it."""
    with open_store(images_file(work.folder)) as store:
        check_values(store["train"])
        some = store["train"][:CHECKED]
        report = rule.check(some)
        shape = "×".join(map(str, store["train"].shape[1:]))
    report.require_obeyed()
    asked = work.settings.map
    noisy = rule.check(some, noise=asked.sigma_max) if asked.standardise else check_at(rule, some, asked.sigma_max)
    noisy.require_active()
    return {
        "images": sum(work.settings.data.sizes.values()),
        "shape": shape,
        "distance_mean": report.mean,
        "distance_max": report.max,
        "distance_noisy": report.noisy_mean,
    }
