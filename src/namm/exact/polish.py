"""The nearest image that obeys a rule.

    min ½ ‖(x − x⁰) / s‖²    such that    r(x) = 0,   h(x) ≤ 0,   a ≤ x ≤ b

**Closed forms.** A rule that knows the nearest image says so (`Constraint.nearest`): sums, tiles, flows without
divergence, and by least squares over what determines the image the trajectories of Burgers' equation and Darcy's flow.

**Gauss–Newton.** Else, with c the rows of r and of those h and bounds that hold as equations, and J their Jacobian,

    x_{k+1} = x⁰ − S Jᵀμ,     J S Jᵀ μ = c(x_k) + J (x⁰ − x_k),     S = diag(s²),

is the nearest point of the linearised rule. The system is solved by conjugate gradients in their least-squares form
(CGLS), all images of a batch at once and each with its own steps. They need products with J and Jᵀ alone, which are
derivatives of r, and they find the smallest solution where J is rank-deficient and the best one where the equations
contradict each other. An inequality holds as an equation while its multiplier is positive or it is violated (a
primal–dual active set, Hintermüller, Ito and Kunisch 2002). A step that breaks the rule more is halved.

**Polyak.** A rule with ℓ alone descends along its gradient by x ← x − (ℓ − floor) / ‖s∇ℓ‖² · s²∇ℓ, the step that
would be exact if ℓ were linear.

Everything is computed in float64; the result has the type of x. A pixel with s = 0 stays as it is.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import Scaled, Sum
from namm.datasets.batches import Images, check_images, in_chunks
from namm.errors import ConstraintError, DataError, NammWarning, UsageError
from namm.exact.certificate import Certificate, WideRule
from namm.numerics import at_least_float32, full_precision
from namm.progress import ProgressBar

Function = Callable[[Tensor], Tensor]
Bounds = tuple[float | None, float | None]

STEPS, CG_STEPS, POLYAK_STEPS = 30, 400, 300
"""Most steps of Gauss–Newton, of CGLS inside each, and of Polyak."""
ENOUGH = 1e-4
"""By how much CGLS reduces its residual in one step of Gauss–Newton."""
EXACT = 1e-9
"""Violation over the first one at which a rule is met."""
STILL = 1e-5
"""Change of x over its distance from x⁰ at which it no longer moves."""
HALVINGS = 10
PIXELS = 2**18
"""Pixels, of all channels, that are polished together."""
STUCK = 1e-6
"""‖Jᵀc‖ over ‖J‖‖c‖ at which the equations contradict each other."""


@dataclass(frozen=True)
class Polished:
    """Images on the rule, (N, C, H, W), and the certificate that says how far each moved and what is left."""

    images: Tensor
    certificate: Certificate

    def _repr_html_(self) -> str:
        return self.certificate._repr_html_()


def polish(
    x: Images,
    rule: Constraint,
    *,
    scale: float | Sequence[float] | Tensor | None = None,
    frozen: Tensor | None = None,
    bounds: Bounds | None = None,
    floor: float = 0.0,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Polished:
    """Move images to the nearest ones that obey the rule.

    Args:
        x: Images (N, C, H, W), of any model.
        rule: ℓ. With `nearest`, `residual` or `inequality` the result is exact; with ℓ alone it ends at `floor`.
        scale: What a move is measured in: a number, one per channel, or a tensor that broadcasts to an image. Channels
            in different units need it; where pixels are known well, let it be small there.
        frozen: Pixels that must stay as they are, a boolean tensor that broadcasts to an image.
        bounds: Least and largest value of a pixel; None where there is none.
        floor: Mean ℓ of the data. A rule with ℓ alone stops there, and certificates compare with it.
        device: Where to compute; where the images are by default.
        progress: Show a progress bar, where there is a terminal.

    Raises:
        DataError: NaN or inf in an image.
        UsageError: A scale, bounds or pixels that fit no image.
    """
    check_images(x, "images")
    wide = WideRule(rule)
    s = _scale(scale, frozen, tuple(x.shape[1:]))
    low, high = _checked_bounds(bounds)
    images, certificates, done = [], [], 0
    with ProgressBar("polish", x.shape[0], visible=progress) as bar:
        for part in in_chunks(x, max(1, PIXELS // math.prod(x.shape[1:]))):
            start = at_least_float32(part.to(device))
            if not torch.isfinite(start).all():
                raise DataError(f"an image among {done} to {done + len(part) - 1} holds NaN or inf: nothing is near.")
            image, certificate = _polish_batch(start, wide, s.to(start.device), (low, high), floor)
            images.append(image.cpu() if not isinstance(x, Tensor) else image.to(x.device))
            certificates.append(certificate)
            done += len(part)
            bar.advance(len(part))
    return Polished(torch.cat(images), Certificate.joined(certificates))


def _polish_batch(x: Tensor, wide: WideRule, scale: Tensor, bounds: Bounds, floor: float) -> tuple[Tensor, Certificate]:
    """One batch, (B, C, H, W), and its certificate."""
    before, start = wide.distance(x), wide.widen(x)
    rule, s = wide.rule, scale.to(start.dtype)
    bounded, movable = any(end is not None for end in bounds), bool((s > 0).all())
    steps = np.ones(len(x))
    with torch.no_grad(), full_precision(start):
        found = rule.nearest(start, s) if movable and not bounded else None
    notes: list[str] = []
    method = "closed form"
    if found is None:
        equations = Equations.of(rule, bounds)
        if equations is not None:
            method = "Gauss-Newton"
            found, steps, notes = gauss_newton(start, equations, s)
        else:
            method = "Polyak"
            found, steps = polyak(start, rule, s, bounds, floor)
    image = found.to(x.dtype)
    moved = torch.where(s > 0, (image.to(start.dtype) - start) / s.clamp_min(torch.finfo(s.dtype).tiny), 0.0)
    rms = moved.square().flatten(1).mean(1).sqrt().cpu().double().numpy()
    certificate = Certificate(
        wide.narrow.name,
        method,
        floor,
        before,
        wide.distance(image),
        rms,
        steps,
        wide.rounding(image),
        (*wide.notes, *notes),
    )
    return image, certificate


def _scale(scale: float | Sequence[float] | Tensor | None, frozen: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """s of every pixel, (1, C, H, W) in float64, 0 where it is frozen."""
    s = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64).cpu()
    s = s.reshape(-1, 1, 1) if s.ndim == 1 else s
    try:
        s = s.expand(1, *shape).clone()
        if frozen is not None:
            s[torch.as_tensor(frozen).cpu().bool().expand(1, *shape)] = 0.0
    except RuntimeError as error:
        raise UsageError(f"scale and frozen must broadcast to an image of shape {shape}: {error}.") from error
    if not (torch.isfinite(s).all() and (s >= 0).all() and (s > 0).any()):
        raise UsageError("scale must be finite and not negative, and some pixel must be free to move.")
    return s


def _checked_bounds(bounds: Bounds | None) -> Bounds:
    low, high = bounds or (None, None)
    if low is not None and high is not None and not low < high:
        raise UsageError(f"bounds must be (low, high) with low < high, not {bounds}.")
    return low, high


@dataclass(frozen=True)
class Equations:
    """c(x), (B, R): rows that must be 0 and, the last `inequalities` of them, rows that must not be positive."""

    rows: Function
    inequalities: Callable[[Tensor], int]

    @classmethod
    def of(cls, rule: Constraint, bounds: Bounds) -> "Equations | None":
        """The rows of a rule and of bounds on pixels; None of a rule that has ℓ alone."""
        parts = _parts(rule)
        if not all(part.has_residual or part.has_inequality for part in parts):
            return None
        equal = [part.residual for part in parts if part.has_residual]
        at_most: list[Function] = [part.inequality for part in parts if part.has_inequality]
        low, high = bounds
        if low is not None:
            at_most.append(lambda x: low - x)
        if high is not None:
            at_most.append(lambda x: x - high)

        def rows(x: Tensor) -> Tensor:
            return torch.cat([each(x).reshape(len(x), -1) for each in (*equal, *at_most)], dim=1)

        def count(x: Tensor) -> int:
            with torch.no_grad():
                return sum(each(x[:1]).numel() for each in at_most)

        return cls(rows, count)


def _parts(rule: Constraint) -> list[Constraint]:
    """The rules that a sum or a multiple is made of: the same set."""
    if isinstance(rule, Scaled):
        return _parts(rule.inner)
    return [each for part in rule.parts for each in _parts(part)] if isinstance(rule, Sum) else [rule]  # type: ignore[arg-type]


class Linearised:
    """c(x) (B, R) at one batch of images, and products with its Jacobian J and with Jᵀ."""

    def __init__(self, rows: Function, x: Tensor) -> None:
        self.x = x.detach().requires_grad_()
        self.function = rows
        with torch.enable_grad():
            self.c = rows(self.x)
            # Jᵀu is linear in u, and its derivative along v is Jv: two backward passes instead of a forward one.
            self.u = torch.zeros_like(self.c, requires_grad=True)
            (self.image,) = torch.autograd.grad(self.c, self.x, self.u, create_graph=True, materialize_grads=True)
        self.value = self.c.detach()

    def transposed(self, u: Tensor) -> Tensor:
        """Jᵀu: (B, R) → (B, C, H, W)."""
        (found,) = torch.autograd.grad(self.c, self.x, u, retain_graph=True, materialize_grads=True)
        return found.detach()

    def times(self, v: Tensor) -> Tensor:
        """Jv: (B, C, H, W) → (B, R)."""
        if not self.image.requires_grad:  # c does not depend on x at all
            return torch.zeros_like(self.value)
        try:
            (found,) = torch.autograd.grad(self.image, self.u, v, retain_graph=True, materialize_grads=True)
        except RuntimeError:  # differentiable once only: by forward differentiation
            found = torch.func.jvp(self.function, (self.x.detach(),), (v,))[1]
        return found.detach()


def gauss_newton(x0: Tensor, equations: Equations, s: Tensor) -> tuple[Tensor, np.ndarray, list[str]]:
    """The nearest images on the equations' set, the steps that each took, and what went wrong, in sentences."""
    count = equations.inequalities(x0)
    found, steps = x0.clone(), np.zeros(len(x0))
    todo = torch.arange(len(x0), device=x0.device)
    x, multipliers, first = x0, None, None
    contradictions = 0
    for _ in range(STEPS):
        origin, scale = x0[todo], s
        lin = Linearised(equations.rows, x)
        c = lin.value
        if not torch.isfinite(c).all():
            raise ConstraintError("the residual of an image is not finite: the rule cannot be met from there.")
        if multipliers is None:
            multipliers = torch.zeros_like(c)
        active = torch.ones_like(c, dtype=torch.bool)
        if count:
            active[:, -count:] = (c[:, -count:] > 0) | (multipliers[:, -count:] > 0)
        before = violation(c, count)
        first = before.clone() if first is None else first

        mu, left = least_squares(lin, origin, c, active, multipliers, scale)
        if count:
            mu[:, -count:].clamp_(min=0)
        full = origin - scale.square() * lin.transposed(mu)
        x_new, improved = _line_search(equations.rows, x, full, before, EXACT * first, count)

        change = _norm((x_new - x) / scale.clamp_min(1e-300) * (scale > 0))
        length = _norm((x_new - origin) / scale.clamp_min(1e-300) * (scale > 0))
        after = violation(equations.rows(x_new), count)
        met = after <= EXACT * first
        done = (met & (change <= STILL * length)) | ~improved
        contradictions += int((~improved & ~met & left).sum())
        steps[todo.cpu().numpy()] += 1
        found[todo] = x_new
        keep = ~done
        todo, x, multipliers, first = todo[keep], x_new[keep], mu[keep], first[keep]
        if not len(todo):
            break
    notes = []
    if contradictions:
        notes.append(
            f"{contradictions} images cannot obey all equations at once: near them the equations contradict each "
            "other, and they were left where these are met best. Check the residual, or what is frozen and bounded."
        )
    return found, steps, notes


