"""What people look at of images under namm's own rules."""

from dataclasses import dataclass

import torch

from namm.constraints import Burgers, Constraint, DivergenceFree
from namm.report.figures.base import RAW, Array, View
from namm.simulators.fluid import cut, lay_out, vorticity

VELOCITY = View(label="velocity u", symbol="u")


@dataclass(frozen=True)
class Shown:
    """What is shown of a rule's images, as plain values.

    Attributes:
        shows: "image", "velocity" or "vorticity".
        size, extent: A state's points and length along a side, where its vorticity is shown.
    """

    shows: str = "image"
    size: int = 0
    extent: float = 0.0


def shown_of(rule: Constraint | None) -> Shown:
    """What people look at under a rule of namm's own; the image under any other."""
    if isinstance(rule, Burgers):
        return Shown("velocity")
    return Shown("vorticity", rule.size, rule.extent) if isinstance(rule, DivergenceFree) else Shown()


def view_named(shows: str, size: int = 0, extent: float = 0.0) -> View:
    """The view that a `Shown` with these values names."""
    if shows == "vorticity":
        return vorticity_view(size, extent)
    return VELOCITY if shows == "velocity" else RAW


def view_of(rule: Constraint | None) -> View | None:
    """How images are looked at under a rule of namm's own; None where that is the image itself."""
    shown = shown_of(rule)
    return None if shown == Shown() else view_named(shown.shows, shown.size, shown.extent)


def vorticity_view(size: int, extent: float) -> View:
    """The rotation of flows whose states have `size` points and the length `extent` along a side."""

    def rotation(images: Array) -> Array:
        states = cut(torch.from_numpy(images), size)
        return lay_out(vorticity(states, extent / size).unsqueeze(-3))[:, 0].numpy()

    return View(rotation, "vorticity ∂v/∂x − ∂u/∂y", "ω", signed=True)
