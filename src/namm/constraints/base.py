"""The base class of every rule that images can obey.

A constraint is a differentiable distance ℓ: (B, C, H, W) → (B,), ℓ(x) ≥ 0, zero when x obeys the rule.
Distances are in mean form: averages over the terms of the rule, not sums, so that ℓ does not grow with the
resolution. (A rule with a single term, such as a total, has nothing to average.)

Constraints compose. With a, b ≥ 0 and c > 0 the sum a + b vanishes exactly where both do, and c·a exactly
where a does:

    rule = TotalFlux(120.0) + 0.5 * Periodic((2, 2))

A rule may hold weights and buffers, as any module. They follow the images: ℓ(x) is computed where x is, and what the
rule holds is moved there first. `check` alone leaves a rule where it is, and brings the images to it.

A rule may also hold with a number c of each image's own, its total or its viscosity: ℓ(x) = fn(x, c(x)). Where c
belongs to the image and does not follow from it, a constant plane among the channels carries it (`with_number`), so
that maps and models see and draw the pair (image, number), and

    ℓ(x) = fn(images, c) + mean |plane − c|,      c = mean of the plane.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Self, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor, nn

from namm.constraints.contract import (
    ConstraintReport,
    StoredImages,
    examine,
    finite_number,
    is_device_mismatch,
    require_images,
    require_per_image,
)
from namm.errors import ConstraintError, DataError, UsageError
from namm.numerics import at_least_float32, full_precision

RuleFunction = Callable[..., Tensor]
"""A function of images (B, C, H, W), and of their numbers (B,) where the rule has a condition."""
Condition = int | Callable[[Tensor], Tensor]
"""The channel that holds the numbers as constant planes, or a function (B, C, H, W) → (B,)."""
Products = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""v ↦ Jv and u ↦ Jᵀu of a derivative J: v has the shape of images, u that of what is differentiated."""


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
        # What is compiled was placed before: an objective's `.to` moves its rule, and a graph cannot.
        compute = self.distance if torch.compiler.is_compiling() else self._distance_at
        with full_precision(x):
            return at_least_float32(require_per_image(compute(x), x, self))

    def _distance_at(self, x: Tensor) -> Tensor:
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

    def inequality(self, x: Tensor) -> Tensor:
        """Optional: a tensor h, first axis B, that is nowhere positive exactly where x obeys the rule."""
        raise ConstraintError(
            f"{self.name} defines no inequality: override inequality(x), or ask has_inequality first."
        )

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor | None:
        """Optional: the image x' that obeys the rule with the smallest ‖(x' − x) / scale‖, for `namm.polish`.

        None where the rule knows no closed form or solver of its own, or none for this scale (broadcasts to x, > 0).
        """
        return None

    def derivative(self, x: Tensor) -> Products | None:
        """Optional: products with the derivative of `residual` at images x, for `namm.polish`, which takes hundreds.

        None where automatic differentiation is as good.
        """
        return None

    def preconditioner(self, x: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Optional: u ↦ about (J s² Jᵀ)⁻¹ u at images x, J the derivative of `residual` and s the scale, for `polish`.

        It must be symmetric and positive definite; where J is badly conditioned it saves most of the products with it.
        """
        return None

    @property
    def name(self) -> str:
        """What errors and reports call this constraint."""
        return type(self).__name__

    @property
    def has_residual(self) -> bool:
        """Whether `residual` is defined."""
        return self._defines("residual")

    @property
    def has_project(self) -> bool:
        """Whether `project` is defined."""
        return self._defines("project")

    @property
    def has_inequality(self) -> bool:
        """Whether `inequality` is defined."""
        return self._defines("inequality")

    def _defines(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Constraint, method)

    def check(self, x: Tensor | StoredImages, *, batch_size: int = 256, noise: float = 0.1) -> ConstraintReport:
        """Measure the constraint on data that should obey it; refuse a constraint that breaks its contract.

        Data that break the rule do not raise here; `report.require_obeyed()` does.

        Args:
            x: images (N, C, H, W), anywhere, also in a file (`namm.datasets.open_images`): each batch is brought to the
                device of the constraint's first parameter or buffer, and the constraint stays there. One that holds
                neither computes where the images are.
            batch_size: images evaluated at a time.
            noise: standard deviation, in units of the data's own, of the Gaussian noise whose effect on ℓ the
                floor is compared with. The draws are fixed: the same data give the same report.

        Raises:
            ConstraintError: ℓ is not a floating-point tensor (B,), not finite, negative, not differentiable,
                flat, or mixes the images of a batch.
            DataError: x is not a non-empty floating-point tensor of rank 4, or holds NaN or inf.
        """
        return examine(self, x, batch_size=batch_size, noise=noise)

    def extra_repr(self) -> str:
        """The arguments that the rule was made with and keeps, for `repr`."""
        kept = {name: value for name, value in arguments(self).items() if not isinstance(value, nn.Module | Tensor)}
        return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in kept.items())

    def __add__(self, other: object) -> Sum:
        if not isinstance(other, Constraint):
            return NotImplemented
        return Sum(self, other)

    def __radd__(self, other: object) -> Constraint:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum([a, b]) starts from 0

    def __mul__(self, scale: float) -> Scaled:
        return Scaled(scale, self)

    __rmul__ = __mul__


def arguments(rule: Constraint) -> dict[str, object]:
    """What a rule was made with, as far as it keeps it in attributes of the same names."""
    names = inspect.signature(type(rule)).parameters
    return {name: getattr(rule, name) for name in names if hasattr(rule, name)}


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

    def _defines(self, method: str) -> bool:
        return method == "residual" and all(part.has_residual for part in _terms(self))

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

    def inequality(self, x: Tensor) -> Tensor:
        """The unscaled constraint's inequality: the set is the same."""
        return self.inner.inequality(x)

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor | None:
        """The unscaled constraint's nearest image: the set is the same."""
        return self.inner.nearest(x, scale)

    @property
    def name(self) -> str:
        """The scale and the inner name, as in `2 * TotalFlux`."""
        return self._times(self.inner.name)

    def _defines(self, method: str) -> bool:
        return self.inner._defines(method)

    def _times(self, text: str) -> str:
        return f"{self.scale:g} * ({text})" if isinstance(self.inner, Sum) else f"{self.scale:g} * {text}"

    def __repr__(self) -> str:
        return self._times(repr(self.inner))


class RuleOptions(TypedDict, total=False):
    """Options of `constraint`, which says what they mean."""

    condition: Condition | None
    residual: RuleFunction | None
    project: RuleFunction | None
    inequality: RuleFunction | None
    name: str | None


class FunctionConstraint(Constraint):
    """A constraint made by `constraint` from plain functions."""

    def __init__(
        self,
        fn: RuleFunction,
        condition: Condition | None = None,
        residual: RuleFunction | None = None,
        project: RuleFunction | None = None,
        inequality: RuleFunction | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise UsageError(f"constraint needs a function (B, C, H, W) → (B,), got {fn!r}.")
        if isinstance(condition, bool) or not (isinstance(condition, int | None) or callable(condition)):
            raise UsageError(
                f"{condition!r} is no condition: give the channel that holds the numbers, or a function "
                "(B, C, H, W) → (B,)."
            )
        self.fn, self.residual_fn, self.project_fn, self.inequality_fn = fn, residual, project, inequality
        self.condition = condition
        self.__name__ = name or str(getattr(fn, "__name__", type(fn).__name__))
        self.__doc__ = fn.__doc__
        for function in filter(None, (fn, residual, project, inequality)):
            _require_signature(function, self.name, ("x",) if condition is None else ("x", "c"))

    def distance(self, x: Tensor) -> Tensor:
        """fn(x), or fn(x, c) with the numbers c of the images, and how far their plane is from constant: (B,)."""
        value = self.fn(*self._arguments(x))
        plane = self._plane(x)
        return value if plane is None else require_per_image(value, x, self) + plane.abs().mean((1, 2))

    def residual(self, x: Tensor) -> Tensor:
        """The function given as `residual=`, beside what the plane of numbers varies by if there is one."""
        if self.residual_fn is None:
            return super().residual(x)
        value, plane = self.residual_fn(*self._arguments(x)), self._plane(x)
        return value if plane is None else torch.cat([value.reshape(len(x), -1), plane.flatten(1)], dim=1)

    def project(self, x: Tensor) -> Tensor:
        """The function given as `project=`; a plane of numbers becomes constant."""
        if self.project_fn is None:
            return super().project(x)
        arguments = self._arguments(x)
        projected = self.project_fn(*arguments)
        if not isinstance(self.condition, int):
            return projected
        return _insert(projected, arguments[1], self.condition % x.shape[1])

    def inequality(self, x: Tensor) -> Tensor:
        """The function given as `inequality=`, beside ± what the plane of numbers varies by if no residual has it."""
        if self.inequality_fn is None:
            return super().inequality(x)
        value, plane = self.inequality_fn(*self._arguments(x)), self._plane(x)
        if plane is None or self.residual_fn is not None:
            return value
        return torch.cat([value.reshape(len(x), -1), plane.flatten(1), -plane.flatten(1)], dim=1)

    def _arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the functions take: (x,) or, with a condition, the images and their numbers (B,)."""
        if self.condition is None:
            return (x,)
        if isinstance(self.condition, int):
            return split_number(x, self.condition)
        number = self.condition(x)
        if not isinstance(number, Tensor) or number.shape != x.shape[:1]:
            returned = f"shape {tuple(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
            raise ConstraintError(
                f"the condition of {self.name} returned {returned} for {len(x)} images: it must give one number per "
                "image, a tensor (B,), for example x.mean((1, 2, 3))."
            )
        return x, number

    def _plane(self, x: Tensor) -> Tensor | None:
        """The plane of numbers less its mean, (B, H, W), where the images hold one."""
        if not isinstance(self.condition, int):
            return None
        plane = at_least_float32(x.select(1, self.condition))
        return plane - plane.mean((1, 2), keepdim=True)

    @property
    def name(self) -> str:
        """The function's own name, unless another was given."""
        return self.__name__

    def _defines(self, method: str) -> bool:
        return getattr(self, f"{method}_fn") is not None

    def __repr__(self) -> str:
        return f"constraint({self.name})"


def _require_signature(fn: RuleFunction, name: str, arguments: tuple[str, ...]) -> None:
    """Refuse a function that cannot be called with these arguments; one that does not tell is believed."""
    try:
        inspect.signature(fn).bind(*arguments)
    except ValueError:
        return
    except TypeError as error:
        raise UsageError(
            f"the functions of {name} are called with ({', '.join(arguments)}), and one is not made for that ({error})"
            ": with condition= they take images and numbers, fn(x, c), and fn(x) without it."
        ) from error


@overload
def constraint(fn: RuleFunction, **options: Unpack[RuleOptions]) -> FunctionConstraint: ...


@overload
def constraint(fn: None = None, **options: Unpack[RuleOptions]) -> Callable[[RuleFunction], FunctionConstraint]: ...


def constraint(
    fn: RuleFunction | None = None,
    *,
    condition: Condition | None = None,
    residual: RuleFunction | None = None,
    project: RuleFunction | None = None,
    inequality: RuleFunction | None = None,
    name: str | None = None,
) -> FunctionConstraint | Callable[[RuleFunction], FunctionConstraint]:
    """Turn a function ℓ: (B, C, H, W) → (B,) into a `Constraint`; a decorator too, with or without arguments.

    Args:
        fn: the distance ℓ. A network works too: its parameters become the constraint's.
        condition: where the rule holds with a number c of each image's own: how to read c (B,). A function of the
            images, or the channel whose constant plane holds it (`with_number`). All functions are then called with
            (x, c), where x has lost that channel.
        residual: optional, a tensor that vanishes exactly where the rule holds.
        project: optional, the nearest or a natural image that obeys the rule.
        inequality: optional, a tensor that is nowhere positive exactly where the rule holds: h(x) ≤ 0.
        name: what errors and reports call it; the function's own name by default.
    """
    if fn is None:
        return lambda fn: FunctionConstraint(fn, condition, residual, project, inequality, name)
    return FunctionConstraint(fn, condition, residual, project, inequality, name)


def as_rule(rule: object) -> Constraint:
    """A rule as it is, or a function ℓ as one; what is neither is refused in a sentence."""
    if isinstance(rule, Constraint):
        return rule
    if isinstance(rule, type):
        raise UsageError(f"{rule.__name__} is a class: make a rule of it, {rule.__name__}(…), with its numbers.")
    if not callable(rule):
        raise UsageError(
            "a rule must be a namm.Constraint or a function of images (B, C, H, W) that returns ℓ (B,), not "
            f"{str(rule)[:80]!r}, a {type(rule).__name__}."
        )
    return constraint(rule)


def with_number(images: Tensor, numbers: Tensor | Sequence[float]) -> Tensor:
    """Images (B, C, H, W) and a number for each (B,) as (B, C + 1, H, W): the last channel is constant."""
    numbers = torch.as_tensor(numbers).to(images)
    if images.ndim != 4 or numbers.shape != images.shape[:1]:
        raise DataError(
            f"with_number needs images (B, C, H, W) and one number for each, (B,); got {tuple(images.shape)} and "
            f"{tuple(numbers.shape)}."
        )
    return _insert(images, numbers, images.shape[1])


def split_number(x: Tensor, channel: int = -1) -> tuple[Tensor, Tensor]:
    """The inverse of `with_number`: images (B, C − 1, H, W) and the means of the plane in `channel`, (B,)."""
    channels = x.shape[1] if x.ndim == 4 else 0
    if not -channels <= channel < channels or channels < 2:
        raise DataError(
            f"a number per image was to be read from channel {channel} of images {tuple(x.shape)}: they need that "
            "channel and another. namm.with_number(images, numbers) appends numbers as the last channel, -1."
        )
    planes = list(at_least_float32(x).unbind(1))
    numbers = planes.pop(channel).mean((1, 2))
    return torch.stack(planes, 1), numbers


def _insert(images: Tensor, numbers: Tensor, channel: int) -> Tensor:
    """Images (B, C, H, W) with the constant planes of their numbers (B,) as this channel: (B, C + 1, H, W)."""
    planes = list(images.unbind(1))
    planes.insert(channel, numbers.to(images).reshape(-1, 1, 1).expand_as(planes[0]))
    return torch.stack(planes, 1)
