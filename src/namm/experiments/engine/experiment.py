"""What a file of `namm.experiments` declares; imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from namm.experiments.engine.data_settings import Data, Rule
from namm.experiments.engine.settings import Settings


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


NOBODY = Scores(math.nan, math.nan, math.nan, math.nan)
UNREPORTED = Reported(1.0, NOBODY, NOBODY, NOBODY)
"""What the paper reports of a rule that it does not know; CD is then 100·ℓ."""


@dataclass(frozen=True)
class Experiment:
    """An experiment as a whole.

    Attributes:
        name: What `namm run` calls it.
        data: Settings of its data; an object of them builds the dataset and names the rule.
        rule: Settings of its rule, for commands that take a rule without data.
        presets: Settings of a whole run by the name of the preset.
        reported: What the paper reports for it.
        dataset: Another name of its data, for `namm data`.
    """

    name: str
    data: type[Data]
    rule: type[Rule]
    presets: Mapping[str, Settings]
    reported: Reported = UNREPORTED
    dataset: str = ""
