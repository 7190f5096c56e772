"""How far each image is from its rule, in float64, and what was done about it.

An image that is stored in float32 cannot obey a rule better than its own rounding allows, and data that were simulated
obey it only as well as their solver did, the *floor*. An image has *reached* the rule where

    ℓ(x) ≤ 3 · (floor + rounding),     rounding = ℓ(x + K δ) / K,     K = 1024,

with δ random and of the size of x's own rounding. If x obeys the rule but for rounding, ℓ(x + K δ) is K times what
rounding does to ℓ; if it does not, that is about ℓ(x), and a K-th of it excuses nothing. A rule of few terms, such as
a total, meets some δ by chance: then the largest of several draws counts.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import RuleFunction, as_rule
from namm.datasets.batches import Images, check_images, in_chunks
from namm.digests import require_signed
from namm.errors import CheckpointError, ConstraintError, DataError, UsageError
from namm.formatting import format_number, html_table
from namm.numerics import full_precision, generator
from namm.reading import REASON, damage_as, load_json

CHUNK = 64
"""Images measured at a time."""
MAGNIFIED = 1024
"""Rounding errors are measured this many times enlarged."""
DRAWS, STEADY = 16, 0.25
"""Draws of δ for a rule whose ℓ(x + K δ) varies by more than this, relative to its mean; one for any other."""
ALLOWED = 3.0
"""ℓ over floor and rounding up to which the rule is reached."""
LARGEST = 2**28
"""Bytes of a certificate that is read: those of two million images."""
NARROW = "computes in float32 alone"
ARRAYS = ("before", "after", "moved", "iterations", "rounding")


@dataclass(frozen=True)
class Certificate:
    """ℓ of every image before and after, in float64.

    Attributes:
        rule: Name of the rule.
        method: What was done: `none`, `closed form`, `Gauss-Newton` or `Polyak`; `polishing` in a file of samples.
        floor: Mean ℓ of the data, 0 where they obey the rule exactly.
        before, after: ℓ of each image (N,).
        moved: Root mean square over pixels of (x' − x) / scale, (N,).
        iterations: Steps that each image took (N,).
        rounding: What the rounding of each image does to ℓ (N,).
        notes: What could not be done, in sentences.
    """

    rule: str
    method: str
    floor: float
    before: np.ndarray
    after: np.ndarray
    moved: np.ndarray
    iterations: np.ndarray
    rounding: np.ndarray
    notes: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """What ℓ was computed in."""
        return "float32" if any(NARROW in note for note in self.notes) else "float64"

    @property
    def reached(self) -> np.ndarray:
        """Which images obey the rule as well as the data do, or as well as their own rounding allows (N,)."""
        found: np.ndarray = np.isfinite(self.after) & (self.after <= ALLOWED * (self.floor + self.rounding))
        return found

    def lines(self) -> list[str]:
        """The certificate as the terminal shows it."""
        number = format_number
        n, reached = len(self.after), int(self.reached.sum())
        how = "" if self.method == "none" else f", by {self.method}"
        lines = [
            f"{self.rule}: {reached} of {n} images reach the rule{how}",
            f"  ℓ in {self.precision}: mean {number(self.after.mean())}, largest {number(self.after.max())} "
            f"(image {self.after.argmax()}); the data's {number(self.floor)}, rounding {number(self.rounding.mean())}",
        ]
        if self.method != "none":
            lines.append(
                f"  before: mean {number(self.before.mean())}, largest {number(self.before.max())}; moved by "
                f"{number(self.moved.mean())} a pixel (root mean square), in {number(self.iterations.mean())} steps"
            )
        return [*lines, *(f"  note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        title, *others = self.lines()
        return html_table(title, [(line.strip().partition(":")[0], line.partition(":")[2]) for line in others])

    def summary(self) -> dict[str, Any]:
        """The figures that a report or a model card shows, as plain values."""
        return {
            "rule": self.rule,
            "method": self.method,
            "images": len(self.after),
            "reached": int(self.reached.sum()),
            "floor": self.floor,
            "rounding": float(self.rounding.mean()),
            **{f"{name}_mean": float(getattr(self, name).mean()) for name in ("before", "after", "moved")},
            **{f"{name}_max": float(getattr(self, name).max()) for name in ("before", "after", "moved")},
            "notes": list(self.notes),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, the values of each image too, as plain values."""
        arrays = {name: getattr(self, name).tolist() for name in ARRAYS}
        about = {"rule": self.rule, "method": self.method, "floor": self.floor, "notes": list(self.notes)}
        known = {name: [value if np.isfinite(value) else None for value in each] for name, each in arrays.items()}
        return {**about, **known, "reached": self.reached.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_json`."""
        arrays = {name: np.asarray(values[name], dtype=np.float64) for name in ARRAYS}
        if {each.shape for each in arrays.values()} != {(len(values["reached"]),)} or not values["reached"]:
            raise ValueError(f"{', '.join(ARRAYS)} must have a number for each image")
        return cls(values["rule"], values["method"], values["floor"], **arrays, notes=tuple(values["notes"]))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a certificate that `namm certify -o` wrote; that of polished samples is in their `SampleFile`."""
        with damage_as(CheckpointError, f"{path} is no certificate that can be read ({REASON})."):
            found = require_signed(Path(path), load_json(Path(path), LARGEST), "certify anew.", CheckpointError)
            return cls.from_json(found)

    @classmethod
    def joined(cls, parts: "list[Certificate]") -> "Certificate":
        """One certificate of images that were certified in parts."""
        first = parts[0]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
        notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        return Certificate(first.rule, first.method, first.floor, **arrays, notes=notes)


def sentence(summary: Mapping[str, Any]) -> str:
    """What `Certificate.summary` returned, in words."""
    n = {name: format_number(summary[name]) for name in ("before_mean", "after_mean", "after_max", "moved_mean")}
    floor, rounding = format_number(summary["floor"]), format_number(summary["rounding"])
    return (
        f"{summary['reached']} of {summary['images']} images reach the rule, by {summary['method']}: mean ℓ in float64 "
        f"{n['before_mean']} before and {n['after_mean']} after, largest {n['after_max']} (the data's {floor}, "
        f"rounding {rounding}), moved by {n['moved_mean']} a pixel (root mean square, in units of the scale)."
    )


def certify(
    images: Images, rule: Constraint | RuleFunction, *, floor: float = 0.0, device: torch.device | None = None
) -> Certificate:
    """Measure ℓ of images (N, C, H, W) in float64, without changing any.

    Args:
        images: A tensor, an array or a file's data set; read a few at a time.
        rule: ℓ, a constraint or a function.
        floor: Mean ℓ of the data, as far as they obey the rule themselves.
        device: Where to compute; where the images are by default.
    """
    check_images(images, "images")
    rule, floor = as_rule(rule), checked_floor(floor)
    parts, wide = [], WideRule(rule)
    for part in in_chunks(images, CHUNK):
        x = part.to(device) if device is not None else part
        if not torch.isfinite(x).all():
            raise DataError("an image to certify holds NaN or inf: no rule can be measured on it.")
        distances = wide.distance(x)
        zeros = np.zeros(len(x))
        parts.append(
            Certificate(
                rule.name, "none", floor, distances, distances, zeros, zeros, wide.rounding(x), tuple(wide.notes)
            )
        )
    return Certificate.joined(parts)


def checked_floor(floor: float) -> float:
    """`floor` if it is a finite ℓ ≥ 0."""
    try:
        value = float(floor)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"floor must be a finite ℓ ≥ 0, not {floor!r}.")
    return value


class WideRule:
    """A rule in float64, or in float32 where the rule or the device knows nothing wider.

    Args:
        rule: The rule; it is copied, in evaluation mode, and stays as it is.
    """

    def __init__(self, rule: Constraint) -> None:
        self.narrow = copy.deepcopy(rule).eval()
        self.rule = copy.deepcopy(self.narrow).double()
        self.dtype = torch.float64
        self.notes: list[str] = []
        self.draws = 0

    def widen(self, x: Tensor) -> Tensor:
        """Images in the type that ℓ is computed in, tried on the first one."""
        if self.dtype == torch.float64 and (x.device.type == "mps" or not self._takes(x[:1])):
            self.dtype, self.rule = torch.float32, copy.deepcopy(self.narrow)
            self.notes.append(f"{self.narrow.name} {NARROW}, so its figures end at float32's rounding.")
        return x.to(self.dtype)

    def _takes(self, x: Tensor) -> bool:
        wide, rule = x.double(), self.rule
        try:
            values = [rule(wide)]
            values += [rule.residual(wide)] if rule.has_residual else []
            values += [rule.inequality(wide)] if rule.has_inequality else []
        except RuntimeError:
            return False
        return all(getattr(value, "dtype", None) == torch.float64 for value in values)

    @torch.no_grad()
    def distance(self, x: Tensor) -> np.ndarray:
        """ℓ of each image, (B, C, H, W) → (B,)."""
        wide = self.widen(x)
        with full_precision(wide):
            values: np.ndarray = self.rule(wide).double().cpu().numpy()
        if (values < 0).any():
            raise ConstraintError(
                f"{self.narrow.name} returned ℓ = {values.min():.3g} < 0: a distance from a rule is 0 where it holds "
                "and positive elsewhere. Take the absolute value, or the square, of what must vanish."
            )
        return values

    @torch.no_grad()
    def rounding(self, x: Tensor) -> np.ndarray:
        """What rounding, of x in its own type and of ℓ as it is computed, does to ℓ: (B, C, H, W) → (B,)."""
        wide = self.widen(x)
        ulp = max(torch.finfo(x.dtype).eps / 2, 4 * torch.finfo(wide.dtype).eps)
        if not self.draws:
            self._require_steady(wide[:1])
            values = np.array([self._shaken(wide[:1], ulp, draw) for draw in range(DRAWS)])
            steady = np.isfinite(values).all() and values.std() < STEADY * values.mean()
            self.draws = 1 if steady else DRAWS
        largest: np.ndarray = np.max([self._shaken(wide, ulp, draw) for draw in range(self.draws)], axis=0)
        return largest

    def _require_steady(self, wide: Tensor) -> None:
        """Refuse a rule that draws random numbers."""
        first, second = self.distance(wide), self.distance(wide)
        if not np.allclose(first, second, rtol=1e-3, atol=0, equal_nan=True):
            raise ConstraintError(
                f"{self.narrow.name} says ℓ = {first[0]:.3g} and {second[0]:.3g} of the same image: it draws random "
                "numbers (dropout in training mode?), and a certificate needs one value."
            )

    def _shaken(self, wide: Tensor, ulp: float, draw: int) -> np.ndarray:
        """ℓ(x + K δ) / K."""
        noise = 2 * torch.rand(wide.shape[1:], generator=generator(draw, "rounding"), dtype=torch.float64) - 1
        return self.distance(wide * (1 + MAGNIFIED * ulp * noise.to(wide))) / MAGNIFIED
