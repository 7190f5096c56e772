"""Trajectories of Burgers' equation: every column follows from the one before."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from namm.experiments import recipes
from namm.experiments.engine.experiment import Data, Experiment, Reported, Rule
from namm.experiments.engine.settings import (
    FinetuneSettings,
    ForwardSettings,
    InverseSettings,
    MapSettings,
    Settings,
    WeightSettings,
)
from namm.report.coordinates import Axis, Coordinates
from namm.report.paper_scores import PaperScores

if TYPE_CHECKING:
    from namm.constraints import Constraint
    from namm.datasets import Dataset


@dataclass(frozen=True)
class BurgersRule(Rule):
    """Every column follows from the one before by Burgers' equation."""

    dt: float = 0.025
    """Inner time step Δt."""
    inner_steps: int = 5
    """Inner steps between neighbouring columns."""
    nu: float = 0.05
    """Viscosity ν."""
    length: float = 10.0
    """Distance between the first and the last grid point."""
    flipped: bool = True
    """Whether row 0 is the largest x, as in the paper's images."""
    step: Literal["crank-nicolson", "euler"] = "crank-nicolson"
    """The scheme that the images must follow."""

    def build(self) -> "Constraint":
        """The equation, stepped by the scheme."""
        from namm.constraints.burgers import Burgers
        from namm.simulators.burgers import crank_nicolson, euler

        step = {"crank-nicolson": crank_nicolson, "euler": euler}[self.step]
        return Burgers(step, self.nu, self.length, self.dt, self.inner_steps, self.flipped)


@dataclass(frozen=True)
class BurgersData(Data):
    """Trajectories of Burgers' equation: rows are space, columns time."""

    size: int = 64
    """Grid points, and columns."""
    dt: float = BurgersRule.dt
    """Inner time step Δt."""
    inner_steps: int = BurgersRule.inner_steps
    """Inner steps between neighbouring columns."""
    nu: float = BurgersRule.nu
    """Viscosity ν."""
    length: float = BurgersRule.length
    """Distance between the first and the last grid point."""
    correlation_length: float = 0.2
    """Correlation length of the initial states, on [−1, 1]."""
    flipped: bool = BurgersRule.flipped
    """Whether row 0 is the largest x, as in the paper's images."""

    def build(self) -> "Dataset":
        """Trajectories."""
        from namm.datasets import BurgersTrajectories

        return BurgersTrajectories(**self.recipe)

    @property
    def rule(self) -> BurgersRule:
        """The same equation, grid and orientation."""
        return BurgersRule(
            dt=self.dt, inner_steps=self.inner_steps, nu=self.nu, length=self.length, flipped=self.flipped
        )

    @property
    def coordinates(self) -> Coordinates:
        """Space down, time across: each column is a state, and a residual belongs to the later of two."""
        dx, between = self.length / (self.size - 1), self.inner_steps * self.dt
        time = Axis("t", between, between)
        space = Axis("x", self.length, -dx) if self.flipped else Axis("x", 0.0, dx)
        return Coordinates(space, time, time=time, residual=(0.0, 1.0))


REPORTED = Reported(
    1.0,
    without_finetuning=PaperScores(0.09, 0.1225, 0.0040, 3.36),
    with_finetuning=PaperScores(0.04, 0.1291, 0.0022, 2.04),
    baseline=PaperScores(0.45, 0.0621, 0.2308, 140.70),
)


def _gpu() -> Settings:
    """About three minutes of an H200's compute for either side, most of them the model's; measured in RESULTS.md.

    f is the paper's network in a form that RESULTS.md was measured with: half its filters learn as much in the same
    time and bear a larger rate, and space is periodic while time is not. Samples this good need little mending, so
    there is little noise, a small g does, and f is finetuned long and near them, with more weight on the rule. Budgets
    are steps, so that a busy machine, or another, learns as much. Why each is so: docs/choose/settings.md.
    """
    s = recipes.gpu(BurgersData(10_000, 500, 10_000))
    f = InverseSettings(
        filters=32, normalisation="none", dropout=0.0, skip=True, activation="none", boundary="cylinder"
    )
    train = replace(s.map.train, budget="6000 steps", learning_rate=3e-4)
    tuning = replace(train, budget="10000 steps", learning_rate=2e-4, milestones=4)
    weights = WeightSettings(constraint=5.0, cycle=1.0)
    maps = MapSettings(
        ForwardSettings(layers=2, filters=16), f, sigma_max=0.02, weights=weights, regulariser="identity", train=train
    )
    return replace(
        s,
        map=maps,
        mdm=replace(s.mdm, train=replace(s.mdm.train, budget="6500 steps")),
        finetune=FinetuneSettings(0.005, replace(weights, constraint=20.0), tuning),
        evaluate=replace(s.evaluate, n=10_000, n_fid=10_000, sampler=replace(s.evaluate.sampler, steps=50)),
    )


EXPERIMENT = Experiment(
    "burgers",
    BurgersData,
    BurgersRule,
    presets={
        "demo": recipes.demo(BurgersData(2000, 256, 1024, size=32, dt=0.05)),
        "gpu": _gpu(),
        "paper": recipes.paper(BurgersData(10_000, 1000, 50_000), REPORTED.weight, epochs=(100, 300, 700, 1500)),
    },
    reported=REPORTED,
)
