"""The Kolmogorov flow: velocities without divergence, several states to an image."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from namm.experiments import recipes
from namm.experiments.engine.experiment import Data, Experiment, Reported, Rule
from namm.experiments.engine.settings import InverseSettings
from namm.report.coordinates import Axis, Coordinates
from namm.report.paper_scores import PaperScores

if TYPE_CHECKING:
    from namm.constraints import Constraint
    from namm.datasets import Dataset


@dataclass(frozen=True)
class DivergenceRule(Rule):
    """The velocity's divergence on the staggered grid is zero."""

    extent: float = 2 * math.pi
    """Side of the periodic domain."""
    size: int = 64
    """Grid points along a side of one state; an image holds several states side by side."""

    def build(self) -> "Constraint":
        """The mean divergence."""
        from namm.constraints import DivergenceFree

        return DivergenceFree(size=self.size, extent=self.extent)


@dataclass(frozen=True)
class DivergenceData(Data):
    """Kolmogorov flow on [0, 2π]²: `rows` × `columns` states of u and v laid out as one image."""

    size: int = DivergenceRule.size
    """Grid points along a side of one state."""
    rows: int = 2
    """States from top to bottom."""
    columns: int = 4
    """States from left to right."""
    reynolds: float = 1000.0
    """Reynolds number."""
    forcing: float = 1.0
    """Magnitude of the forcing."""
    wavenumber: int = 4
    """Wavenumber of the forcing, and where the initial fields have their energy."""
    damping: float = 0.1
    """Linear drag."""
    max_speed: float = 3.0
    """Largest initial speed."""
    dt: float = 0.01
    """Inner time step Δt."""
    inner_steps: int = 20
    """Inner steps between neighbouring states."""
    start: float = 3.0
    """Time of the first state."""

    def build(self) -> "Dataset":
        """The flow."""
        from namm.datasets import KolmogorovFlow

        return KolmogorovFlow(**self.recipe)

    @property
    def rule(self) -> DivergenceRule:
        """The same grid."""
        return DivergenceRule(size=self.size)

    @property
    def coordinates(self) -> Coordinates:
        """Vorticity, at the corners of the cells; the divergence is at their centres."""
        h = self.rule.extent / self.size
        time = Axis("t", self.start, self.inner_steps * self.dt)
        return Coordinates(Axis("x", h, h), Axis("y", h, h), state=self.size, time=time, residual=(-0.5, -0.5))


REPORTED = Reported(
    1.0,
    without_finetuning=PaperScores(2.51, 0.0664, 0.0035, 2.21),
    with_finetuning=PaperScores(1.57, 0.0781, 0.0058, 3.97),
    baseline=PaperScores(6.96, 0.0595, 0.0053, 3.41),
)
EXPERIMENT = Experiment(
    "divergence",
    DivergenceData,
    DivergenceRule,
    presets={
        "demo": recipes.demo(DivergenceData(1000, 64, 1024, size=32, rows=1, columns=2), model="1000 steps"),
        "gpu": recipes.gpu(DivergenceData(4000, 200, 2000), share=4),
        "paper": recipes.paper(
            DivergenceData(10_000, 1000, 50_000),
            REPORTED.weight,
            epochs=(100, 700, 500, 2000),
            layers=2,
            f=InverseSettings(residual=False, activation="none"),
            sigma_max=0.5,
            rate=1e-3,
        ),
    },
    reported=REPORTED,
    dataset="kolmogorov",
)
