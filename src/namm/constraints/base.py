"""The base class of every rule that images can obey.

A constraint is a differentiable distance ℓ: (B, C, H, W) → (B,), ℓ(x) ≥ 0, zero when x obeys the rule.
Distances are in mean form: averages over the terms of the rule, not sums, so that ℓ does not grow with the
resolution. (A rule with a single term, such as a total, has nothing to average.)

Constraints compose. With a, b ≥ 0 and c > 0 the sum a + b vanishes exactly where both do, and c·a exactly
where a does:

    rule = TotalFlux(120.0) + 0.5 * Periodic((2, 2))

A rule may hold weights and buffers, as any module. They follow the images: ℓ(x) is computed where x is, and what the
rule holds is moved there first. `check` alone leaves a rule where it is, and brings the images to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Self, cast, overload

import torch
from torch import Tensor, nn

from namm.constraints.contract import (
    ConstraintReport,
    examine,
    finite_number,
    is_device_mismatch,
    require_images,
    require_per_image,
)
from namm.errors import ConstraintError, UsageError
from namm.numerics import at_least_float32, full_precision

__all__ = ["Constraint", "ConstraintReport", "FunctionConstraint", "Scaled", "Sum", "constraint"]

ImageFunction = Callable[[Tensor], Tensor]


class Constraint(nn.Module, ABC):
    """A rule, given by its distance ℓ. Subclasses write `distance`, and `residual` and `project` if any."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor:
            """ℓ(x), as `forward` computes it."""

    @abstractmethod
    def distance(self, x: Tensor) -> Tensor:
        """ℓ(x): images (B, C, H, W) in float32 or float64 to distances (B,), ≥ 0 and differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        """ℓ(x): (B, C, H, W) → (B,), computed where x is, with autocast off, in float32 or better."""
        x = at_least_float32(require_images(x, self))
        with full_precision(x):
            # What is compiled was placed before: an objective's `.to` moves its rule, and a graph cannot.
            value = self.distance(x) if torch.compiler.is_compiling() else self._distance_there(x)
        return at_least_float32(require_per_image(value, x, self))

    def _distance_there(self, x: Tensor) -> Tensor:
        """ℓ(x) after the rule has moved to x; a tensor that cannot be moved is explained."""
        self.follow(x)
        try:
            return self.distance(x)
        except RuntimeError as error:
            if is_device_mismatch(error):
                raise ConstraintError(
                    f"{self.name} computes with a tensor that is not on {x.device}, where the images are ({error}). "
                    "What a rule registers as a buffer or parameter is moved to the images; another tensor is not: use "
                    "register_buffer in a namm.Constraint, or write tensor.to(x.device) in the function."
                ) from error
            raise

    def follow(self, x: Tensor) -> Self:
        """Move parameters and buffers to the device of images x, in place, where they are elsewhere; return the rule.

        ℓ(x) does so by itself; `residual` and `project` do not, so that one writes `rule.follow(x).residual(x)`.
        """
        held = chain(self.parameters(), self.buffers())
        if x.device.type == "meta" or all(tensor.device == x.device for tensor in held):
            return self
        with torch.inference_mode(False):  # weights moved inside of it could never be differentiated through
            return self.to(x.device)

    def residual(self, x: Tensor) -> Tensor:
        """Optional: a tensor, first axis B, that vanishes exactly where x obeys the rule."""
        raise ConstraintError(f"{self.name} defines no residual: override residual(x), or ask has_residual first.")

    def project(self, x: Tensor) -> Tensor:
        """Optional: the nearest, or a natural, image that obeys the rule, (B, C, H, W) → (B, C, H, W)."""
        raise ConstraintError(f"{self.name} defines no project: override project(x), or ask has_project first.")

    @property
    def name(self) -> str:
        """What errors and reports call this constraint."""
        return type(self).__name__

    @property
    def has_residual(self) -> bool:
        """Whether `residual` is defined."""
        return type(self).residual is not Constraint.residual

    @property
    def has_project(self) -> bool:
        """Whether `project` is defined."""
        return type(self).project is not Constraint.project

    def check(self, x: Tensor, *, batch_size: int = 256, noise: float = 0.1) -> ConstraintReport:
        """Measure the constraint on data that should obey it; refuse a constraint that breaks its contract.

        Args:
            x: images (N, C, H, W), anywhere: each batch is brought to the device of the constraint's first parameter or
                buffer, and the constraint stays there. One that holds neither computes where the images are.
            batch_size: images evaluated at a time.
            noise: standard deviation, in units of the data's own, of the Gaussian noise whose effect on ℓ the
                floor is compared with. The draws are fixed: the same data give the same report.

        Returns:
            The floor of ℓ on the data, its worst image, ℓ and its gradient on the noisy data. Data that break
            the rule do not raise here; `report.require_obeyed()` does.

        Raises:
            ConstraintError: ℓ is not a floating-point tensor (B,), not finite, negative, not differentiable,
                flat, or mixes the images of a batch.
            DataError: x is not a non-empty floating-point tensor of rank 4, or holds NaN or inf.
        """
        return examine(self, x, batch_size=batch_size, noise=noise)

    def __add__(self, other: object) -> Sum:
        if not isinstance(other, Constraint):
            return NotImplemented
        return Sum(self, other)

    def __radd__(self, other: object) -> Constraint:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum([a, b]) starts from 0

    def __mul__(self, scale: float) -> Scaled:
        return Scaled(scale, self)

    __rmul__ = __mul__


class Sum(Constraint):
    """ℓ(x) = Σᵢ ℓᵢ(x), zero exactly where every part is. Sums of sums become one flat sum.

    There is no `project`: projecting on one part's set leaves the other's.
    """

    def __init__(self, *parts: Constraint) -> None:
        super().__init__()
        self.parts = nn.ModuleList(term for part in parts for term in _terms(part))

    def distance(self, x: Tensor) -> Tensor:
        """Σᵢ ℓᵢ(x): (B, C, H, W) → (B,)."""
        return torch.stack([part(x) for part in _terms(self)]).sum(0)

    def residual(self, x: Tensor) -> Tensor:
        """The parts' residuals side by side, (B, C, H, W) → (B, N). Needs a residual of every part."""
        return torch.cat([part.residual(x).reshape(len(x), -1) for part in _terms(self)], dim=1)

    @property
    def name(self) -> str:
        """The parts' names, joined by plus signs."""
        return " + ".join(part.name for part in _terms(self))

    @property
    def has_residual(self) -> bool:
        """Whether every part has one."""
        return all(part.has_residual for part in _terms(self))

    def __repr__(self) -> str:
        return " + ".join(repr(part) for part in self.parts)


