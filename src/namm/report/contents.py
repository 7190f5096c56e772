"""What the report of a run is made of: plain values and arrays, read from the run's folder by somebody else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from namm.evaluation.milestone import Milestone
from namm.evaluation.verdict import Verdict
from namm.report.figures.base import Array, View
from namm.report.figures.samples import Method

ROWS = {
    "data": ("data", "other real images: the floor"),
    "mdm": ("ours, not finetuned", "f(ỹ), ỹ sampled in mirror space"),
    "finetuned": ("ours", "the same ỹ through the finetuned f"),
    "dm": ("baseline", "the same model, trained on the images"),
    "projected": ("baseline + project", "its samples, moved onto the rule"),
    "repaired": ("baseline repaired", "f(g(x)) of its samples"),
}
"""Rows of an evaluation by name: what tables call them, and what they are."""


@dataclass(frozen=True)
class Paper:
    """What the paper reports in a row of its Table 1 and of its FID table."""

    cd: float
    mmd: float
    kid: float
    fid: float


@dataclass(frozen=True)
class Row:
    """One way to a sample, measured.

    Attributes:
        name: `data`, `mdm`, `finetuned`, `dm`, `projected` or `repaired`.
        n: samples.
        distance, distance_std, distance_max: mean, standard deviation and largest ℓ.
        cd: 100·λ·ℓ with the paper's λ.
        mmd: √MMD² to held-out data, mean and standard deviation over subsets.
        total_variation, spread: over those of the data.
        kid: mean and standard deviation, where it was measured.
        fid: where it was measured.
        paper: the paper's figures for this row, where it has them.
        verdict: on this row beside the baseline; none for the baseline and the data.
    """

    name: str
    n: int
    distance: float
    distance_std: float
    distance_max: float
    cd: float
    mmd: tuple[float, float]
    total_variation: float
    spread: float
    kid: tuple[float, float] | None = None
    fid: float | None = None
    paper: Paper | None = None
    verdict: str | None = None


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
    """A run.

    Attributes:
        name: of the run's folder.
        experiment, preset: which one, with which numbers to begin with.
        rule: the rule in words, and its numbers.
        changed: settings that differ from the preset's: name, the preset's value, the run's.
        settings: all of them, the text of settings.yaml.
        stages: in order.
        verdict: on the run's samples, or on its map while there are none.
        rows: of the evaluation, the data's floor first; empty while there is none.
        ours, baseline: what either side cost, stage by stage.
        step_seconds: what a step of the baseline would have cost at the speed of its counterpart's training, where the
            two do the same work in a step.
        milestones: ℓ along the way of the trainings, by the row that they lead to.
        methods: the first samples of either method.
        worst: their samples farthest from the rule.
        grids: sets of samples by name.
        trainings: the lines of each training's log.
        view: what people see of an image.
        made: when, with which versions, on what this report was made.
        problems: what could not be read, and why.
    """

    name: str
    experiment: str
    preset: str
    rule: str
    changed: Sequence[tuple[str, str, str]] = ()
    settings: str = ""
    stages: Sequence[StageLine] = ()
    verdict: Verdict | None = None
    rows: Sequence[Row] = ()
    ours: Sequence[Cost] = ()
    baseline: Sequence[Cost] = ()
    step_seconds: float | None = None
    milestones: Mapping[str, Sequence[Milestone]] = field(default_factory=dict)
    methods: Sequence[Method] = ()
    worst: Sequence[Method] = ()
    grids: Mapping[str, Array] = field(default_factory=dict)
    trainings: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    view: View = field(default_factory=View)
    made: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()

    @property
    def missing(self) -> list[str]:
        """Stages that are not complete, the report itself left aside."""
        return [stage.name for stage in self.stages if stage.state != "complete" and stage.name != "report"]

    def row(self, name: str) -> Row | None:
        """The row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name), None)