def violation(c: Tensor, count: int) -> Tensor:
    """Root mean square of what is broken, (B, R) → (B,): all of the equations, the positive part of inequalities."""
    if count:
        c = torch.cat([c[:, : c.shape[1] - count], c[:, -count:].clamp(min=0)], dim=1)
    return c.square().mean(1).sqrt()


def least_squares(
    lin: Linearised, origin: Tensor, c: Tensor, active: Tensor, start: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """μ with J S Jᵀ μ = c + J(x⁰ − x) on the active rows by CGLS, and where these equations contradict each other.

    CGLS minimises ‖b − A e‖ with A = J s on the active rows and e = Aᵀμ.
    """
    on = active.to(c)
    mu = start * on

    def transposed(u: Tensor) -> Tensor:
        return s * lin.transposed(u * on)

    b = (c + lin.times(origin - lin.x.detach())) * on
    e = transposed(mu)
    residual = b - lin.times(s * e) * on
    gradient = transposed(residual)
    direction, dual = gradient, residual
    gamma = _dot(gradient, gradient)
    target = (ENOUGH * _norm(c * on)).clamp_min(1e-300)
    size = gamma.new_zeros(len(c))
    stuck = torch.zeros_like(gamma, dtype=torch.bool)
    for _ in range(CG_STEPS):
        length = _norm(residual)
        stuck = (gamma.sqrt() <= STUCK * size * length) & (length > target)
        running = (length > target) & ~stuck & (gamma > 0)
        if not running.any():
            break
        image = lin.times(s * direction) * on
        curvature = _dot(image, image)
        size = torch.maximum(size, (curvature / _dot(direction, direction).clamp_min(1e-300)).sqrt())
        alpha = torch.where(running & (curvature > 0), gamma / curvature.clamp_min(1e-300), 0.0)[:, None]
        mu = mu + alpha * dual
        residual = residual - alpha * image
        gradient = transposed(residual)
        previous, gamma = gamma, _dot(gradient, gradient)
        beta = (gamma / previous.clamp_min(1e-300))[:, None]
        dual = residual + beta * dual
        direction = gradient + beta[..., None, None] * direction
    return mu * on, stuck


def _line_search(
    rows: Function, x: Tensor, full: Tensor, before: Tensor, enough: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """x moved towards `full` by the longest of 1, ½, ¼ … that breaks the rule less, and where there is such a step."""
    best, todo = x.clone(), torch.ones_like(before, dtype=torch.bool)
    fraction = 1.0
    for _ in range(HALVINGS):
        tried = x + fraction * (full - x)
        with torch.no_grad():
            after = violation(rows(tried), count)
        good = todo & ((after <= (1 - 1e-4 * fraction) * before) | (after <= enough))
        best[good] = tried[good]
        todo &= ~good
        if not todo.any():
            break
        fraction /= 2
    return best, ~todo


def polyak(x: Tensor, rule: Constraint, s: Tensor, bounds: Bounds, floor: float) -> tuple[Tensor, np.ndarray]:
    """Images of ℓ at most `floor`, or the best that were found, and the steps that each took."""
    low, high = bounds
    best, lowest = x.clone(), x.new_full((len(x),), torch.inf)
    steps = np.zeros(len(x))
    first: Tensor | None = None
    for step in range(POLYAK_STEPS + 1):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            distance = rule(x)
            (gradient,) = torch.autograd.grad(distance.sum(), x)
        distance, gradient = distance.detach(), gradient.detach()
        better = distance < lowest
        best[better], lowest[better] = x.detach()[better], distance[better]
        first = distance if first is None else first
        slope = _dot(s * gradient, s * gradient)
        running = (lowest > torch.clamp_min(EXACT * first, floor)) & (slope > 0) & torch.isfinite(distance)
        if step == POLYAK_STEPS or not running.any():
            break
        steps[running.cpu().numpy()] += 1
        length = torch.where(running, (distance - floor).clamp_min(0) / slope.clamp_min(1e-300), 0.0)
        x = x.detach() - length[:, None, None, None] * s.square() * gradient
        if low is not None or high is not None:
            x = x.clamp(low, high)
    if not torch.isfinite(lowest).all():
        warnings.warn("ℓ of an image is not finite: it stays as it is.", NammWarning, stacklevel=2)
    return best, steps


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _norm(a: Tensor) -> Tensor:
    return a.flatten(1).norm(dim=1)
