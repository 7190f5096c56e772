"""The stage `data`: the images of an experiment in one HDF5 file, and the network that counts where one is needed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from namm.constraints import Constraint, Counter
from namm.constraints.contract import check_at
from namm.datasets import open_store, write_store
from namm.datasets.batches import check_values
from namm.experiments.data_settings import CountData
from namm.experiments.engine import build
from namm.experiments.engine.processes import alone
from namm.experiments.engine.stages import Outcome, Work

FILE = "images.h5"
CHECKED = 256
"""Images on which the data's own distance is measured."""


def make_data(work: Work) -> Outcome:
    """Draw the images, train the network that counts, or go on with either, and measure how well the rule is kept.

    What cannot be trained on is refused here: constant images, a broken rule, a rule that does not notice σ_max.
    What the network's training takes is compute of neither side: the rule is given to both.
    """
    data, found, files = work.settings.data, {}, [FILE]
    alone(lambda: _draw(work))
    if isinstance(data, CountData) and not data.counter:
        counter = make_counter(data, work.folder / build.COUNTER, progress=work.progress)
        found, files = {"counter_error": counter.facts["error"]}, [FILE, build.COUNTER]
    rule = build.rule_of(data, lambda _: work.folder)
    return Outcome(alone(lambda: _measured(work, rule)) | found, tuple(files))


def make_counter(data: CountData, path: Path, *, progress: bool = True) -> Counter:
    """The counter that `data` describe, trained, trained further or read back; every process calls this."""
    from namm.training.counter import COUNTER_SETTINGS, train_counter

    asked = data.counter_training
    settings = replace(
        COUNTER_SETTINGS,
        budget=asked.budget,
        batch_size=asked.batch_size,
        warmup_steps=asked.warmup_steps,
        seed=asked.seed,
    )
    return train_counter(
        path,
        size=data.size,
        labels=data.labels,
        n_train=asked.n_train,
        n_val=asked.n_val,
        settings=settings,
        like={name: value for name, value in data.recipe.items() if name not in ("size", "count")},
        progress=progress,
    )


def images_file(folder: Path) -> Path:
    """Where the stage keeps its images."""
    return folder / FILE


def _draw(work: Work) -> None:
    data = work.settings.data
    write_store(images_file(work.folder), build.dataset(data), data.sizes, seed=data.seed, quiet=not work.progress)


def _measured(work: Work, rule: Constraint) -> dict[str, Any]:
    """How many images there are, and how well they keep their rule; refused where they break it."""
    data = work.settings.data
    with open_store(images_file(work.folder)) as store:
        check_values(store["train"])
        some = store["train"][:CHECKED]
        report = rule.check(some)
        shape = "×".join(map(str, store["train"].shape[1:]))
    report.require_obeyed()
    check_at(rule, some, work.settings.map.sigma_max).require_active()
    return {
        "images": sum(data.sizes.values()),
        "shape": shape,
        "distance_mean": report.mean,
        "distance_max": report.max,
        "distance_noisy": report.noisy_mean,
    }
