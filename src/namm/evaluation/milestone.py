"""ℓ along the way of a training."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Milestone:
    """ℓ of samples of a model that is not trained to its end.

    Attributes:
        step: of the training.
        compute_seconds: spent until then, all that came before the training included.
        mean, std: of ℓ over the samples.
        n: samples.
    """

    step: int
    compute_seconds: float
    mean: float
    std: float
    n: int


def half_way(milestones: Sequence[Milestone]) -> Milestone | None:
    """The one in the middle of a training, of which the last is the end; none if it was not measured."""
    return next((each for each in milestones if abs(2 * each.step - milestones[-1].step) <= 1), None)
