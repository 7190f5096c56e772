"""Gauss–Newton: the nearest image on the equations and inequalities of a rule.

    min ½ ‖y‖²    such that    c(y) = 0, or c(y) ≤ 0 in the rows of inequalities,      x = x⁰ + s y

With c the rows of r, of h and of the bounds, and A their derivative in y, each step goes to the nearest point of the
linearised rule. It is y = −Aᵀμ, where μ, not negative for inequalities, solves

    min ½ ‖Aᵀμ‖² − μ·(c(y_k) − A y_k) + λ/2 ‖μ − μ_k‖².

This needs products with A and Aᵀ alone (`equations.py`). It is solved by conjugate gradients on the rows whose
multipliers are free (modified proportioning with reduced gradient projections, Dostál and Schöberl 2005), all images of
a batch at once and each with its own steps, preconditioned where the rule brings a preconditioner. A small λ makes μ
unique where A is rank-deficient, and y the point that meets the equations best where these contradict each other; later
steps undo its effect on any other (a proximal point method). The step is halved until ½ ‖y‖² + ν ‖what is broken‖
decreases, with ν above ‖μ‖ (an exact penalty, Han 1977).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from namm.exact.equations import Equations, Linearised, Problem, dot, needs_forward, norm, require_positive, signs

STEPS, CG_STEPS, CG_WORK = 30, 400, 4000
"""Most steps of Gauss–Newton, of conjugate gradients inside each, and of these in all."""
ENOUGH = 1e-4
"""By how much conjugate gradients reduce what is wrong in one step of Gauss–Newton."""
HALVINGS, POWER_STEPS, RESTORED = 12, 8, 6
"""Halvings of a step, steps that find ‖A‖, and last steps that go to the rule from wherever they are."""
STUCK, STUCK_AT_LAST = 1e-6, 1e-2
"""‖Aᵀc‖ over ‖A‖‖c‖ at which the equations contradict each other, on the way and where nothing helps any more."""


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
    met_all = torch.isfinite(c).all(1) & (norm(whole.broken(c)) <= negligible)
    todo, work = (torch.isfinite(c).all(1) & ~met_all).nonzero()[:, 0], CG_WORK
    problem, here, mu, negligible = whole.only(todo), y[todo], torch.zeros_like(c[todo]), negligible[todo]
    share, size = torch.ones_like(negligible), torch.ones_like(negligible)
    forward = len(todo) > 0 and needs_forward(problem, here)
    for step in range(STEPS):
        if not len(todo) or work <= 0:
            break
        lin = Linearised(problem, here, forward=forward)
        wrong = problem.broken(lin.value)
        before = norm(wrong)
        now = largest_eigenvalue(lin)
        if not step:
            require_positive(lin)
            size = now
        stuck = norm(lin.transposed(wrong)) <= STUCK * size.sqrt() * before
        # Towards x⁰ it goes by a share of the way only, where the rule is so curved that more would be too far.
        anchor = (1 - share[:, None, None, None]) * here
        mu, used = multipliers(lin, anchor, mu, problem.at_most, now, negligible / 4, min(CG_STEPS, work))
        work -= used
        towards = anchor - lin.transposed(mu) - here
        here, left, fraction = line_search(problem, here, towards, before, 2 * norm(mu), share)
        negligible = precision * problem.sensitivity(here)
        met, halted = (left <= negligible) | stuck, (fraction == 0) | (left > before / 2)
        still = (norm(towards) <= math.sqrt(100 * precision) * share * norm(here)) | (fraction == 0)
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
    found: np.ndarray = (norm(lin.transposed(wrong)) <= STUCK_AT_LAST * size.sqrt() * norm(wrong)).cpu().numpy()
    return found


def largest_eigenvalue(lin: Linearised) -> Tensor:
    """‖A‖² of each image, (B,), by the power method; 1 where A is 0."""
    v = signs(lin.value)
    for _ in range(POWER_STEPS):
        v = lin.times(lin.transposed(v / norm(v).clamp_min(torch.finfo(v.dtype).tiny)[:, None]))
    size = norm(v)
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
    direction, enough, used = lin.preconditioned(free(gradient)), None, 0
    while used < most:
        used += 1
        inner = free(gradient)
        outer = torch.where(at_most & (mu <= 0), gradient.clamp(max=0), 0.0)
        wrong = norm(inner + outer)
        enough = torch.maximum(ENOUGH * wrong, negligible) if enough is None else enough
        running = wrong > enough
        if not running.any():
            break
        reduced = torch.where(at_most, torch.minimum(inner, mu / length), inner)
        inside = dot(outer, outer) <= dot(reduced, inner)
        direction = torch.where(inside[:, None], direction, outer)
        image = hessian(direction)
        curvature = dot(direction, image)
        step = torch.where(running, _ratio(dot(gradient, direction), curvature), 0.0)
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
        inner = lin.preconditioned(free(gradient))
        again = torch.where(inside & ~blocked, _ratio(dot(inner, image), curvature), 0.0)
        direction = inner - again[:, None] * direction
    return torch.where(torch.isfinite(mu).all(1, keepdim=True), mu, start), used


def line_search(
    problem: Problem, y: Tensor, towards: Tensor, before: Tensor, penalty: Tensor, share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y moved by the longest of 1, ½, ¼ … of `towards` that lowers ½ share ‖y‖² + penalty · ‖broken‖.

    Returns y, what it breaks (B,), and that fraction (B,), 0 where there is none.
    """
    penalty = torch.where(penalty > 0, penalty, 1.0)
    merit = share * dot(y, y) / 2 + penalty * before
    slope = (share * dot(y, towards) - penalty * before).clamp(max=0)
    rounding = 4 * torch.finfo(y.dtype).eps * merit
    best, left, taken = y.clone(), before.clone(), torch.zeros_like(before)
    for fraction in (0.5**k for k in range(HALVINGS)):
        tried = y + fraction * towards
        after = norm(problem.broken(problem.rows(tried)))
        lower = share * dot(tried, tried) / 2 + penalty * after <= merit + 1e-4 * fraction * slope + rounding
        good = (taken == 0) & lower
        best[good], left[good], taken[good] = tried[good], after[good], fraction
        if (taken > 0).all():
            break
    return best, left, taken


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is not positive."""
    return torch.where(b > 0, a / b, 0.0)
