"""A finished run as the paper's items read it, with what they measure on it beyond its own stages.

Measurements lie in `RUN/studies/NAME-KEY`, where the key holds everything they depend on: what is there already is what
would be measured again.
"""

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
from namm.evaluation.mmd import Subset
from namm.experiments.engine.run_parts import RunParts, device
from namm.experiments.engine.settings_file import digest
from namm.experiments.engine.stages import stage_keys
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.evaluate import read_metrics
from namm.experiments.sweeps.cell import CellOutcome
from namm.numerics import arithmetic
from namm.report.figures import Array

HISTOGRAM = 128
"""Samples in a histogram of distances, as in the paper."""
FEATURES = "features"
"""In the folder of all runs: features of Inception, which cells with the same images have in common."""


class FinishedRun:
    """A cell that is complete."""

    def __init__(self, outcome: CellOutcome) -> None:
        self.cell, self.folder = outcome.cell, outcome.folder
        self.settings = outcome.cell.preset.settings
        self.parts = RunParts(self.settings, lambda stage: self.folder / stage)

    def metrics(self) -> dict[str, Any]:
        """What the stage `evaluate` measured."""
        return read_metrics(self.folder / "evaluate")

    @contextmanager
    def images(self) -> Iterator[Store]:
        """The run's data."""
        with open_store(images_file(self.folder / "data")) as store:
            yield store

    def held_out_image(self) -> torch.Tensor:
        """The first held-out image, (1, C, H, W)."""
        with self.images() as store:
            return store["test" if store.sizes["test"] else "val"][:1]

    def study(self, name: str, needs: Sequence[str], asked: Any = None) -> Path:
        """The folder of a measurement that is made of the stages `needs` and of whatever else `asked` says."""
        keys = stage_keys(self.settings)
        key = digest({"needs": {stage: keys[stage] for stage in needs}, "asked": asked})
        return self.folder / "studies" / f"{name}-{key[:12]}"

    def extractor(self, rule: Constraint) -> Extractor:
        """Inception with the rule's kind of picture; all cells of a folder keep features in one place, by content."""
        return Extractor(picture_for(rule), cache=self.folder.parent / FEATURES, device=device())

    def score(self, images: Images, reference: Images, rule: Constraint) -> dict[str, Any]:
        """ℓ, √MMD², total variation and spread of images (N, C, H, W), and KID where the settings ask for it."""
        asked = self.settings.evaluate
        first = Subset(images, np.arange(min(asked.n, images.shape[0])))
        how: dict[str, Any] = {"size": asked.subset, "seed": asked.seed}
        scores = asdict(compare(first, reference, rule, subsets=asked.mmd_subsets, device=device(), **how))
        if asked.kid_subsets:
            scores["kid"] = kid(reference, first, self.extractor(rule), subsets=asked.kid_subsets, **how)
        return scores

    @torch.no_grad()
    def distances(self, stage: str, mirror_images: Images) -> Array:
        """ℓ(f(y)) of the first mirror images y with the f of `map` or `finetune`, (`HISTOGRAM`,) or fewer."""
        y = torch.as_tensor(mirror_images[: min(HISTOGRAM, mirror_images.shape[0])]).to(device())
        with arithmetic("fp32", device()):
            return self.parts.rule()(self.parts.mirror(stage).to_data(y)).cpu().numpy()
