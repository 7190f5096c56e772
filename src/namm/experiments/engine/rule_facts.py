"""What a report shows of a rule, kept by the stage `evaluate`, so that a report runs no rule of a user's.

rule.json         the rule's name, whether it has a residual and a projection, and how its images are looked at
residuals.npz     where the samples that the report shows break the rule, by method and by how they were chosen

Nothing is needed of namm's own rules: they are built from the settings. Runs of version 0.1 have neither file.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from namm.constraints import Constraint
from namm.datasets.readers import read_arrays
from namm.errors import RunFolderError, UntrustedRuleError
from namm.experiments.engine import build
from namm.experiments.engine.experiment import Data
from namm.files import write_atomically, write_json
from namm.generative.sample_file import SampleFile
from namm.reading import REASON, damage_as, load_json
from namm.report.figures import View
from namm.report.figures.views import shown_of, view_named

FACTS, RESIDUALS = "rule.json", "residuals.npz"
FIRST, WORST = "first", "worst"


@dataclass(frozen=True)
class RuleFacts:
    """A rule as a report knows it.

    Attributes:
        name: Its name.
        has_residual, has_project: What it can do besides measure.
        shows: "image", "velocity" or "vorticity": what people look at under this rule.
        size, extent: A state's points and length along a side, where people look at its vorticity.
        problem: Why there are no residuals, if they could not be computed.
        residuals: Kept pictures of where the samples shown break the rule, by `<method>_<first or worst>`.
        rule: The rule itself, where it may be run; its pictures are then computed.
    """

    name: str
    has_residual: bool
    has_project: bool
    shows: str = "image"
    size: int = 0
    extent: float = 0.0
    problem: str = ""
    residuals: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    rule: Constraint | None = None

    @property
    def view(self) -> View:
        """How images are shown."""
        return view_named(self.shows, self.size, self.extent)

    @torch.no_grad()
    def residual_pictures(self, key: str, images: Tensor) -> NDArray[Any] | None:
        """Where the images that `key` names break the rule, for a rule that has a picture of it."""
        if self.rule is None:
            pictures = self.residuals.get(key)
        else:
            pictures = self.rule.follow(images).residual(images).cpu().numpy() if self.has_residual else None
        is_usable = pictures is not None and pictures.ndim == 4 and len(pictures) == len(images)
        return pictures if is_usable else None


def facts_of(rule: Constraint) -> RuleFacts:
    """What is known of a rule that may be run."""
    return RuleFacts(rule.name, rule.has_residual, rule.has_project, rule=rule, **asdict(shown_of(rule)))


def samples_shown(samples: SampleFile) -> Iterator[tuple[str, NDArray[Any]]]:
    """Which samples a report shows: the first of the file, and those farthest from the rule."""
    distances = samples.distances
    _, _, height, width = samples.images.shape
    count = 4 if width <= height else 2
    yield FIRST, np.arange(min(count, len(distances)))
    yield WORST, np.argsort(distances)[::-1][:count]


def write_facts(folder: Path, rule: Constraint, samples: Mapping[str, SampleFile], device: torch.device) -> None:
    """Keep in a stage's folder what a report needs of a rule; a residual that fails costs its pictures alone."""
    facts, pictures = facts_of(rule), {}
    content = {f.name: getattr(facts, f.name) for f in fields(facts) if f.name not in ("residuals", "rule")}
    try:
        for method, file in samples.items():
            for which, rows in samples_shown(file):
                picture = facts.residual_pictures("", file.images[rows].to(device))
                if picture is not None:
                    pictures[f"{method}_{which}"] = picture
    except Exception as error:  # a user's code may raise anything
        pictures, content["problem"] = {}, f"{type(error).__name__}: {error}"
    buffer = io.BytesIO()
    np.savez(buffer, **pictures)  # type: ignore[arg-type]
    write_atomically(folder / RESIDUALS, buffer.getvalue())
    write_json(folder / FACTS, content)


def report_facts(data: Data, folder: Callable[[str], Path], evaluated: Path | None) -> RuleFacts | None:
    """What a report is made with: namm's own rule, or what was kept of a user's; None if there is nothing to show.

    A user's rule is run only where nothing was kept of it, and only if it is trusted.

    Args:
        data: Settings of the run's data, whose rule it is.
        folder: Gives the folder of a stage by its name.
        evaluated: The folder of the stage `evaluate`, where that is complete.
    """
    if data.rule.named_code and evaluated is not None and (evaluated / FACTS).exists():
        return _read_facts(evaluated)
    try:
        return facts_of(build.rule_of(data, folder, "cpu"))
    except UntrustedRuleError:
        if evaluated is None:
            return None
        raise


def _read_facts(folder: Path) -> RuleFacts:
    sentence = f"{folder / FACTS} and {RESIDUALS} cannot be read ({REASON}): move them away."
    with damage_as(RunFolderError, sentence):
        known = load_json(folder / FACTS)
        facts = RuleFacts(**known | {"residuals": read_arrays(folder / RESIDUALS), "rule": None})
        if facts.shows == "vorticity" and not (facts.size > 0 and facts.extent > 0):
            raise ValueError(f"a state of {facts.size} points and length {facts.extent}")
    return facts
