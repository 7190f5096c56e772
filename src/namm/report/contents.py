"""What the report of a run is made of: plain values and arrays, collected by `stages/report.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from namm.evaluation.scores import Milestone
from namm.evaluation.verdict import Verdict
from namm.report.figures.base import Array, View
from namm.report.figures.samples import Method, MirrorSpace
from namm.report.paper_scores import PaperScores

ROWS = {
    "data": ("data", "other real images: the floor"),
    "mdm": ("ours, not finetuned", "f(ỹ), ỹ sampled in mirror space"),
    "finetuned": ("ours", "the same ỹ through the finetuned f"),
    "few": ("ours, few steps", "f(ỹ), ỹ by one to four evaluations of a model distilled from ours, f finetuned"),
    "dm": ("baseline", "the same model, trained on the images"),
    "projected": ("baseline + project", "its samples, moved onto the rule"),
    "repaired": ("baseline repaired", "f(g(x)) of its samples"),
    "repair": ("repair at equal compute", "f(g(x)) of a shorter baseline's samples, f finetuned on them"),
    "finetuned_polished": ("ours, polished", "moved to the nearest images on the rule"),
    "dm_polished": ("baseline polished", "its samples, moved to the nearest images on the rule"),
    "repaired_polished": ("repaired, polished", "f(g(x)) of its samples, moved to the nearest images on the rule"),
}
"""Rows of an evaluation by name: what tables call them, and what they are."""


@dataclass(frozen=True)
class Row:
    """One way to a sample, measured; its name is a key of `ROWS`."""

    name: str
    n: int
    distance: float  # mean ℓ
    distance_std: float
    distance_max: float
    cd: float  # 100·λ·ℓ with the paper's λ
    mmd: tuple[float, float]  # √MMD² to held-out data, mean and standard deviation over subsets
    total_variation: float  # over the data's
    spread: float  # over the data's
    kid: tuple[float, float] | None = None  # mean and standard deviation, where it was measured
    fid: float | None = None
    paper: PaperScores | None = None
    verdict: str | None = None  # beside the baseline; none for the baseline and the data


@dataclass(frozen=True)
class StageLine:
    """A stage: its name, state, wall-clock seconds, what it found, when it ended and by which version."""

    name: str
    state: str
    seconds: float | None = None
    results: str = ""
    finished: str = ""
    version: str = ""


@dataclass(frozen=True)
class Cost:
    """Compute of a stage: seconds in training or sampling steps, and how many of them."""

    stage: str
    seconds: float
    steps: int | None = None


@dataclass(frozen=True)
class Contents:
    """A run."""

    name: str  # of the run's folder
    experiment: str
    preset: str  # with whose numbers it began
    rule: str  # in words, with its numbers
    changed: Sequence[tuple[str, str, str]] = ()  # settings that differ: name, the preset's value, the run's
    settings: str = ""  # the text of settings.yaml
    stages: Sequence[StageLine] = ()
    verdict: Verdict | None = None  # on the run's samples, or on its map while there are none
    rows: Sequence[Row] = ()  # of the evaluation, the data's floor first
    certificates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # summaries of polished rows, by name
    ours: Sequence[Cost] = ()  # what our side cost, stage by stage
    baseline: Sequence[Cost] = ()
    few: Sequence[Cost] = ()  # what the few-step model cost beyond ours
    repair: Sequence[Cost] = ()  # what repair at equal compute cost: the map, the shorter baseline and the stage itself
    step_seconds: float | None = None  # a step of the baseline at the speed of its counterpart, where steps are equal
    milestones: Mapping[str, Sequence[Milestone]] = field(default_factory=dict)  # by the row that they lead to
    methods: Sequence[Method] = ()  # the first samples of either method
    worst: Sequence[Method] = ()  # their samples farthest from the rule
    grids: Mapping[str, Array] = field(default_factory=dict)  # sets of samples by name
    mirror: MirrorSpace | None = None  # what mirror space looks like, where it was kept
    tuning: Mapping[str, Any] | None = None  # how σ_max and λ were chosen (`Tuning`), where they were
    trainings: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # the lines of each log
    view: View = field(default_factory=View)  # what people see of an image
    made: Mapping[str, str] = field(default_factory=dict)  # when, with which versions, on what the report was made
    problems: Sequence[str] = ()  # what could not be read, and why

    @property
    def missing(self) -> list[str]:
        """Stages that are not complete, the report itself left aside."""
        return [stage.name for stage in self.stages if stage.state != "complete" and stage.name != "report"]

    def row(self, name: str) -> Row | None:
        """The row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name), None)
