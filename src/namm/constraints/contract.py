"""What a constraint promises, and the measurement that holds it to the promise.

A constraint maps images x: (B, C, H, W) to ℓ(x): (B,). Its contract: a floating-point tensor of that shape,
finite, ℓ ≥ 0, differentiable in x with finite gradients, and ℓ of one image does not depend on the others in
the batch.

`require_images` and `require_per_image` look at types and shapes only, so they cost nothing and compile.
`examine` looks at values: it measures the data's own *floor*, the distance that real data keep because of
rounding or discretisation, and compares it with that of the same data after Gaussian noise has been added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from namm.errors import ConstraintError, DataError, UsageError
from namm.formatting import html_table
from namm.numerics import at_least_float32, generator

if TYPE_CHECKING:
    from namm.constraints.base import Constraint

PROBES = 8  # images evaluated one by one, to see whether ℓ of one depends on the others
COUPLING = 1e-2  # change of ℓ, alone against in a batch, that reduced-precision kernels may cause
ROUNDING = 1e-6  # relative spread below which float32 data are constant
AUDIBLE = 0.1  # noise, in data standard deviations, that lifts ℓ of the probes above rounding
LOUD = 10.0  # noise, in data standard deviations, at which a constraint that is zero nearby must show itself
NOISES = (1e-4, 10.0)  # σ_max, in data standard deviations, beyond which a map has nothing, or too much, to undo
COSTS = (1e-4, 1e5)  # λ·ℓ(x + σ_max z) in σ_max, beyond which a map ignores the rule, or all but the rule


@dataclass(frozen=True)
class ConstraintReport:
    """What `Constraint.check` measured. Distances are ℓ, one value per image.

    Attributes:
        name: the constraint.
        n: number of images.
        mean: mean ℓ over the data: the floor. No generator needs to go below it.
        std: standard deviation of ℓ over the images.
        max: largest ℓ.
        worst: index of the image with the largest ℓ.
        noise: standard deviation of the added noise, in units of the data's standard deviation.
        noisy_mean: mean ℓ of the data with that noise added.
        gradient_norm: mean over images of ‖∂ℓ/∂x‖₂ at the noisy data.
    """

    RATIO: ClassVar[str] = "floor / noisy: 0 obeys the rule, 1 ignores it"

    name: str
    n: int
    mean: float
    std: float
    max: float
    worst: int
    noise: float
    noisy_mean: float
    gradient_norm: float

    @property
    def floor_ratio(self) -> float:
        """Floor over noisy distance: near 0 the data obey the constraint, at 1 noise changes nothing."""
        if self.noisy_mean == 0:
            return 0.0 if self.mean == 0 else math.inf
        return self.mean / self.noisy_mean

    def require_obeyed(self, limit: float = 0.1) -> ConstraintReport:
        """The report itself where `floor_ratio` ≤ `limit`; else a `DataError`: the data break the rule."""
        if self.floor_ratio <= limit:
            return self
        raise DataError(
            f"the data break the constraint {self.name}: mean distance {self.mean:.3g} over {self.n} images, "
            f"largest {self.max:.3g} at image {self.worst}. The mean is {self.floor_ratio:.3g} times the "
            f"distance {self.noisy_mean:.3g} of the same data with noise of {self.noise:g} standard "
            f"deviations (limit {limit:g}). Check the constraint's parameters, units and orientation against "
            "the data, or remove the images that break it."
        )

    def require_active(self) -> ConstraintReport:
        """The report itself where ℓ notices the noise; else a `ConstraintError`: there is nothing to learn from ℓ."""
        if self.noisy_mean > 0:
            return self
        raise ConstraintError(
            f"the constraint {self.name} is inactive: its mean distance is {self.mean:.3g} on the data and 0 with "
            f"noise of {self.noise:.3g} data standard deviations, so a map trained with such noise learns nothing of "
            "it. Check its thresholds and units against the data, or take more noise: map.sigma_max of a run, the "
            "argument noise of train_map, --noise of `namm check`."
        )

    def __str__(self) -> str:
        inactive = "; inactive at this noise, check with more" if self.noisy_mean == 0 else ""
        return (
            f"{self.name} on {self.n} images\n"
            f"  floor     mean {self.mean:.3g}, std {self.std:.3g}, max {self.max:.3g} at image {self.worst}\n"
            f"  noisy     mean {self.noisy_mean:.3g} with noise of {self.noise:g} data std{inactive}\n"
            f"  ratio     {self.floor_ratio:.3g} ({self.RATIO})\n"
            f"  gradient  mean norm {self.gradient_norm:.3g} at the noisy data"
        )

    def _repr_html_(self) -> str:
        rows = {
            "floor: mean ℓ": self.mean,
            "std": self.std,
            f"max (image {self.worst})": self.max,
            f"mean ℓ with noise of {self.noise:g} data std": self.noisy_mean,
            "floor / noisy": self.floor_ratio,
            "mean gradient norm, noisy": self.gradient_norm,
        }
        return html_table(f"{self.name} on {self.n} images", rows.items())


@runtime_checkable
class StoredImages(Protocol):
    """Images (N, C, H, W) that are read from a file slice by slice, such as `namm.datasets.LazyImages`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Tensor: ...

    def pieces(self) -> list[slice]:
        """Slices that cover all of them, each small enough for memory."""


