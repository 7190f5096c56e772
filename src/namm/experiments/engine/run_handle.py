"""A run as an object: `namm.Run("runs/demo")` has the maps, the model, samples, figures and images of a folder."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.store import Store
from namm.evaluation.verdict import Verdict
from namm.experiments.engine import build
from namm.experiments.engine.folder import find_run
from namm.experiments.engine.judgement import METRICS, run_verdict
from namm.experiments.engine.run_parts import Trained, complete_stage, is_complete
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.status import describe_run
from namm.formatting import html_table
from namm.generative.mirrored import Mirrored
from namm.maps import MirrorMap


class Run:
    """A run that `namm run` made; each part is read when it is first asked for.

    A stage that is not complete is refused with the command that completes it.

    Args:
        folder: The run's folder, or its name in `runs`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_run(folder)
        self._trained = Trained.load(self.folder)

    @property
    def settings(self) -> Settings:
        """The settings of the run's last call."""
        return self._trained.settings

    @cached_property
    def rule(self) -> Constraint:
        """ℓ, where models run."""
        return self._trained.rule()

    @cached_property
    def mirror(self) -> MirrorMap:
        """g and f; f as finetuning left it, where that is complete."""
        return self._trained.mirror(self._stage_of_f)

    @cached_property
    def model(self) -> Mirrored:
        """The mirrored diffusion model: y from the model in mirror space, x = f(y)."""
        return self._trained.source("mdm", self.mirror)

    def sample(self, n: int, *, seed: int = 0, **options: Any) -> Tensor:
        """Draw images (n, C, H, W), with the sampler that the run is evaluated by unless `sampler` is given."""
        how = build.sampling(self.settings.evaluate.sampler) | options
        with torch.no_grad():
            return self.model.sample(n, generator=seed, **how)

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        """What the stage `evaluate` measured: the contents of its metrics.json."""
        found: Mapping[str, Any] = json.loads((complete_stage(self.folder, "evaluate") / METRICS).read_text())
        return found

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the samples, or on the map while there are none; None before that."""
        return run_verdict(self.folder, self._stage_of_f)

    @cached_property
    def images(self) -> Store:
        """The run's data: `run.images["test"][:4]` reads four images (4, C, H, W)."""
        return open_store(images_file(complete_stage(self.folder, "data")))

    @property
    def _stage_of_f(self) -> str:
        return "finetune" if is_complete(self.folder, "finetune") else "map"

    def __repr__(self) -> str:
        about = describe_run(self.folder)
        return f"Run({str(self.folder)!r}: {about.experiment}, preset {about.preset}, done: {', '.join(about.done)})"

    def _repr_html_(self) -> str:
        about, verdict = describe_run(self.folder), self.verdict
        rows = [("experiment", about.experiment), ("preset", about.preset), ("stages", ", ".join(about.done))]
        return html_table(
            str(self.folder), [*rows, ("verdict", "not judged yet" if verdict is None else verdict.headline)]
        )
