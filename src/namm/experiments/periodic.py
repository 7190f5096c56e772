"""Two-phase materials: an image is copies of one unit cell."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namm.experiments import recipes
from namm.experiments.engine.experiment import Data, Experiment, Reported, Rule
from namm.report.paper_scores import PaperScores

if TYPE_CHECKING:
    from namm.constraints import Constraint
    from namm.datasets import Dataset


@dataclass(frozen=True)
class PeriodicRule(Rule):
    """The image is copies of one unit cell."""

    tiles: int = 2
    """Copies along a side."""
    across: int | None = None
    """Copies from left to right, where that is another number than from top to bottom."""

    def build(self) -> "Constraint":
        """The distance between the copies."""
        from namm.constraints import Periodic

        return Periodic((self.tiles, self.across or self.tiles))


@dataclass(frozen=True)
class PeriodicData(Data):
    """Random two-phase unit cells, tiled."""

    n_train: int = 30_000
    n_val: int = 300
    size: int = 64
    """Pixels along a side."""
    tiles: int = PeriodicRule.tiles
    """Copies of the cell along a side."""
    scale: float = 0.7
    """Standard deviation of the Gaussian field."""
    length: float = 0.7
    """Its length scale, in cells."""
    mean: float = 0.5
    """Its mean."""
    threshold: float | None = 0.5
    """Where the two phases part; none keeps grey values."""

    def build(self) -> "Dataset":
        """Unit cells."""
        from namm.datasets import UnitCells

        return UnitCells(**self.recipe)

    @property
    def rule(self) -> PeriodicRule:
        """The same tiling."""
        return PeriodicRule(tiles=self.tiles)


REPORTED = Reported(
    1.0,
    without_finetuning=PaperScores(0.04, 0.0760, 0.0018, 2.26),
    with_finetuning=PaperScores(0.04, 0.0758, 0.0014, 1.99),
    baseline=PaperScores(1.04, 0.0533, 0.0064, 6.42),
)
SIGMA_MAX = 0.3
"""Models of these binary images err by more than others do."""

EXPERIMENT = Experiment(
    "periodic",
    PeriodicData,
    PeriodicRule,
    presets={
        "demo": recipes.demo(PeriodicData(2048, 256, 1024, size=16), sigma_max=SIGMA_MAX, model="2000 steps"),
        "gpu": recipes.gpu(PeriodicData(20_000, 500, 10_000), sigma_max=SIGMA_MAX),
        "paper": recipes.paper(PeriodicData(30_000, 300, 50_000), REPORTED.weight, epochs=(50, 300, 1000, 1000)),
    },
    reported=REPORTED,
    dataset="unit-cells",
)
