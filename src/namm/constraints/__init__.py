"""Rules that images can obey, each a differentiable distance ℓ(x) ≥ 0 that is zero when the rule holds."""

from namm.constraints.base import Constraint, constraint, split_number, with_number
from namm.constraints.burgers import Burgers
from namm.constraints.contract import ConstraintReport
from namm.constraints.count import Count, Counter
from namm.constraints.darcy import Darcy
from namm.constraints.divergence import DivergenceFree
from namm.constraints.flux import TotalFlux
from namm.constraints.periodic import Periodic

__all__ = [
    "Burgers",
    "Constraint",
    "ConstraintReport",
    "Count",
    "Counter",
    "Darcy",
    "DivergenceFree",
    "Periodic",
    "TotalFlux",
    "constraint",
    "split_number",
    "with_number",
]
