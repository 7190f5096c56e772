"""Gauss–Newton: the nearest image on the equations and inequalities of a rule.

    min ½ ‖y‖²    such that    c(y) = 0, or c(y) ≤ 0 in the rows of inequalities,      x = x⁰ + s y

With c the rows of r, of h and of the bounds, and A their derivative in y, each step goes to the nearest point of the
linearised rule. It is y = −Aᵀμ, where μ, not negative for inequalities, solves

    min ½ ‖Aᵀμ‖² − μ·(c(y_k) − A y_k) + λ/2 ‖μ − μ_k‖².

This needs products with A and Aᵀ alone: those of the rule itself (`Constraint.derivative`), or by automatic
differentiation. It is solved by conjugate gradients on the rows whose multipliers are free (modified proportioning with
reduced gradient projections, Dostál and Schöberl 2005), all images of a batch at once and each with its own steps. A
small λ makes μ unique where A is rank-deficient, and y the point that meets the equations best where these contradict
each other; later steps undo its effect on any other (a proximal point method). The step is halved until
½ ‖y‖² + ν ‖what is broken‖ decreases, with ν above ‖μ‖ (an exact penalty, Han 1977).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import Products, Scaled, Sum
from namm.errors import ConstraintError
from namm.numerics import generator

Function = Callable[[Tensor], Tensor]
Bounds = tuple[float | None, float | None]

STEPS, CG_STEPS, CG_WORK = 30, 400, 4000
"""Most steps of Gauss–Newton, of conjugate gradients inside each, and of these in all."""
ENOUGH = 1e-4
"""By how much conjugate gradients reduce what is wrong in one step of Gauss–Newton."""
HALVINGS, POWER_STEPS, RESTORED = 12, 8, 6
"""Halvings of a step, steps that find ‖A‖, and last steps that go to the rule from wherever they are."""
STUCK, STUCK_AT_LAST = 1e-6, 1e-2
"""‖Aᵀc‖ over ‖A‖‖c‖ at which the equations contradict each other, on the way and where nothing helps any more."""
PROBES = 8
"""Random directions in which the length of each row of A is measured."""
FLAT = 1e-8
"""Rows shorter than this, over the longest of their function, are not made as long as others: x does not move them."""


@dataclass(frozen=True)
class Rows:
    """Rows (B, R) of images (B, C, H, W), and products with their derivative at x, (B, R), where these are known."""

    function: Function
    products: Callable[[Tensor], Products | None] = lambda x: None

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
    """r with the rule's own derivative, or ℓ."""
    if not rule.has_residual:
        return Rows(_flat(rule, rule))

    def products(x: Tensor) -> Products | None:
        known = rule.derivative(x)
        if known is None:
            return None
        times, transposed = known
        shape = rule.residual(x[:1]).shape[1:]
        return lambda v: times(v).flatten(1), lambda u: transposed(u.unflatten(1, shape))

    return Rows(_flat(rule.residual, rule), products)


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
        self.parts = [rows.linearised(problem.images(y), forward) for rows in problem.every]
        self.value = self.weights * torch.cat([part.value for part in self.parts], dim=1)

    def transposed(self, u: Tensor) -> Tensor:
        """Aᵀu: (B, R) → (B, C, H, W)."""
        split = (self.weights * u).split([part.value.shape[1] for part in self.parts], dim=1)
        return self.s * torch.stack([part.transposed(rows) for part, rows in zip(self.parts, split, strict=True)]).sum(
            0
        )

    def times(self, v: Tensor) -> Tensor:
        """Av: (B, C, H, W) → (B, R)."""
        return self.weights * torch.cat([part.times(self.s * v) for part in self.parts], dim=1)


def needs_forward(problem: "Problem", y: Tensor) -> bool:
    """Whether A is to be had by forward differentiation only, because c can be differentiated backward once.

    A backward pass that cannot be differentiated gives zeros without a word, so that both are compared by
    u·(A v) = (Aᵀu)·v.
    """
    for forward in (False, True):
        lin = Linearised(problem, y, forward=forward)
        u, v = _signs(lin.value), _signs(y)
        back = lin.transposed(u)
        try:
            gap, size = _dot(u, lin.times(v)) - _dot(back, v), _norm(back) * _norm(v)
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
        near = _norm(x0) / s.norm()
        move = math.sqrt(torch.finfo(x0.dtype).eps) * torch.where(near > 0, near, 1.0)[:, None, None, None]
        for function in (rows.function for rows in (*equations.equal, *equations.at_most)):
            value = function(x0)
            moves = [function(x0 + s * move * _signs(x0, probe)) - value for probe in range(PROBES)]
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
        x = x * (1 + error * _signs(x)) if error else x
        return self.weights * torch.cat([rows.function(x) for rows in self.every], dim=1)

    def broken(self, c: Tensor) -> Tensor:
        """What is wrong with c: the positive part of inequalities, (B, R)."""
        return torch.where(self.at_most, c.clamp(min=0), c)

    def sensitivity(self, y: Tensor) -> Tensor:
        """How far c moves for a relative error of x of 1, by a difference in a random direction, (B,)."""
        error = math.sqrt(torch.finfo(y.dtype).eps)
        return (_norm(self.rows(y, error) - self.rows(y)) / error).nan_to_num(0.0)


