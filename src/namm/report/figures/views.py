"""What people look at of images under namm's own rules."""

import torch

from namm.constraints import Burgers, Constraint, DivergenceFree
from namm.report.figures.base import RAW, Array, View
from namm.simulators.fluid import cut, lay_out, vorticity

VELOCITY = View(label="velocity u", symbol="u")


def vorticity_view(size: int, extent: float) -> View:
    """The rotation of flows whose states have `size` points and the length `extent` along a side."""

    def rotation(images: Array) -> Array:
        states = cut(torch.from_numpy(images), size)
        return lay_out(vorticity(states, extent / size).unsqueeze(-3))[:, 0].numpy()

    return View(rotation, "vorticity ∂v/∂x − ∂u/∂y", "ω", signed=True)


def view_of(rule: Constraint | None) -> View | None:
    """How images are looked at under a rule of namm's own; None under any other."""
    if isinstance(rule, Burgers):
        return VELOCITY
    return vorticity_view(rule.size, rule.extent) if isinstance(rule, DivergenceFree) else None


__all__ = ["RAW", "VELOCITY", "view_of", "vorticity_view"]
