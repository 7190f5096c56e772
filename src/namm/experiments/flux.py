"""Black holes of one total brightness: all pixels add up to the same number."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namm.experiments import recipes
from namm.experiments.engine.experiment import Data, Experiment, Reported, Rule
from namm.report.paper_scores import PaperScores

if TYPE_CHECKING:
    from namm.constraints import Constraint
    from namm.datasets import Dataset


@dataclass(frozen=True)
class FluxRule(Rule):
    """All pixels add up to `total`."""

    total: float = 120.0
    """Sum of all pixels."""

    def build(self) -> "Constraint":
        """The total flux."""
        from namm.constraints import TotalFlux

        return TotalFlux(self.total)


@dataclass(frozen=True)
class FluxData(Data):
    """Images of black holes, scaled to one total brightness."""

    n_train: int = 100_000
    n_val: int = 100
    size: int = 64
    """Pixels along a side."""
    total: float = FluxRule.total
    """Sum of all pixels."""

    def build(self) -> "Dataset":
        """Black holes."""
        from namm.datasets import BlackHoles

        return BlackHoles(**self.recipe)

    @property
    def rule(self) -> FluxRule:
        """The same total."""
        return FluxRule(total=self.total)


REPORTED = Reported(
    0.01,
    without_finetuning=PaperScores(0.57, 0.0957, 0.0026, 5.02),
    with_finetuning=PaperScores(0.49, 0.1023, 0.0027, 4.58),
    baseline=PaperScores(2.20, 0.0956, 0.0462, 42.25),
)

EXPERIMENT = Experiment(
    "flux",
    FluxData,
    FluxRule,
    presets={
        "demo": recipes.demo(FluxData(2048, 256, 1024, size=32), model="1600 steps"),
        "gpu": recipes.gpu(FluxData(20_000, 500, 10_000)),
        "paper": recipes.paper(
            FluxData(100_000, 100, 10_000), REPORTED.weight, epochs=(30, 200, 1000, 450), reference="train"
        ),
    },
    reported=REPORTED,
    dataset="black-holes",
)
