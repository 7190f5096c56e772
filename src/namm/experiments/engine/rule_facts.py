"""What a report shows of a rule, kept by the stage `evaluate`, so that a report runs no rule of a user's.

rule.json         the rule's name, whether it has a residual and a projection, and how its images are looked at
residuals.npz     where the samples that the report shows break the rule, by method and by how they were chosen

Of one of namm's own rules nothing is needed: it is built from the settings. Runs of version 0.1 have neither file.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from namm.constraints import Constraint, DivergenceFree
from namm.constraints.burgers import Burgers
from namm.errors import RunFolderError, UntrustedRuleError
from namm.experiments.engine import build
from namm.experiments.engine.data_settings import Data
from namm.files import write_atomically, write_json
from namm.generative.sample_file import SampleFile
from namm.report.figures import Array, View
from namm.simulators.fluid import cut, lay_out, vorticity

FACTS, RESIDUALS = "rule.json", "residuals.npz"
FIRST, WORST = "first", "worst"


@dataclass(frozen=True)
class Facts:
    """A rule as a report knows it.

    Attributes:
        name: Its name.
        has_residual, has_project: What it can do besides measure.
        shows: "image", "velocity" or "vorticity": what people look at under this rule.
        size, extent: Of a state, in points and in length, where that is the vorticity.
        problem: Why there are no residuals, if they could not be computed.
        residuals: Of the samples shown, by `<method>_<first or worst>`; none for a rule without pictures of them.
    """

    name: str
    has_residual: bool
    has_project: bool
    shows: str = "image"
    size: int = 0
    extent: float = 0.0
    problem: str = ""
    residuals: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def view(self) -> View:
        """How images are shown."""
        if self.shows == "velocity":
            return View(label="velocity u")
        if self.shows != "vorticity":
            return View()

        def rotation(images: Array) -> Array:
            states = cut(torch.from_numpy(images), self.size)
            return lay_out(vorticity(states, self.extent / self.size).unsqueeze(-3))[:, 0].numpy()

        return View(rotation, "vorticity ∂v/∂x − ∂u/∂y", signed=True)


def facts_of(rule: Constraint) -> Facts:
    """What is known of a rule without images."""
    shows: dict[str, Any] = {}
    if isinstance(rule, Burgers):
        shows = {"shows": "velocity"}
    elif isinstance(rule, DivergenceFree):
        shows = {"shows": "vorticity", "size": rule.size, "extent": rule.extent}
    return Facts(rule.name, rule.has_residual, rule.has_project, **shows)


def samples_shown(samples: SampleFile) -> Iterator[tuple[str, NDArray[Any]]]:
    """Which samples a report shows: the first of the file, and those farthest from the rule."""
    distances = samples.distances
    _, _, height, width = samples.images.shape
    count = 4 if width <= height else 2
    yield FIRST, np.arange(min(count, len(distances)))
    yield WORST, np.argsort(distances)[::-1][:count]


@torch.no_grad()
def residual_pictures(rule: Constraint, images: Tensor, device: torch.device | None = None) -> NDArray[Any] | None:
    """Where the images break the rule, for a rule that has a picture of it."""
    if not rule.has_residual:
        return None
    images = images.to(device)
    found = rule.follow(images).residual(images).cpu().numpy()
    return found if found.ndim == 4 else None


# In the stage's folder


def write_facts(folder: Path, rule: Constraint, samples: Mapping[str, SampleFile], device: torch.device) -> None:
    """Keep what a report needs of a rule; a residual that fails costs its pictures alone."""
    found: dict[str, NDArray[Any]] = {}
    facts = asdict(facts_of(rule))
    facts.pop("residuals")
    try:
        for method, file in samples.items():
            for which, rows in samples_shown(file):
                pictures = residual_pictures(rule, file.images[rows], device)
                if pictures is not None:
                    found[f"{method}_{which}"] = pictures
    except Exception as error:  # a user's code may raise anything
        found, facts["problem"] = {}, f"{type(error).__name__}: {error}"
    buffer = io.BytesIO()
    np.savez(buffer, **found)  # type: ignore[arg-type]
    write_atomically(folder / RESIDUALS, buffer.getvalue())
    write_json(folder / FACTS, facts)


def read_facts(folder: Path) -> Facts | None:
    """What `write_facts` left there; None in a run of version 0.1."""
    if not (folder / FACTS).exists():
        return None
    try:
        known = json.loads((folder / FACTS).read_text())
        with (folder / RESIDUALS).open("rb") as raw, np.load(raw, allow_pickle=False) as arrays:
            facts = Facts(**known, residuals={name: arrays[name] for name in arrays.files})
        if facts.shows == "vorticity" and not (facts.size > 0 and facts.extent > 0):
            raise ValueError(f"a state of {facts.size} points and length {facts.extent}")
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise RunFolderError(f"{folder / FACTS} and {RESIDUALS} cannot be read ({error}): move them away.") from error
    return facts


def report_rule(data: Data, folder: Callable[[str], Path], evaluated: Path | None) -> Facts | Constraint | None:
    """What a report is made with: namm's own rule, or what was kept of a user's; None if there is nothing to show.

    A user's rule is run only where nothing was kept of it, and only if it is trusted.

    Args:
        data: Settings of the run's data, whose rule it is.
        folder: Gives the folder of a stage by its name.
        evaluated: The folder of the stage `evaluate`, where that is complete.
    """
    if not data.rule.named_code:
        return build.rule_of(data, folder, "cpu")
    kept = None if evaluated is None else read_facts(evaluated)
    if kept is not None:
        return kept
    try:
        return build.rule_of(data, folder, "cpu")
    except UntrustedRuleError:
        if evaluated is None:
            return None
        raise
