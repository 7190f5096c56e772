"""Whether samples keep the rule, and what they paid for it.

ℓ alone proves nothing: a constant image satisfies most rules. Beside the distances of samples x̂, `compare` therefore
sets three figures that expose a generator which keeps the rule by making less than the data hold:

    √MMD²              to held-out data, mean ± std over random subsets; `namm.evaluation.mmd`
    total variation    mean over x̂ of TV, over that of the data; below 1: smoothed, above 1: noisy
    spread             mean over pixels of the std over samples, over the data's; below 1: less varied, 0: collapsed

with TV(x) = mean |x[i, j+1] − x[i, j]| + mean |x[i+1, j] − x[i, j]|. None has a meaning without its *floor*, the same
figures between two disjoint sets of real data, which `floor` measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.datasets.batches import Images, check_images
from namm.errors import ConstraintError
from namm.evaluation.mmd import (
    Device,
    Estimate,
    Subset,
    mmd,
    mmd_error,
    mmd_floor,
    random_rows,
    read,
    require_comparable,
    require_size,
    wide,
)
from namm.formatting import format_estimate, html_table

BATCH = 256
"""Images measured at a time."""
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class DistanceSummary:
    """ℓ over a set of images.

    Attributes:
        n: number of images.
        mean, std: mean and standard deviation of ℓ over the images.
        quantiles: the levels 0.05, 0.25, 0.5, 0.75 and 0.95 of ℓ.
        max: largest ℓ.
        worst: index of the image with the largest ℓ.
    """

    n: int
    mean: float
    std: float
    quantiles: tuple[float, ...]
    max: float
    worst: int

    @property
    def median(self) -> float:
        """ℓ of the middle image."""
        return self.quantiles[2]

    def cd(self, weight: float) -> float:
        """CD = 100·λ·ℓ, as the paper reports it, with `weight` λ."""
        return 100 * weight * self.mean

    def _repr_html_(self) -> str:
        mean = format_estimate(self.mean, self.std)
        rows = {"mean ± std": mean, "median": self.median, f"max (image {self.worst})": self.max}
        return html_table(f"ℓ of {self.n} images", rows.items())


@dataclass(frozen=True)
class Scores:
    """Samples against data.

    Attributes:
        distance: ℓ of the samples.
        mmd: √MMD², mean and standard deviation over the subsets.
        total_variation: mean TV of the samples over that of the data.
        spread: mean over pixels of the standard deviation over samples, over that of the data.
        mmd_error: bootstrap standard error of √MMD².
    """

    distance: DistanceSummary
    mmd: Estimate
    total_variation: float
    spread: float
    mmd_error: float

    def _repr_html_(self) -> str:
        rows = {
            "mean ℓ": self.distance.mean,
            "largest ℓ": self.distance.max,
            "√MMD²": format_estimate(*self.mmd),
            "total variation / data's": self.total_variation,
            "spread / data's": self.spread,
        }
        return html_table(f"{self.distance.n} samples against data", rows.items())


@dataclass(frozen=True)
class Milestone:
    """ℓ of samples of a model that is not trained to its end.

    Attributes:
        step: of the training.
        compute_seconds: spent until then, all that came before the training included.
        mean, std: of ℓ over the samples.
        n: samples.
    """

    step: int
    compute_seconds: float
    mean: float
    std: float
    n: int


def half_way(milestones: Sequence[Milestone]) -> Milestone | None:
    """The one in the middle of a training, of which the last is the end; none if it was not measured."""
    return next((each for each in milestones if abs(2 * each.step - milestones[-1].step) <= 1), None)


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbours, along rows plus along columns: (B, C, H, W) → (B,)."""
    along = [x.diff(dim=axis).abs().flatten(1).mean(1) for axis in (-1, -2) if x.shape[axis] > 1]
    return torch.stack(along).sum(0) if along else x.new_zeros(len(x))


def distance_summary(
    constraint: Constraint, images: Images, *, batch_size: int = BATCH, device: Device | None = None
) -> DistanceSummary:
    """ℓ of every image (N, C, H, W), read `batch_size` at a time, in figures.

    Raises:
        DataError: not a set of images, or one holds NaN or inf.
        ConstraintError: ℓ of a finite image is not finite.
    """
    return measure_images(images, constraint, batch_size=batch_size, device=device).distance


