"""Rules as JSON, so that a folder can hold them.

TotalFlux(120)              {"name": "TotalFlux", "total": 120.0}
TotalFlux(120) + 0.5 * r    {"sum": [{"name": "TotalFlux", "total": 120.0}, {"scale": 0.5, "of": …}]}
a rule of somebody's own    {"own": its name}, which says what is missing but cannot be rebuilt; so does a `Count`,
                            whose network is no JSON
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from namm.constraints.base import Constraint, Scaled, Sum, arguments
from namm.constraints.burgers import Burgers
from namm.constraints.darcy import Darcy
from namm.constraints.divergence import DivergenceFree
from namm.constraints.flux import TotalFlux
from namm.constraints.periodic import Periodic
from namm.errors import UsageError
from namm.simulators.burgers import crank_nicolson, euler

# Each keeps the arguments it was made with as attributes of the same names.
RULES: dict[str, Callable[..., Constraint]] = {
    rule.__name__: rule for rule in (Burgers, Darcy, DivergenceFree, Periodic, TotalFlux)
}
STEPS = {step.__name__: step for step in (crank_nicolson, euler)}


def describe(rule: Constraint) -> dict[str, Any]:
    """The JSON of a rule of this package; {"own": name} for any other, and for what is composed of one."""
    match rule:
        case Sum():
            parts = [describe(cast(Constraint, part)) for part in rule.parts]
            return {"own": rule.name} if any("own" in part for part in parts) else {"sum": parts}
        case Scaled():
            inner = describe(rule.inner)
            return {"own": rule.name} if "own" in inner else {"scale": rule.scale, "of": inner}
    kind = type(rule)
    if kind not in RULES.values():  # a subclass may measure something else
        return {"own": rule.name}
    values = arguments(rule)
    if "step" in values:
        names = [name for name, step in STEPS.items() if step is values["step"]]
        if not names:
            return {"own": rule.name}
        values["step"] = names[0]
    return {"name": kind.__name__} | {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def rebuild(description: Mapping[str, Any]) -> Constraint:
    """The rule that `describe` described."""
    match description:
        case {"sum": parts}:
            return Sum(*(rebuild(part) for part in parts))
        case {"scale": scale, "of": inner}:
            return Scaled(scale, rebuild(inner))
        case {"name": str(name), **values} if name in RULES:
            if "step" in values:
                values["step"] = STEPS[values["step"]]
            return RULES[name](**values)
        case {"own": name}:
            raise UsageError(
                f"the rule {name!r} is one of your own or holds a network, which no JSON can: "
                "hand it in as constraint=rule."
            )
    raise UsageError(f"{dict(description)} describes no rule of this version: hand it in as constraint=rule.")
