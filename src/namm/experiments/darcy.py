"""The Darcy flow: pressure and permeability under one PDE, a public benchmark that is not among the paper's five."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from namm.experiments import recipes
from namm.experiments.engine.experiment import Data, Experiment, Rule
from namm.experiments.engine.settings import Settings
from namm.report.coordinates import Axis, Coordinates

if TYPE_CHECKING:
    from namm.constraints import Constraint
    from namm.datasets import Dataset


@dataclass(frozen=True)
class DarcyRule(Rule):
    """The Darcy equation and its walls, on a grid as large as the image."""

    def build(self) -> "Constraint":
        """The mean residual."""
        from namm.constraints import Darcy

        return Darcy()


@dataclass(frozen=True)
class DarcyData(Data):
    """Pressure p and log-normal permeability K on the unit square."""

    n_val: int = 500
    """Held-out images to watch the training with."""
    n_test: int = 1000
    """Held-out images to evaluate with."""
    size: int = 64
    """Grid points along a side."""
    correlation: float = 0.1
    """Distance at which the correlation of log K falls to 1/e, in sides."""
    terms: int = 64
    """Random coefficients of log K."""

    def build(self) -> "Dataset":
        """The flow."""
        from namm.datasets import DarcyFlow

        return DarcyFlow(**self.recipe)

    @property
    def rule(self) -> DarcyRule:
        """The equation on the same grid, which the images show."""
        return DarcyRule()

    @property
    def coordinates(self) -> Coordinates:
        """The unit square, whose walls the first and last points lie on."""
        h = 1 / (self.size - 1)
        return Coordinates(Axis("x", 0.0, h), Axis("y", 0.0, h))


@dataclass(frozen=True)
class Published:
    """A method's column of the published comparisons, as printed.

    Attributes:
        re: Residual error, our ℓ.
        wd: 10² times the Wasserstein distance of the values' distributions.
        js: 10 times their Jensen–Shannon distance.
        evaluations: Evaluations of the network per sample.
        seconds: Time per sample.
    """

    re: float
    wd: float
    js: float
    evaluations: int
    seconds: float


PUBLISHED = {
    "FM-OT": Published(4.159, 0.059, 0.131, 20, 0.100),
    "DiffusionPDE": Published(3.388, 0.089, 0.139, 20, 0.590),
    "D-Flow": Published(2.286, 0.147, 0.237, 20, 3.126),
    "CoCoGen": Published(1.320, 0.249, 0.360, 100, 7.395),
    "ECI": Published(3.045, 2.892, 2.818, 20, 0.122),
    "PIDM-ME": Published(0.022, 3.103, 3.179, 100, 2.050),
    "PBFM": Published(0.838, 0.138, 0.256, 20, 0.101),
    "PMosFM": Published(0.120, 0.049, 0.014, 1, 0.018),
}
"""What others report for 64×64 points and 1024 samples: the comparisons in the papers on PBFM (physics-based flow
matching) and on PMosFM. Their data come from the generator of PIDM (physics-informed diffusion models), whose numbers
`namm.simulators.darcy` has. RE is defined; the evaluator of WD and JS was not published, so these two compare the
methods with each other and with nothing of ours.
"""

SIGMA_MAX = 0.02
"""In standard deviations; a fifth of other rules', since second differences make ℓ of it 8000 times the data's own."""


def _without_pictures(settings: Settings, subset: int) -> Settings:
    """Two fields are no picture that Inception could be shown."""
    return replace(settings, evaluate=replace(settings.evaluate, subset=subset, kid_subsets=0))


EXPERIMENT = Experiment(
    "darcy",
    DarcyData,
    DarcyRule,
    presets={
        "demo": _without_pictures(recipes.demo(DarcyData(1000, 64, 512, size=32), sigma_max=SIGMA_MAX), 256),
        "gpu": _without_pictures(recipes.gpu(DarcyData(10_000, 500, 2000), sigma_max=SIGMA_MAX), 1000),
    },
)