def finite_number(value: object) -> float | None:
    """`value` as a float, or None if it is not a finite real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return float(value) if math.isfinite(value) else None


def is_device_mismatch(error: RuntimeError) -> bool:
    """Whether torch says that tensors of one operation are on different devices, which it does in several ways."""
    text = str(error)
    by_type = "torch.cuda" in text and "should be the same" in text  # convolutions; of other types it says no more
    return by_type or "same device" in text or "expected device" in text


def require_images(x: object, rule: Constraint) -> Tensor:
    """`x` itself if it is a floating-point tensor (B, C, H, W)."""
    if not isinstance(x, Tensor):
        raise DataError(f"{rule.name} needs a torch tensor (B, C, H, W), got {type(x).__name__}; convert it first.")
    if x.ndim != 4:
        raise DataError(
            f"{rule.name} needs images of shape (B, C, H, W), got shape {tuple(x.shape)}; "
            "add the missing axis with x.unsqueeze(0) for one image or x.unsqueeze(1) for one channel."
        )
    if not x.is_floating_point():
        raise DataError(f"{rule.name} needs floating-point images, got {x.dtype}; convert them with x.float().")
    return x


def require_per_image(value: object, x: Tensor, rule: Constraint) -> Tensor:
    """`value` itself if it is a floating-point tensor with one entry per image of `x`."""
    if not isinstance(value, Tensor):
        raise ConstraintError(
            f"{rule.name} returned {type(value).__name__}, not a tensor: distance(x) must return "
            "one value per image, shape (B,); drop .item(), float() and numpy."
        )
    if value.shape != x.shape[:1]:
        raise ConstraintError(
            f"{rule.name} returned shape {tuple(value.shape)} for {x.shape[0]} images, expected "
            f"({x.shape[0]},): reduce over every axis but the first, for example with .flatten(1).mean(1)."
        )
    if not value.is_floating_point():
        raise ConstraintError(
            f"{rule.name} returned {value.dtype}, not a floating-point distance: counts and comparisons "
            "carry no gradient; return how far x is from obeying, as a real number."
        )
    return value


def examine(rule: Constraint, x: Tensor | StoredImages, *, batch_size: int, noise: float) -> ConstraintReport:
    """Measure `rule` on images x: (N, C, H, W), as `Constraint.check` describes."""
    if batch_size < 1 or not (0 < noise < math.inf):
        raise UsageError(f"check needs batch_size ≥ 1 and a finite noise > 0, got {batch_size} and {noise}.")
    if isinstance(x, Tensor) or not isinstance(x, StoredImages):
        x = require_images(x, rule).detach()
    if len(x) == 0:
        raise DataError(f"{rule.name} cannot be checked on an empty batch, got shape {tuple(x[:0].shape)}.")
    with torch.inference_mode(False):  # gradients are on inside, whatever the caller has switched off
        scale, device = _data_std(x, batch_size), _device(rule, x[:1])
        measured = []  # ℓ and ‖∂ℓ/∂x‖ of the data, and of the noisy data
        for start, rows in _batches(x, batch_size):
            batch = rows.to(device)
            noisy, place = _add_noise(batch, start, noise * scale), f"with noise of {noise:g} data standard deviations"
            clean = _measure(rule, batch, start, "the data")
            measured.append((*clean, *_measure(rule, noisy, start, f"the data {place}")))
        floor, _, distance, slope = (torch.cat(part) for part in zip(*measured, strict=True))
        probe = (x[:PROBES] if len(x) > 1 else x[:1].repeat(2, 1, 1, 1)).to(device)
        _require_independence(rule, _add_noise(at_least_float32(probe), 0, max(noise, AUDIBLE) * scale))
        if not slope.any():
            _refuse_flat(rule, probe, distance, scale)
    return ConstraintReport(
        name=rule.name,
        n=len(x),
        mean=floor.mean().item(),
        std=floor.std(correction=0).item(),
        max=floor.max().item(),
        worst=int(floor.argmax()),
        noise=noise,
        noisy_mean=distance.mean().item(),
        gradient_norm=slope.mean().item(),
    )


def check_at(rule: Constraint, x: Tensor, sigma: float) -> ConstraintReport:
    """`rule.check(x)` with noise of standard deviation `sigma` in the units of the images x (N, C, H, W)."""
    return rule.check(x, noise=sigma / _data_std(require_images(x, rule).detach(), len(x)))


def unusual(report: ConstraintReport, sigma: float, weight: float) -> list[str]:
    """Sentences on σ_max = `sigma` and λ = `weight` that a map can hardly learn with; none where they are usual.

    `report` is the check of the rule with noise of that σ_max.
    """
    sentences, std = [], sigma / report.noise
    if not NOISES[0] <= report.noise <= NOISES[1]:
        effect = "drowns the images" if report.noise > 1 else "is too little to learn anything from"
        sentences.append(
            f"σ_max = {sigma:g} is {report.noise:.2g} standard deviations of the images ({std:.2g}), which {effect}: "
            f"0.02 to 3 are usual, here {0.02 * std:.2g} to {3 * std:.2g} (map.sigma_max)."
        )
    cost = weight * report.noisy_mean / sigma
    if weight > 0 and not COSTS[0] <= cost <= COSTS[1]:
        effect = "all but the rule" if cost > 1 else "the rule"
        sentences.append(
            f"λ = {weight:g} makes λ·ℓ of images with noise of σ_max = {sigma:g} {cost:.2g} times σ_max, and the map "
            f"will ignore {effect}: 1 to 40 is usual, and λ = {10 * sigma / report.noisy_mean:.2g} gives 10 "
            "(map.weights.constraint)."
        )
    return sentences


def _device(rule: Constraint, x: Tensor) -> torch.device:
    """Device of the rule; one without weights and buffers is where the images are."""
    return next(chain(rule.parameters(), rule.buffers()), x).device


def _batches(x: Tensor | StoredImages, batch_size: int) -> Iterator[tuple[int, Tensor]]:
    """Index of the first image, and up to `batch_size` images in float32 or better."""
    for start in range(0, len(x), batch_size):
        yield start, at_least_float32(x[start : start + batch_size])


def _data_std(x: Tensor | StoredImages, batch_size: int) -> float:
    """Standard deviation of all pixels, by the law of total variance; refuses NaN and inf.

    Constant data have none beyond rounding: their level, or 1 where that is zero, takes its place.
    """
    moments = []
    for start, batch in _batches(x, batch_size):
        if not (finite := batch.isfinite()).all():
            where = [int(i) for i in (~finite).nonzero()[0]]
            raise DataError(
                f"the images hold {batch[tuple(where)].item()} at image {start + where[0]}, (channel, row, "
                f"column) {tuple(where[1:])}; remove or repair that image."
            )
        moments.append(torch.stack(torch.var_mean(batch.flatten(1), dim=1, correction=0)).cpu().double())
    variance, mean = torch.cat(moments, dim=1)
    spread, level = math.sqrt(variance.mean() + mean.var(correction=0)), float(mean.abs().max())
    return spread if spread > ROUNDING * level else level or 1.0


def _add_noise(batch: Tensor, start: int, std: float) -> Tensor:
    """The batch plus Gaussian noise; image i's noise depends on i alone, not on how the data were batched."""
    streams = (generator(0, "constraint check", start + i) for i in range(len(batch)))
    draws = [torch.randn(batch.shape[1:], generator=stream) for stream in streams]
    return batch + std * torch.stack(draws).to(batch)