def compare(
    samples: Images,
    reference: Images,
    constraint: Constraint,
    *,
    subsets: int = 50,
    size: int = 1000,
    seed: int = 0,
    batch_size: int = BATCH,
    device: Device | None = None,
) -> Scores:
    """Samples (N, C, H, W) against data that no training has seen (M, C, H, W).

    Args:
        samples: what a generator made.
        reference: held-out data; the kernel of the √MMD² takes its width from these.
        constraint: the rule that both should keep.
        subsets: pairs of random subsets for √MMD².
        size: images in a subset; compare √MMD² of equal sizes only.
        seed: decides which images are in the subsets.
        batch_size: images measured at a time.
        device: where to compute; where the images are by default.

    Raises:
        DataError: shapes differ, NaN or inf in an image, or fewer images than `size`.
    """
    check_images(samples, "samples")
    check_images(reference, "reference")
    require_comparable(samples, reference, ("samples", "reference images"))
    require_size(samples.shape[0], size, "samples")
    require_size(reference.shape[0], size, "reference images")
    options: Any = {"batch_size": batch_size, "device": device}
    generated = measure_images(samples, constraint, name="samples", **options)
    real = measure_images(reference, name="reference images", **options)
    estimate = mmd(reference, samples, subsets=subsets, size=size, seed=seed, device=device)
    error = mmd_error(reference, samples, seed=seed, device=device)
    return Scores(generated.distance, estimate, *generated.against(real), error)


def floor(
    reference: Images,
    constraint: Constraint,
    *,
    subsets: int = 50,
    size: int = 1000,
    seed: int = 0,
    batch_size: int = BATCH,
    device: Device | None = None,
) -> Scores:
    """`compare` between two sets of real data: what samples as good as data would score.

    The data (M, C, H, W) are divided at random in two for all figures but √MMD², whose pairs of disjoint subsets are
    drawn anew from all of them. Arguments as for `compare`; M ≥ 2·`size`.
    """
    check_images(reference, "reference")
    n = reference.shape[0]
    require_size(n // 2, size, "images, half of the reference")
    rows = random_rows(n, n // 2, seed, "floor")
    first, second = Subset(reference, rows), Subset(reference, np.delete(np.arange(n), rows))
    options: Any = {"name": "reference images", "batch_size": batch_size, "device": device}
    one, other = measure_images(first, constraint, **options), measure_images(second, **options)
    estimate = mmd_floor(reference, subsets=subsets, size=size, seed=seed, device=device)
    return Scores(one.distance, estimate, *one.against(other), mmd_error(second, first, seed=seed, device=device))


@dataclass(frozen=True)
class Measured:
    """One set of images by itself.

    Attributes:
        distances: ℓ of every image (N,), empty where no rule was given.
        variation: mean total variation.
        spread: mean over pixels of the standard deviation over images.
    """

    distances: Tensor
    variation: float
    spread: float

    def against(self, data: "Measured") -> tuple[float, float]:
        """Total variation and spread over those of the data."""
        return ratio(self.variation, data.variation), ratio(self.spread, data.spread)

    @property
    def distance(self) -> DistanceSummary:
        """ℓ in figures."""
        values = self.distances
        quantiles, worst = tuple(np.quantile(values.numpy(), LEVELS).tolist()), int(values.argmax())
        std = float(values.std()) if len(values) > 1 else 0.0
        return DistanceSummary(len(values), float(values.mean()), std, quantiles, float(values[worst]), worst)


@torch.no_grad()
def measure_images(
    images: Images,
    constraint: Constraint | None = None,
    *,
    name: str = "images",
    batch_size: int = BATCH,
    device: Device | None = None,
) -> Measured:
    """One pass: ℓ, total variation, and mean and variance of every pixel, merged chunk by chunk (Chan et al. 1979)."""
    check_images(images, name)
    distances, variation, n = [], 0.0, 0
    mean = squares = torch.zeros((), dtype=torch.float64)
    for start in range(0, images.shape[0], batch_size):
        x = read(images, slice(start, start + batch_size), name).to(device)
        if constraint is not None:
            distances.append(_distances(constraint(x), start, name, constraint))
        variation += float(total_variation(x).cpu().double().sum())
        pixels = wide(x)
        chunk, count = pixels.mean(0), n + len(x)
        step = chunk - mean.to(chunk)
        squares = squares.to(chunk) + (pixels - chunk).square().sum(0) + step.square() * (n * len(x) / count)
        mean, n = mean.to(chunk) + step * (len(x) / count), count
    spread = float((squares / max(n - 1, 1)).sqrt().mean())
    return Measured(torch.cat(distances) if distances else torch.empty(0), variation / n, spread)


def _distances(distance: Tensor, start: int, name: str, constraint: Constraint) -> Tensor:
    """ℓ (B,) in float64 on the CPU, refused where it is negative or not finite."""
    values = distance.cpu().double()
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        raise ConstraintError(
            f"{constraint.name} of image {start + int(bad[0])} of the {name} is {float(values[bad[0, 0]])}, although "
            "the image is finite: the distance overflows there; exclude these images and report how many, or fix the "
            "distance."
        )
    if (values < 0).any():
        raise ConstraintError(
            f"{constraint.name} of image {start + int(values.argmin())} of the {name} is {float(values.min()):.3g}, "
            "below 0: means of it say nothing. Take the absolute value, or the square, of what must vanish."
        )
    return values


def ratio(a: float, b: float) -> float:
    """a / b; finite even for data without any content."""
    return a / max(b, 1e-12)
