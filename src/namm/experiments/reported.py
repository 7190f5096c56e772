"""What the paper reports, as data: its Table 1 and its FID table."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scores:
    """One column of the paper's Table 1 and of its FID table."""

    cd: float
    mmd: float
    kid: float
    fid: float


@dataclass(frozen=True)
class Reported:
    """What the paper reports. `weight` is its λ_constr: CD = 100·λ·ℓ."""

    weight: float
    without_finetuning: Scores
    with_finetuning: Scores
    baseline: Scores

    def cd(self, distance: float) -> float:
        """A mean distance ℓ on the paper's scale."""
        return 100 * self.weight * distance


REPORTED = {
    "flux": Reported(
        0.01,
        Scores(0.57, 0.0957, 0.0026, 5.02),
        Scores(0.49, 0.1023, 0.0027, 4.58),
        Scores(2.20, 0.0956, 0.0462, 42.25),
    ),
    "burgers": Reported(
        1.0,
        Scores(0.09, 0.1225, 0.0040, 3.36),
        Scores(0.04, 0.1291, 0.0022, 2.04),
        Scores(0.45, 0.0621, 0.2308, 140.70),
    ),
    "divergence": Reported(
        1.0, Scores(2.51, 0.0664, 0.0035, 2.21), Scores(1.57, 0.0781, 0.0058, 3.97), Scores(6.96, 0.0595, 0.0053, 3.41)
    ),
    "periodic": Reported(
        1.0, Scores(0.04, 0.0760, 0.0018, 2.26), Scores(0.04, 0.0758, 0.0014, 1.99), Scores(1.04, 0.0533, 0.0064, 6.42)
    ),
    "count": Reported(
        0.01,
        Scores(0.71, 0.1716, 0.0367, 24.18),
        Scores(0.35, 0.1978, 0.0570, 37.65),
        Scores(0.56, 0.1276, 0.1084, 69.76),
    ),
}
"""CD / MMD / KID / FID of NAMM + MDM without and with finetuning, and of the vanilla DM."""

NOBODY = Scores(math.nan, math.nan, math.nan, math.nan)
UNREPORTED = Reported(1.0, NOBODY, NOBODY, NOBODY)
"""What the paper reports of a rule that it does not know; CD is then 100·ℓ."""