@dataclass(frozen=True)
class Solution:
    """What Gauss–Newton found.

    Attributes:
        images: (B, C, H, W).
        steps: That each image took (B,).
        met: Whether the equations hold (B,).
        contradicting: Whether they cannot all hold near the image (B,).
    """

    images: Tensor
    steps: np.ndarray
    met: np.ndarray
    contradicting: np.ndarray


def gauss_newton(x0: Tensor, equations: Equations, s: Tensor, precision: float) -> Solution:
    """Find the nearest images on the equations' set.

    Args:
        x0: Images (B, C, H, W).
        equations: Their rows are c.
        s: What moves are measured in (1, C, H, W).
        precision: Relative error of x that is as good as none.
    """
    whole = Problem.of(x0, s, equations)
    y, c = torch.zeros_like(x0), whole.rows(torch.zeros_like(x0))
    steps, contradicting = np.zeros(len(x0)), np.zeros(len(x0), dtype=bool)
    negligible = precision * whole.sensitivity(y)
    met_all = torch.isfinite(c).all(1) & (_norm(whole.broken(c)) <= negligible)
    todo, work = (torch.isfinite(c).all(1) & ~met_all).nonzero()[:, 0], CG_WORK
    problem, here, mu, negligible = whole.only(todo), y[todo], torch.zeros_like(c[todo]), negligible[todo]
    share, size = torch.ones_like(negligible), torch.ones_like(negligible)
    forward = len(todo) > 0 and needs_forward(problem, here)
    for step in range(STEPS):
        if not len(todo) or work <= 0:
            break
        lin = Linearised(problem, here, forward=forward)
        wrong = problem.broken(lin.value)
        before = _norm(wrong)
        now = largest_eigenvalue(lin)
        size = size if step else now
        stuck = _norm(lin.transposed(wrong)) <= STUCK * size.sqrt() * before
        # Towards x⁰ it goes by a share of the way only, where the rule is so curved that more would be too far.
        anchor = (1 - share[:, None, None, None]) * here
        mu, used = multipliers(lin, anchor, mu, problem.at_most, now, negligible / 4, min(CG_STEPS, work))
        work -= used
        towards = anchor - lin.transposed(mu) - here
        here, left, fraction = line_search(problem, here, towards, before, 2 * _norm(mu), share)
        negligible = precision * problem.sensitivity(here)
        met, halted = (left <= negligible) | stuck, (fraction == 0) | (left > before / 2)
        still = (_norm(towards) <= math.sqrt(100 * precision) * share * _norm(here)) | (fraction == 0)
        done = torch.where(share > 0, met & still, met | halted)
        # Last, or where nothing else helps, not towards x⁰ at all: to the rule from where it is.
        restored = (still & halted) | (step >= STEPS - RESTORED) | (work < CG_STEPS) | (share == 0)
        share = torch.where(fraction < 1, share / 2, (1.5 * share).clamp(max=1)).masked_fill(restored, 0.0)
        mu = mu.masked_fill(restored[:, None], 0.0)

        y[todo] = here
        steps[todo.cpu().numpy()] += 1
        met_all[todo] = left <= negligible
        if (over := (done | (step == STEPS - 1) | (work <= 0)) & (left > negligible)).any():
            nowhere = is_stuck(problem.only(over), here[over], size[over], forward)
            contradicting[todo[over].cpu().numpy()] = nowhere & halted[over].cpu().numpy()
        problem, todo = problem.only(~done), todo[~done]
        here, mu, share, size, negligible = (each[~done] for each in (here, mu, share, size, negligible))
    return Solution(x0 + s * y, steps, met_all.cpu().numpy(), contradicting)


def is_stuck(problem: Problem, y: Tensor, size: Tensor, forward: bool) -> np.ndarray:
    """Where no small step brings y nearer to the rule, relative to ‖A‖² in the beginning, (B,)."""
    lin = Linearised(problem, y, forward=forward)
    wrong = problem.broken(lin.value)
    found: np.ndarray = (_norm(lin.transposed(wrong)) <= STUCK_AT_LAST * size.sqrt() * _norm(wrong)).cpu().numpy()
    return found


