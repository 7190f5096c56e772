"""Rules that images can obey, each a differentiable distance ℓ(x) ≥ 0 that is zero when the rule holds."""

from namm.constraints.base import Constraint, ConstraintReport, constraint
from namm.constraints.burgers import Burgers
from namm.constraints.flux import TotalFlux
from namm.constraints.periodic import Periodic

__all__ = ["Burgers", "Constraint", "ConstraintReport", "Periodic", "TotalFlux", "constraint"]
