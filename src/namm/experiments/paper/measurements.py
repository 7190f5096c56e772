"""What is read from a run, and what is measured on it beyond its own stages.

Measurements lie in `RUN/studies/NAME-KEY`, where the key holds everything they depend on: what is there already is what
would be measured again.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.batches import Images
from namm.datasets.store import Store
from namm.evaluation import Extractor, compare, kid, picture_for
from namm.evaluation.rows import View
from namm.experiments.engine.judgement import METRICS
from namm.experiments.engine.run_parts import Trained, device
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.settings_file import digest
from namm.experiments.engine.stages import stage_keys
from namm.experiments.engine.stages.data import images_file
from namm.experiments.sweeps.cell import CellOutcome
from namm.maps import MirrorMap
from namm.numerics import arithmetic
from namm.report.figures import Array

HISTOGRAM = 128
"""Samples in a histogram of distances, as in the paper."""
FEATURES = "features"
"""In the folder of all runs: features of Inception, which cells with the same images have in common."""


# What the stages left


def settings_of(outcome: CellOutcome) -> Settings:
    """The settings of a cell."""
    return outcome.cell.preset.settings


def metrics(outcome: CellOutcome) -> dict[str, Any]:
    """What the stage `evaluate` measured."""
    found: dict[str, Any] = json.loads((outcome.folder / "evaluate" / METRICS).read_text())
    return found


def trained(outcome: CellOutcome) -> Trained:
    """The trained parts of a finished cell."""
    return Trained(settings_of(outcome), lambda stage: outcome.folder / stage)


@contextmanager
def images_of(outcome: CellOutcome) -> Iterator[Store]:
    """The data of a finished cell."""
    with open_store(images_file(outcome.folder / "data")) as store:
        yield store


def by_experiment(outcomes: Sequence[CellOutcome]) -> dict[str, list[CellOutcome]]:
    """All outcomes, failed ones too, by experiment, in order."""
    found: dict[str, list[CellOutcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.cell.preset.experiment, []).append(outcome)
    return found


def complete(outcomes: Sequence[CellOutcome]) -> list[CellOutcome]:
    """Those that did not fail."""
    return [outcome for outcome in outcomes if outcome.error is None]


# What is measured besides


def study(outcome: CellOutcome, name: str, needs: Sequence[str], asked: Any = None) -> Path:
    """The folder of a measurement that is made of the stages `needs` and of whatever else `asked` says."""
    keys = stage_keys(settings_of(outcome))
    key = digest({"needs": {stage: keys[stage] for stage in needs}, "asked": asked})
    return outcome.folder / "studies" / f"{name}-{key[:12]}"


def extractor_for(outcome: CellOutcome, rule: Constraint) -> Extractor:
    """Inception with the rule's kind of picture; all cells of a folder keep features in one place, by content."""
    return Extractor(picture_for(rule), cache=outcome.folder.parent / FEATURES, device=device())


def score(outcome: CellOutcome, images: Images, reference: Images, rule: Constraint) -> dict[str, Any]:
    """ℓ, √MMD², total variation and spread of images (N, C, H, W), and KID where the cell's settings ask for it."""
    asked = settings_of(outcome).evaluate
    first = View(images, np.arange(min(asked.n, images.shape[0])))
    how: dict[str, Any] = {"size": asked.subset, "seed": asked.seed}
    found = asdict(compare(first, reference, rule, subsets=asked.mmd_subsets, device=device(), **how))
    if asked.kid_subsets:
        found["kid"] = kid(reference, first, extractor_for(outcome, rule), subsets=asked.kid_subsets, **how)
    return found


@torch.no_grad()
def distances(rule: Constraint, mirror: MirrorMap, mirror_images: Images, n: int = HISTOGRAM) -> Array:
    """ℓ(f(y)) of the first `n` mirror images y, (n,)."""
    y = torch.as_tensor(mirror_images[: min(n, mirror_images.shape[0])]).to(device())
    with arithmetic("fp32", device()):
        return rule(mirror.to_data(y)).cpu().numpy()
