"""The nearest image that obeys a rule.

    min ½ ‖y‖²    such that    r(x) = 0,   h(x) ≤ 0,   a ≤ x ≤ b,      x = x⁰ + s y

A rule that knows the nearest image says so (`Constraint.nearest`): sums, tiles, flows without divergence, and by least
squares over what determines the image the trajectories of Burgers' equation and Darcy's flow. Else its equations and
inequalities are met by Gauss–Newton (`namm.exact.gauss_newton`), and ℓ alone is descended by Polyak's steps
(`namm.exact.polyak`).

Everything is computed in float64; the result has the type of x. A pixel with s = 0 stays as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import RuleFunction, Scaled, as_rule
from namm.datasets.batches import Images, check_images, in_chunks
from namm.errors import ConstraintError, DataError, UsageError
from namm.exact.certificate import Certificate, WideRule, checked_floor
from namm.exact.equations import Bounds, Equations
from namm.exact.gauss_newton import gauss_newton
from namm.exact.polyak import EXACT, polyak
from namm.numerics import at_least_float32, full_precision, generator
from namm.progress import ProgressBar

PIXELS = {"cpu": 2**18, "cuda": 2**22}
"""Pixels, of all channels, that are polished together."""
DISAGREES = 1e-3
"""What is left of ℓ, as a share, from which on it does not vanish with the residual; less of it is rounding."""
NOT_FINITE = "The rule of some images is not finite: these stay as they are."
CONTRADICTION = (
    "Some images cannot obey all equations at once: near them the equations contradict each other, and they were left "
    "where these are met best. Check the residual, or what is frozen and bounded."
)
DISAGREEMENT = (
    "On some images the residual and the inequality vanish and ℓ does not: they are of different rules. Check one "
    "against the other."
)
ONLY_DISTANCE = (
    "Some images ended off the rule, of which ℓ alone is known: steps along its gradient end near it. With the tensor "
    "that vanishes where the rule holds, constraint(…, residual=…), they end on it."
)
UNFINISHED = "Some images ended off the rule: no further step brought them nearer, or there were too few."


@dataclass(frozen=True)
class Polished:
    """Images on the rule, (N, C, H, W), and the certificate that says how far each moved and what is left."""

    images: Tensor
    certificate: Certificate

    def _repr_html_(self) -> str:
        return self.certificate._repr_html_()


@torch.inference_mode(False)  # derivatives are needed inside, whatever the caller has switched off
@torch.no_grad()
def polish(
    x: Images,
    rule: Constraint | RuleFunction,
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
        rule: ℓ, a constraint or a function. With `nearest`, `residual` or `inequality` the result is exact; with ℓ
            alone it ends at `floor`.
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
    rule, floor = as_rule(rule), checked_floor(floor)
    s = pixel_scale(scale, frozen, tuple(x.shape[1:]))
    unit = float(s.max())  # what is nearest does not depend on it, and squares of 1e-200 are 0
    ends = _checked_bounds(bounds)
    place = torch.device(device if device is not None else getattr(x, "device", "cpu"))
    size = max(1, PIXELS.get(place.type, PIXELS["cpu"]) // math.prod(x.shape[1:]))
    wide, images, certificates, done = WideRule(rule), None, [], 0
    with ProgressBar("polish", x.shape[0], visible=progress) as bar:
        for part in in_chunks(x, size):
            start = at_least_float32(part.to(place))
            if not torch.isfinite(start).all():
                raise DataError(f"an image among {done} to {done + len(part) - 1} holds NaN or inf: nothing is near.")
            image, certificate = _polish_batch(start, wide, (s / unit).to(place), ends, floor)
            if images is None:
                images = image.new_empty(tuple(x.shape), device=getattr(x, "device", "cpu"))
            images[done : done + len(part)] = image
            certificates.append(replace(certificate, moved=certificate.moved / unit))
            done += len(part)
            bar.advance(len(part))
    assert images is not None  # there is at least one
    return Polished(images, Certificate.joined(certificates))


def can_polish(rule: Constraint) -> bool:
    """Whether the nearest image is known exactly: by the rule itself or by its equations, and not by ℓ alone."""
    rule = rule.inner if isinstance(rule, Scaled) else rule
    return Equations.of(rule, (None, None)) is not None or type(rule).nearest is not Constraint.nearest


def _polish_batch(x: Tensor, wide: WideRule, scale: Tensor, bounds: Bounds, floor: float) -> tuple[Tensor, Certificate]:
    """One batch, (B, C, H, W), and its certificate."""
    before, start = wide.distance(x), wide.widen(x).clone()
    rule, s = wide.rule, scale.to(start.dtype)
    steps, met, stuck = np.ones(len(x)), np.zeros(len(x), dtype=bool), np.zeros(len(x), dtype=bool)
    with full_precision(start):
        free = bounds == (None, None) and bool((s > 0).all())
        method, found = "closed form", rule.nearest(start, s) if free else None
        if found is None and (equations := Equations.of(rule, bounds)) is not None:
            precision = max(torch.finfo(x.dtype).eps / 100, 2 * torch.finfo(start.dtype).eps)
            method, solution = "Gauss-Newton", gauss_newton(start, equations, s, precision)
            found, steps, met, stuck = solution.images, solution.steps, solution.met, solution.contradicting
        elif found is None:
            method, (found, steps) = "Polyak", polyak(start, rule, s, bounds, floor)
    if found.shape != start.shape:
        shapes = f"{tuple(found.shape)} for images {tuple(start.shape)}"
        raise ConstraintError(f"`nearest` of {rule.name} must return images of the same shape; it returned {shapes}.")
    finite = torch.isfinite(found).flatten(1).all(1)
    found = torch.where(finite[:, None, None, None], found, start)
    if bounds != (None, None):
        found = torch.where(s > 0, found.clamp(*bounds), found)
    image, after = _rounded(found, x.dtype, wide)
    moved = torch.where(s > 0, (image.to(start.dtype) - start) / torch.where(s > 0, s, 1.0), 0.0)
    rms = moved.square().flatten(1).mean(1).sqrt().cpu().double().numpy()
    certificate = Certificate(wide.narrow.name, method, floor, before, after, rms, steps, wide.rounding(image))
    finite = finite.cpu().numpy() & np.isfinite(before)
    off = ~certificate.reached & (after > EXACT * before)
    disagree = off & met & (after > DISAGREES * before)
    wrong = {
        NOT_FINITE: ~certificate.reached & ~finite,
        CONTRADICTION: off & finite & stuck,
        DISAGREEMENT: disagree & finite,
        ONLY_DISTANCE if method == "Polyak" else UNFINISHED: off & finite & ~stuck & ~disagree,
    }
    return image, replace(certificate, notes=(*wide.notes, *(note for note, images in wrong.items() if images.any())))


def _rounded(found: Tensor, dtype: torch.dtype, wide: WideRule) -> tuple[Tensor, np.ndarray]:
    """Images in their own type, each pixel the nearest value or, where ℓ is then less, up or down at random; and ℓ.

    Pixels that all move by the same amount are also rounded by the same, and in a sum such errors add up. At random,
    with a mean of 0, they do not.
    """
    near = found.to(dtype)
    distance = wide.distance(near)
    error = found - near.to(found.dtype)
    if not error.any():
        return near, distance
    other = torch.nextafter(near, torch.where(error > 0, torch.inf, -torch.inf).to(dtype))
    draws = torch.rand(found.shape[1:], generator=generator(0, "rounded"), dtype=torch.float64).to(found)
    at_random = torch.where(draws * (other - near).abs() < error.abs(), other, near)
    other_distance = wide.distance(at_random)
    better = torch.from_numpy(other_distance < distance).to(near.device)[:, None, None, None]
    return torch.where(better, at_random, near), np.fmin(distance, other_distance)


def pixel_scale(
    scale: float | Sequence[float] | Tensor | None, frozen: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    """s of every pixel, (1, C, H, W) in float64, 0 where it is frozen."""
    try:
        s = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64).cpu()
        s = s.reshape(-1, 1, 1) if s.ndim == 1 else s
        s = s.expand(1, *shape).clone()
        if frozen is not None:
            s[torch.as_tensor(frozen).cpu().bool().expand(1, *shape)] = 0.0
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"scale and frozen must be numbers that broadcast to one image, {shape}, the same for all images: {error}."
        ) from error
    if not (torch.isfinite(s).all() and (s >= 0).all() and (s > 0).any()):
        raise UsageError("scale must be finite and not negative, and some pixel must be free to move.")
    return s


def _checked_bounds(bounds: Bounds | None) -> Bounds:
    """Both ends, None where there is none."""
    try:
        low, high = (-math.inf, math.inf) if bounds is None else bounds
        low, high = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"bounds must be two numbers (low, high), None where there is none, not {str(bounds)[:80]}."
        ) from error
    if not (low < high and low < math.inf and high > -math.inf):
        raise UsageError(f"bounds must be (low, high) with low < high, not {bounds}.")
    return (None if low == -math.inf else low), (None if high == math.inf else high)