def largest_eigenvalue(lin: Linearised) -> Tensor:
    """‖A‖² of each image, (B,), by the power method; 1 where A is 0."""
    v = _signs(lin.value)
    for _ in range(POWER_STEPS):
        v = lin.times(lin.transposed(v / _norm(v).clamp_min(torch.finfo(v.dtype).tiny)[:, None]))
    size = _norm(v)
    return torch.where(size > 0, size, 1.0)


def multipliers(
    lin: Linearised, anchor: Tensor, mu: Tensor, at_most: Tensor, size: Tensor, negligible: Tensor, most: int
) -> tuple[Tensor, int]:
    """μ of the linearised rule's nearest point to `anchor`, (B, R), and the steps to it, at most `most`.

    μ is not negative for the inequalities `at_most` (R,).

    Conjugate gradients on free rows; where a step would make a multiplier negative it ends there, and one of the
    gradient follows, projected; where the bound rows ask to be freed more than the free ones are wrong, they are.
    """
    damping, length = (math.sqrt(torch.finfo(mu.dtype).eps) * size)[:, None], (1 / size)[:, None]
    start = mu

    def hessian(v: Tensor) -> Tensor:
        return lin.times(lin.transposed(v)) + damping * v

    def free(gradient: Tensor) -> Tensor:
        return torch.where(at_most & (mu <= 0), 0.0, gradient)

    gradient = lin.times(lin.y - anchor + lin.transposed(mu)) - lin.value
    direction, enough, used = free(gradient), None, 0
    while used < most:
        used += 1
        inner = free(gradient)
        outer = torch.where(at_most & (mu <= 0), gradient.clamp(max=0), 0.0)
        wrong = _norm(inner + outer)
        enough = torch.maximum(ENOUGH * wrong, negligible) if enough is None else enough
        running = wrong > enough
        if not running.any():
            break
        reduced = torch.where(at_most, torch.minimum(inner, mu / length), inner)
        inside = _dot(outer, outer) <= _dot(reduced, inner)
        direction = torch.where(inside[:, None], direction, outer)
        image = hessian(direction)
        curvature = _dot(direction, image)
        step = torch.where(running, _ratio(_dot(gradient, direction), curvature), 0.0)
        longest = torch.where(at_most & (direction > 0), mu / direction, torch.inf)
        blocked = step > longest.amin(1)
        step = torch.minimum(step, longest.amin(1))[:, None]
        mu = torch.where(longest <= step, 0.0, mu - step * direction)
        gradient = gradient - step * image
        if blocked.any():
            projected = mu - length * free(gradient)
            projected = torch.where(at_most, projected.clamp(min=0), projected)
            change = torch.where(blocked[:, None], projected - mu, 0.0)
            mu, gradient = mu + change, gradient + hessian(change)
        inner = free(gradient)
        again = torch.where(inside & ~blocked, _ratio(_dot(inner, image), curvature), 0.0)
        direction = inner - again[:, None] * direction
    return torch.where(torch.isfinite(mu).all(1, keepdim=True), mu, start), used


def line_search(
    problem: Problem, y: Tensor, towards: Tensor, before: Tensor, penalty: Tensor, share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y moved by the longest of 1, ½, ¼ … of `towards` that lowers ½ share ‖y‖² + penalty · ‖broken‖.

    Returns y, what it breaks (B,), and that fraction (B,), 0 where there is none.
    """
    penalty = torch.where(penalty > 0, penalty, 1.0)
    merit = share * _dot(y, y) / 2 + penalty * before
    slope = (share * _dot(y, towards) - penalty * before).clamp(max=0)
    rounding = 4 * torch.finfo(y.dtype).eps * merit
    best, left, taken = y.clone(), before.clone(), torch.zeros_like(before)
    for fraction in (0.5**k for k in range(HALVINGS)):
        tried = y + fraction * towards
        after = _norm(problem.broken(problem.rows(tried)))
        lower = share * _dot(tried, tried) / 2 + penalty * after <= merit + 1e-4 * fraction * slope + rounding
        good = (taken == 0) & lower
        best[good], left[good], taken[good] = tried[good], after[good], fraction
        if (taken > 0).all():
            break
    return best, left, taken


def _signs(like: Tensor, draw: int = 0) -> Tensor:
    """Random signs, the same for every image of a batch (B, …)."""
    draws = torch.rand(like.shape[1:], generator=generator(draw, "signs"), dtype=torch.float64)
    return torch.where(draws < 0.5, -1.0, 1.0).to(like).expand_as(like)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is not positive."""
    return torch.where(b > 0, a / b, 0.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _norm(a: Tensor) -> Tensor:
    return a.flatten(1).norm(dim=1)
