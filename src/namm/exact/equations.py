"""The equations and inequalities of a rule, and products with their derivative.

    c(y) = 0, or c(y) ≤ 0 in the rows of inequalities,      x = x⁰ + s y

c has the rows of r, of h and of the bounds, in units that make the rows of its derivative A about equally long.
Products with A and Aᵀ are those of the rule itself (`Constraint.derivative`), or come by automatic differentiation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import Products, Scaled, Sum
from namm.errors import ConstraintError
from namm.numerics import generator

Function = Callable[[Tensor], Tensor]
Bounds = tuple[float | None, float | None]

PROBES = 8
"""Random directions in which the length of each row of A is measured."""
FLAT = 1e-8
"""Rows shorter than this, over the longest of their function, are not made as long as others: x does not move them."""


@dataclass(frozen=True)
class Rows:
    """Rows (B, R) of images (B, C, H, W), and what is known of their derivative J at x.

    Attributes:
        function: x ↦ rows.
        products: x ↦ products with J and Jᵀ, where these are known.
        preconditioner: x, s ↦ about (J s² Jᵀ)⁻¹, (B, R) → (B, R), where that is known.
    """

    function: Function
    products: Callable[[Tensor], Products | None] = lambda x: None
    preconditioner: Callable[[Tensor, Tensor], Function | None] = lambda x, s: None

    def linearised(self, x: Tensor, forward: bool) -> "Differentiated | Known":
        """The rows at x."""
        products = self.products(x)
        return Differentiated(self.function, x, forward) if products is None else Known(self.function(x), *products)


@dataclass(frozen=True)
class Equations:
    """Rows that must be 0, and others that must not be positive."""

    equal: list[Rows]
    at_most: list[Rows]

    @classmethod
    def of(cls, rule: Constraint, bounds: Bounds) -> "Equations | None":
        """The equations of a rule and of bounds on pixels; None of a rule that has ℓ alone.

        In a sum, ℓ itself is the equation of a part that has no other.
        """
        parts = _parts(rule)
        if not any(part.has_residual or part.has_inequality for part in parts):
            return None
        equal = [_residual(part) for part in parts if not only_at_most(part)]
        at_most = [Rows(_flat(part.inequality, part)) for part in parts if part.has_inequality]
        low, high = bounds
        if low is not None:
            at_most.append(Rows(lambda x: low - x.flatten(1), lambda x: _multiple(-1, x)))
        if high is not None:
            at_most.append(Rows(lambda x: x.flatten(1) - high, lambda x: _multiple(1, x)))
        return cls(equal, at_most)


def only_at_most(rule: Constraint) -> bool:
    """Whether a rule is all inequalities."""
    return rule.has_inequality and not rule.has_residual


def _parts(rule: Constraint) -> list[Constraint]:
    """The rules that a sum or a multiple is made of: the same set."""
    if isinstance(rule, Scaled):
        return _parts(rule.inner)
    return [each for part in rule.parts for each in _parts(part)] if isinstance(rule, Sum) else [rule]  # type: ignore[arg-type]


def _residual(rule: Constraint) -> Rows:
    """r with what the rule itself knows of its derivative, or ℓ."""
    if not rule.has_residual:
        return Rows(_flat(rule, rule))

    def products(x: Tensor) -> Products | None:
        known = rule.derivative(x)
        if known is None:
            return None
        times, transposed = known
        shape = rule.residual(x[:1]).shape[1:]
        return lambda v: times(v).flatten(1), lambda u: transposed(u.unflatten(1, shape))

    def preconditioner(x: Tensor, s: Tensor) -> Function | None:
        known = rule.preconditioner(x, s)
        if known is None:
            return None
        shape = rule.residual(x[:1]).shape[1:]
        return lambda u: known(u.unflatten(1, shape)).flatten(1)

    return Rows(_flat(rule.residual, rule), products, preconditioner)


def _multiple(factor: float, x: Tensor) -> Products:
    """Products of rows that are a multiple of the pixels."""
    return lambda v: factor * v.flatten(1), lambda u: factor * u.reshape(x.shape)


def _flat(function: Function, rule: Constraint) -> Function:
    """The same with rows as one axis, (B, C, H, W) → (B, R)."""

    def flat(x: Tensor) -> Tensor:
        value = function(x)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            returned = f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ConstraintError(
                f"the residual or inequality of {rule.name} returned {returned}: it must be a tensor of real numbers "
                "that can be differentiated; complex ones are two, torch.view_as_real(r)."
            )
        if value.device != x.device:
            raise ConstraintError(
                f"the residual or inequality of {rule.name} is on {value.device} and the images are on {x.device}: "
                "write tensor.to(x.device) in the function, or register_buffer in a namm.Constraint."
            )
        if value.ndim == 0 or len(value) != len(x) or not value.numel():
            raise ConstraintError(
                f"the residual or inequality of {rule.name} has shape {tuple(value.shape)} for {len(x)} images: it "
                "must have values per image, (B, …)."
            )
        return value.reshape(len(x), -1)

    return flat


# Derivatives


@dataclass(frozen=True)
class Known:
    """Rows at one batch of images, and products with a derivative that the rule knows."""

    value: Tensor
    times: Callable[[Tensor], Tensor]
    transposed: Callable[[Tensor], Tensor]


class Differentiated:
    """The same with products by automatic differentiation."""

    def __init__(self, function: Function, x: Tensor, forward: bool) -> None:
        self.function, self.forward = function, forward
        self.x = x.detach().requires_grad_()
        with torch.enable_grad():
            # What does not depend on x has the derivative 0, which autograd would refuse.
            self.c = function(self.x) + 0 * self.x.flatten(1).sum(1, keepdim=True)
            # Jᵀu is linear in u, and its derivative along v is Jv: two backward passes instead of a forward one.
            self.u = torch.zeros_like(self.c, requires_grad=True)
            (self.image,) = torch.autograd.grad(self.c, self.x, self.u, create_graph=True)
        self.value = self.c.detach()

    def transposed(self, u: Tensor) -> Tensor:
        """Jᵀu: (B, R) → (B, C, H, W)."""
        return torch.autograd.grad(self.c, self.x, u, retain_graph=True)[0]

    def times(self, v: Tensor) -> Tensor:
        """Jv: (B, C, H, W) → (B, R)."""
        if self.forward:
            return torch.func.jvp(self.function, (self.x.detach(),), (v,))[1].detach()
        return torch.autograd.grad(self.image, self.u, v, retain_graph=True)[0]


class Linearised:
    """c(y) (B, R) at one batch, and products with its derivative A and with Aᵀ."""

    def __init__(self, problem: "Problem", y: Tensor, *, forward: bool = False) -> None:
        self.y, self.s, self.weights = y, problem.s, problem.weights
        x = problem.images(y)
        self.parts = [rows.linearised(x, forward) for rows in problem.every]
        self.preconditioners = [rows.preconditioner(x, problem.s) for rows in problem.every]
        self.value = self.weights * torch.cat([part.value for part in self.parts], dim=1)

    def transposed(self, u: Tensor) -> Tensor:
        """Aᵀu: (B, R) → (B, C, H, W)."""
        images = [part.transposed(rows) for part, rows in zip(self.parts, self._split(self.weights * u), strict=True)]
        return self.s * torch.stack(images).sum(0)

    def times(self, v: Tensor) -> Tensor:
        """Av: (B, C, H, W) → (B, R)."""
        return self.weights * torch.cat([part.times(self.s * v) for part in self.parts], dim=1)

    def preconditioned(self, u: Tensor) -> Tensor:
        """About (A Aᵀ)⁻¹ u, (B, R) → (B, R): part by part, and u itself where a part knows none.

        Rows of A are about of length one, so that the parts belong together.
        """
        if not any(self.preconditioners):
            return u
        parts = zip(self.preconditioners, self._split(u), self._split(self.weights), strict=True)
        return torch.cat([rows if known is None else known(rows / w) / w for known, rows, w in parts], dim=1)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """(B, R) by the parts that the rows belong to."""
        return rows.split([part.value.shape[1] for part in self.parts], dim=1)


def require_positive(lin: Linearised) -> None:
    """Refuse a preconditioner that is not symmetric and positive: conjugate gradients would silently go astray.

    Images on which the rule is not finite say nothing of it.
    """
    if not any(lin.preconditioners):
        return
    u, v = signs(lin.value, 1), signs(lin.value, 2)
    try:
        mu, mv = lin.preconditioned(u), lin.preconditioned(v)
    except RuntimeError as error:
        raise ConstraintError(f"the preconditioner fails on what the residual returns: {error}") from error
    gap, size = (dot(u, mv) - dot(v, mu)).abs(), norm(mu) * norm(v)
    good = (dot(u, mu) > 0) & (gap <= math.sqrt(torch.finfo(u.dtype).eps) * 100 * size)
    if not (good | ~lin.value.isfinite().all(1)).all():
        raise ConstraintError(
            "the preconditioner is not symmetric and positive definite: it must be about (J s² Jᵀ)⁻¹, with its null "
            "space, if there is one, mapped to itself."
        )


def needs_forward(problem: "Problem", y: Tensor) -> bool:
    """Whether A is to be had by forward differentiation only, because c can be differentiated backward once.

    A backward pass that cannot be differentiated gives zeros without a word, so that both are compared by
    u·(A v) = (Aᵀu)·v.
    """
    for forward in (False, True):
        lin = Linearised(problem, y, forward=forward)
        u, v = signs(lin.value), signs(y)
        back = lin.transposed(u)
        try:
            gap, size = dot(u, lin.times(v)) - dot(back, v), norm(back) * norm(v)
        except (RuntimeError, NotImplementedError):  # no forward derivative
            continue
        if not (gap.abs() > math.sqrt(torch.finfo(y.dtype).eps) * 100 * size).any():
            return forward
    raise ConstraintError(
        "the residual can be differentiated once only, or its derivatives are wrong, or it mixes the images of a "
        "batch: each image needs rows of its own, and a torch.autograd.Function a backward made of differentiable "
        "operations, or a jvp that agrees with it."
    )


@dataclass(frozen=True)
class Problem:
    """c(y) of a batch: rows that must be 0 or, where `at_most`, not positive, at x = x⁰ + s y.

    Attributes:
        x0: Images (B, C, H, W).
        s: What moves are measured in, (1, C, H, W).
        equations: Where the rows come from.
        at_most: Which rows must not be positive, (R,).
        weights: What makes the rows of A equally long, to within a factor of three: (B, R).
    """

    x0: Tensor
    s: Tensor
    equations: Equations
    at_most: Tensor
    weights: Tensor

    @classmethod
    def of(cls, x0: Tensor, s: Tensor, equations: Equations) -> "Problem":
        """The rows of equations, in units that belong together.

        The mean of (A η)² over random signs η is the sum of squares in each row. Rows that are about as long as those
        of their function in the mean get that function's weight.
        """
        weights = []
        near = norm(x0) / s.norm()
        move = math.sqrt(torch.finfo(x0.dtype).eps) * torch.where(near > 0, near, 1.0)[:, None, None, None]
        for function in (rows.function for rows in (*equations.equal, *equations.at_most)):
            value = function(x0)
            moves = [function(x0 + s * move * signs(x0, probe)) - value for probe in range(PROBES)]
            length = torch.stack(moves).square().mean(0).sqrt() / move.flatten(1)
            typical = length.square().mean(1, keepdim=True).sqrt()
            powers = torch.log10(length / typical).round().clamp(min=math.log10(FLAT))
            length = typical * torch.where(powers > math.log10(FLAT), 10**powers, 1.0)
            usable = torch.isfinite(length) & (length > 0)
            weights.append(torch.where(usable, 1 / length, 1.0))
        numbers = torch.repeat_interleave(torch.tensor([each.shape[1] for each in weights])).to(x0.device)
        return cls(x0, s, equations, numbers >= len(equations.equal), torch.cat(weights, dim=1))

    @property
    def every(self) -> tuple[Rows, ...]:
        """All rows, equations first."""
        return (*self.equations.equal, *self.equations.at_most)

    def images(self, y: Tensor) -> Tensor:
        """x of y."""
        return self.x0 + self.s * y

    def only(self, kept: Tensor) -> "Problem":
        """That of the images `kept` (B,)."""
        return replace(self, x0=self.x0[kept], weights=self.weights[kept])

    def rows(self, y: Tensor, error: float = 0.0) -> Tensor:
        """c(y), (B, R), for a relative error of x in a random direction."""
        x = self.images(y)
        x = x * (1 + error * signs(x)) if error else x
        return self.weights * torch.cat([rows.function(x) for rows in self.every], dim=1)

    def broken(self, c: Tensor) -> Tensor:
        """What is wrong with c: the positive part of inequalities, (B, R)."""
        return torch.where(self.at_most, c.clamp(min=0), c)

    def sensitivity(self, y: Tensor) -> Tensor:
        """How far c moves for a relative error of x of 1, by a difference in a random direction, (B,)."""
        error = math.sqrt(torch.finfo(y.dtype).eps)
        return (norm(self.rows(y, error) - self.rows(y)) / error).nan_to_num(0.0)


def signs(like: Tensor, draw: int = 0) -> Tensor:
    """Random signs, the same for every image of a batch (B, …)."""
    draws = torch.rand(like.shape[1:], generator=generator(draw, "signs"), dtype=torch.float64)
    return torch.where(draws < 0.5, -1.0, 1.0).to(like).expand_as(like)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """a·b of each image: (B, …), (B, …) → (B,)."""
    return (a * b).flatten(1).sum(1)


def norm(a: Tensor) -> Tensor:
    """‖a‖ of each image: (B, …) → (B,)."""
    return a.flatten(1).norm(dim=1)