def _measure(rule: Constraint, batch: Tensor, start: int, place: str) -> tuple[Tensor, Tensor]:
    """ℓ and ‖∂ℓ/∂x‖₂ of each image, (B,) each in float64 on the CPU; refuses what breaks the contract."""
    value, gradient = _distance_and_gradient(rule, batch.clone().requires_grad_())
    if (i := _first(~value.isfinite())) is not None:
        raise ConstraintError(
            f"{rule.name} is {value[i].item()} at image {start + i} of {place}: the distance must be finite "
            "on any image; guard divisions, logarithms, powers and roots, and scale images whose values are far from 1."
        )
    if (value < 0).any():
        i = int(value.argmin())
        raise ConstraintError(
            f"{rule.name} is negative, {value[i].item():.6g} at image {start + i} of {place}: a distance is "
            "≥ 0 and zero where the rule holds; return the absolute value or the square of a signed residual."
        )
    if gradient is None:
        raise ConstraintError(
            f"{rule.name} gives no gradient: its value does not depend differentiably on x. Compute it from "
            "x with torch operations, without detach, numpy, .item() or torch.no_grad."
        )
    # In float64: float32 loses the squares of very large and very small gradients.
    norm = torch.linalg.vector_norm(gradient.flatten(1).cpu(), dim=1, dtype=torch.float64)
    if (i := _first(~norm.isfinite())) is not None:
        raise ConstraintError(
            f"{rule.name} has a gradient that is not finite at image {start + i} of {place}, where the "
            f"distance is {value[i].item():.6g}: a square root or a norm at zero does that; use a mean of "
            "absolute values, or √(r² + ε²) − ε with a small ε."
        )
    return value.cpu().double(), norm


