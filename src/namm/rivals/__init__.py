"""What one would do instead of learning a mirror map: a plain model of the data and a rule in, samples out."""

from namm.rivals.base import Rival
from namm.rivals.extrapolate_correct import ExtrapolateCorrect
from namm.rivals.gradient_guidance import GradientGuidance
from namm.rivals.projected_estimate import ProjectedEstimate
from namm.rivals.projected_steps import ProjectedSteps
from namm.rivals.projection import Projection
from namm.rivals.rejection import Rejection
from namm.rivals.residual_loss import ResidualLoss

__all__ = [
    "ExtrapolateCorrect",
    "GradientGuidance",
    "ProjectedEstimate",
    "ProjectedSteps",
    "Projection",
    "Rejection",
    "ResidualLoss",
    "Rival",
]