def _terms(rule: Constraint) -> list[Constraint]:
    """The parts of a sum, or the constraint itself."""
    return list(cast(Iterable[Constraint], rule.parts)) if isinstance(rule, Sum) else [rule]


class Scaled(Constraint):
    """c·ℓ(x) with c > 0: another weight, the same set, residual and projection."""

    def __init__(self, scale: float, inner: Constraint) -> None:
        super().__init__()
        factor = finite_number(scale)
        if factor is None or factor <= 0:
            raise UsageError(f"{inner.name} can be scaled by a finite number > 0 only, got {scale!r}.")
        self.scale: float = factor * (inner.scale if isinstance(inner, Scaled) else 1.0)
        self.inner: Constraint = inner.inner if isinstance(inner, Scaled) else inner

    def distance(self, x: Tensor) -> Tensor:
        """c·ℓ(x): (B, C, H, W) → (B,)."""
        return self.scale * self.inner(x)

    def residual(self, x: Tensor) -> Tensor:
        """The unscaled constraint's residual: the set is the same."""
        return self.inner.residual(x)

    def project(self, x: Tensor) -> Tensor:
        """The unscaled constraint's projection: the set is the same."""
        return self.inner.project(x)

    @property
    def name(self) -> str:
        """The scale and the inner name, e.g. `2 * TotalFlux`."""
        return self._times(self.inner.name)

    @property
    def has_residual(self) -> bool:
        """Whether the unscaled constraint has one."""
        return self.inner.has_residual

    @property
    def has_project(self) -> bool:
        """Whether the unscaled constraint has one."""
        return self.inner.has_project

    def _times(self, text: str) -> str:
        return f"{self.scale:g} * ({text})" if isinstance(self.inner, Sum) else f"{self.scale:g} * {text}"

    def __repr__(self) -> str:
        return self._times(repr(self.inner))


class FunctionConstraint(Constraint):
    """A constraint made by `constraint` from plain functions."""

    def __init__(
        self,
        fn: ImageFunction,
        *,
        residual: ImageFunction | None = None,
        project: ImageFunction | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise UsageError(f"constraint needs a function (B, C, H, W) → (B,), got {fn!r}.")
        self.fn = fn
        self.residual_fn = residual
        self.project_fn = project
        self.__name__ = name or str(getattr(fn, "__name__", type(fn).__name__))
        self.__doc__ = fn.__doc__

    def distance(self, x: Tensor) -> Tensor:
        """fn(x): (B, C, H, W) → (B,)."""
        return self.fn(x)

    def residual(self, x: Tensor) -> Tensor:
        """The function given as `residual=`."""
        return super().residual(x) if self.residual_fn is None else self.residual_fn(x)

    def project(self, x: Tensor) -> Tensor:
        """The function given as `project=`."""
        return super().project(x) if self.project_fn is None else self.project_fn(x)

    @property
    def name(self) -> str:
        """The function's own name, unless another was given."""
        return self.__name__

    @property
    def has_residual(self) -> bool:
        """Whether `residual=` was given."""
        return self.residual_fn is not None

    @property
    def has_project(self) -> bool:
        """Whether `project=` was given."""
        return self.project_fn is not None

    def __repr__(self) -> str:
        return f"constraint({self.name})"


@overload
def constraint(
    fn: ImageFunction,
    *,
    residual: ImageFunction | None = None,
    project: ImageFunction | None = None,
    name: str | None = None,
) -> FunctionConstraint: ...


@overload
def constraint(
    fn: None = None,
    *,
    residual: ImageFunction | None = None,
    project: ImageFunction | None = None,
    name: str | None = None,
) -> Callable[[ImageFunction], FunctionConstraint]: ...


def constraint(
    fn: ImageFunction | None = None,
    *,
    residual: ImageFunction | None = None,
    project: ImageFunction | None = None,
    name: str | None = None,
) -> FunctionConstraint | Callable[[ImageFunction], FunctionConstraint]:
    """Turn a function ℓ: (B, C, H, W) → (B,) into a `Constraint`; a decorator too, with or without arguments.

    Args:
        fn: the distance ℓ. A network works too: its parameters become the constraint's.
        residual: optional, a tensor that vanishes exactly where the rule holds.
        project: optional, the nearest or a natural image that obeys the rule.
        name: what errors and reports call it; the function's own name by default.
    """

    def wrap(fn: ImageFunction) -> FunctionConstraint:
        return FunctionConstraint(fn, residual=residual, project=project, name=name)

    return wrap if fn is None else wrap(fn)