def _first(mask: Tensor) -> int | None:
    """Index of the first True of (B,), if there is one."""
    return int(mask.nonzero()[0]) if mask.any() else None


def _distance_and_gradient(rule: Constraint, leaf: Tensor) -> tuple[Tensor, Tensor | None]:
    """ℓ(leaf): (B,) and ∂Σℓ/∂leaf, or None where autograd finds no path from one to the other."""
    try:
        value = rule(leaf)
        if not value.requires_grad:
            return value, None
        (gradient,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True)
        return value.detach(), gradient
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        with torch.no_grad():
            rule(leaf.detach().clone())  # fails again, by itself, unless differentiation is what went wrong
        raise ConstraintError(
            f"{rule.name} gives no gradient: it can be evaluated but not differentiated ({error}). Compute "
            "it from x with torch operations, without numpy and without changing x in place."
        ) from error


def _require_independence(rule: Constraint, batch: Tensor) -> None:
    """Refuse a distance whose value for one image depends on the others: alone and together must agree."""
    with torch.no_grad():
        together = rule(batch.clone())
        alone = torch.cat([rule(image.clone()) for image in batch.split(1)])
    allowed = COUPLING * torch.maximum(together, together.mean())
    if (i := _first(~((alone - together).abs() <= allowed))) is not None:
        raise ConstraintError(
            f"{rule.name} mixes the images of a batch: noisy image {i} has distance {alone[i].item():.6g} "
            f"alone and {together[i].item():.6g} in a batch of {len(batch)}. Reduce over channels, rows and "
            "columns only; put networks with batch normalisation or dropout in eval mode."
        )


def _refuse_flat(rule: Constraint, probe: Tensor, distance: Tensor, scale: float) -> None:
    """Refuse a gradient that is zero on all noisy data, unless the constraint is inactive at this noise."""
    if (distance > 0).any():
        raise ConstraintError(
            f"{rule.name} has zero gradient on all noisy images although its mean distance there is "
            f"{distance.mean().item():.3g}: round, floor, sign, argmax and comparisons are flat; measure how "
            "far x is from obeying without them."
        )
    _, slope = _measure(rule, _add_noise(at_least_float32(probe), 0, LOUD * scale), 0, "strongly noisy data")
    if not slope.any():
        raise ConstraintError(
            f"{rule.name} is flat on the data, and even with noise of {LOUD:g} data standard deviations: it "
            "restricts nothing; check its formula and thresholds."
        )
