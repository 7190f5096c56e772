"""Maximum mean discrepancy: how far two sets of images are apart, without any network.

With the Gaussian kernel k(a, b) = exp(−‖a − b‖² / 2σ²) on flattened images, X of m true images and Y of n others,

    MMD² = mean k(x, x′) + mean k(y, y′) − 2 mean k(x, y).

*Biased* (the V-statistic, what the paper reports the root of): all pairs count, also an image with itself, so that
MMD² ≥ 0, and ≈ (2 − 2 E k)/n for two samples of one distribution. *Unbiased* (the U-statistic): pairs i ≠ j only; its
mean over samples of one distribution is 0, and it may be negative.

σ² is half the median of ‖xᵢ − xⱼ‖² over the pairs i < j of the *true* set (the first argument), so k = exp(−d²/median).

**Standard error under the null.** If both samples have one distribution, the unbiased MMD² has mean 0 and variance

    V = (2/(m(m−1)) + 2/(n(n−1)) + 4/(mn)) · E k̃(z, z′)²

(Gretton et al. 2012, App. B, for m = n), where k̃ is the kernel centred in feature space. E k̃² is the Hilbert–Schmidt
norm of the covariance; from the N = m + n pooled images and the zero-diagonal kernel matrix K it is estimated without
bias (Song et al. 2012) by

    (Σ K² + (ΣK)²/((N−1)(N−2)) − 2 Σᵢ(Σⱼ Kᵢⱼ)²/(N−2)) / (N(N−3)).

This needs one pass over the pairs and no stored matrix, is deterministic, and agrees with the spread over permutations
of the pooled sample, which would need the matrix (1.6 GB for 2 · 10 000 images) or as many passes as permutations.

Cost: pairs come in blocks of 1024 × 1024 by matrix products on centred images, sums are in float64. Memory beyond the
images is a few blocks, and 4 bytes a pair for the exact median, which is why a set of more than 10 000 gives its σ
from 10 000 of its images, drawn with a fixed seed.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from namm.datasets.batches import Images
from namm.errors import DataError, UsageError
from namm.evaluation.rows import View, held, random_rows, read, require_comparable, require_size, wide
from namm.numerics import fold

BLOCK = 1024
"""Images along each side of a block of pairs."""
MEDIAN_IMAGES = 10_000
"""Up to so many images the median is over all pairs; beyond, over the pairs of so many of them."""
BOOTSTRAP_IMAGES = 1000
"""Images of either set that `mmd_error` draws from."""
ROUNDING = 1e-12
"""E k̃² of a kernel ≤ 1 that cannot be told from 0."""
Device = torch.device | str
NAMES = ("true images", "samples")


class Estimate(NamedTuple):
    """Mean and standard deviation over random subsets; `float(estimate)` is the mean."""

    mean: float
    std: float

    def __float__(self) -> float:
        return self.mean


class Null(NamedTuple):
    """An unbiased MMD² and its standard deviation if both samples had one distribution."""

    mmd2: float
    standard_error: float

    @property
    def z(self) -> float:
        """MMD² in standard errors.

        Under the null, mean 0 and variance 1; distributed as a weighted sum of centred χ² variables. Between normal,
        which passes 3 in 0.1 % of all cases, and one χ²₁, which does in 2.2 % and never falls below −0.71.
        """
        return self.mmd2 / self.standard_error


def mmd2(
    x: Images, y: Images, *, unbiased: bool = False, bandwidth: float | None = None, device: Device | None = None
) -> float:
    """MMD² between the true images x (m, …) and the samples y (n, …).

    Args:
        x: tensor, array or images on disk, of any shape after the first axis; σ comes from these.
        y: images of the same shape.
        unbiased: leave out the pairs of an image with itself.
        bandwidth: σ; `median_bandwidth(x)` by default.
        device: where to compute; where x is by default.

    Raises:
        DataError: shapes differ, an image is not finite, or x has no σ.
    """
    require_comparable(x, y, NAMES)
    pairs = _Pairs(x, y, bandwidth, device)
    m, n = x.shape[0], y.shape[0]
    (xx, _), (yy, _), (xy, _, _) = pairs.within(0), pairs.within(1), pairs.between()
    return _mmd2(float(xx.sum()), float(yy.sum()), float(xy.sum()), m, n, unbiased)


def mmd(
    x: Images,
    y: Images,
    *,
    subsets: int = 50,
    size: int = 1000,
    seed: int = 0,
    bandwidth: float | None = None,
    device: Device | None = None,
) -> Estimate:
    """√MMD² (biased) between random subsets of true images x (m, …) and samples y (n, …), as the paper reports it.

    Args:
        x: true images; σ comes from each of its subsets.
        y: samples of the same shape.
        subsets: how many pairs of subsets.
        size: images in a subset, drawn without repetition. The biased value depends on it: compare equal sizes only.
        seed: decides which images.
        bandwidth: one σ for all subsets instead.
        device: where to compute; where x is by default.

    Raises:
        DataError: as `mmd2`, or a set is smaller than `size`.
    """
    require_comparable(x, y, NAMES)
    if subsets < 1:
        raise UsageError(f"mmd needs at least one subset, got {subsets}.")
    for images, name in zip((x, y), NAMES, strict=True):
        require_size(images.shape[0], size, name)
    x, y, values = held(x), held(y), []
    for k in range(subsets):
        parts = (View(s, random_rows(s.shape[0], size, seed, "mmd", name, k)) for s, name in ((x, "x"), (y, "y")))
        values.append(math.sqrt(mmd2(*parts, bandwidth=bandwidth, device=device)))
    return Estimate(float(np.mean(values)), float(np.std(values)))


def mmd_floor(
    x: Images, *, subsets: int = 50, size: int = 1000, seed: int = 0, device: Device | None = None
) -> Estimate:
    """`mmd` between disjoint random subsets of one set x (m ≥ 2·`size`, …): what samples as good as data would score.

    Each pair of subsets is drawn anew from all of x, so that no chance division of x in two is in every one of them.
    """
    require_comparable(x, x, (NAMES[0], NAMES[0]))
    require_size(x.shape[0] // 2, size, "images, half of the true ones")
    if subsets < 1:
        raise UsageError(f"mmd_floor needs at least one subset, got {subsets}.")
    x, values = held(x), []
    for k in range(subsets):
        rows = random_rows(x.shape[0], 2 * size, seed, "mmd floor", k)
        half = random_rows(2 * size, size, seed, "mmd half", k)
        parts = View(x, rows[half]), View(x, np.delete(rows, half))
        values.append(math.sqrt(mmd2(*parts, device=device)))
    return Estimate(float(np.mean(values)), float(np.std(values)))


def mmd_error(x: Images, y: Images, *, replicates: int = 200, seed: int = 0, device: Device | None = None) -> float:
    """Bootstrap standard error of `mmd` between true images x (m, …) and samples y (n, …).

    Images are drawn again with repetition, `replicates` times: as weights a and b on the kernel matrices of up to 1000
    of each, √(aᵀ Kxx a + bᵀ Kyy b − 2 aᵀ Kxy b). Where there are more, the error is less by the root of their number.
    """
    require_comparable(x, y, NAMES)
    used = min(x.shape[0], y.shape[0], BOOTSTRAP_IMAGES)
    parts = [View(s, random_rows(s.shape[0], used, seed, "mmd error", k)) for k, s in enumerate((x, y))]
    xx, yy, xy = _Pairs(parts[0], parts[1], None, device).matrices()
    rng = np.random.default_rng(fold(seed, "bootstrap"))
    a, b = (torch.from_numpy(rng.multinomial(used, np.full(used, 1 / used), replicates) / used) for _ in parts)
    squares = ((a @ xx) * a + (b @ yy) * b - 2 * (a @ xy) * b).sum(1)
    scale = math.sqrt(used / min(x.shape[0], y.shape[0]))
    return float(squares.clamp(min=0).sqrt().std()) * scale


def mmd2_null(x: Images, y: Images, *, bandwidth: float | None = None, device: Device | None = None) -> Null:
    """Unbiased MMD² between x (m, …) and y (n, …), and its standard error if they had one distribution.

    "No difference seen" is `abs(mmd2_null(x, y).z) < 3`. Arguments and errors as for `mmd2`; at least four images.
    """
    require_comparable(x, y, NAMES)
    pairs = _Pairs(x, y, bandwidth, device)
    m, n = x.shape[0], y.shape[0]
    (xx, xx2), (yy, yy2), (xy, yx, xy2) = pairs.within(0), pairs.within(1), pairs.between()
    value = _mmd2(float(xx.sum()), float(yy.sum()), float(xy.sum()), m, n, unbiased=True)

    rows = torch.cat([xx + xy, yy + yx])  # Σⱼ Kᵢⱼ of the pooled sample
    total, squares, count = float(rows.sum()), xx2 + yy2 + 2 * xy2, m + n
    norm = squares + total**2 / ((count - 1) * (count - 2)) - 2 * float(rows.square().sum()) / (count - 2)
    norm /= count * (count - 3)
    factor = 2 / (m * (m - 1)) + 2 / (n * (n - 1)) + 4 / (m * n)
    if norm <= ROUNDING:
        raise DataError(
            f"the {count} images are alike to the kernel, or too few: MMD² has no spread. Check them and the bandwidth."
        )
    return Null(value, math.sqrt(factor * norm))


def median_bandwidth(x: Images, *, device: Device | None = None) -> float:
    """σ = √(median ‖xᵢ − xⱼ‖² / 2) over the pairs i < j of x (n, …); of 10 000 images of x where it has more.

    Raises:
        DataError: half of the pairs or more are equal, so the median is 0.
    """
    require_comparable(x, x, (NAMES[0], NAMES[0]))
    n = x.shape[0]
    if n > MEDIAN_IMAGES:
        x, n = View(x, random_rows(n, MEDIAN_IMAGES, 0, "median")), MEDIAN_IMAGES
    images = _Flat(x, NAMES[0], device)
    distances = torch.empty(n * (n - 1) // 2, dtype=images.dtype)
    sizes, done = [], 0
    for i, j, a, b in _blocks(images, images, upper=True):
        d = _squared_distances(a, b).cpu()
        sizes += [_sizes(a).cpu()] if i == j else []
        part = d[tuple(torch.triu_indices(len(a), len(a), 1))] if i == j else d.flatten()
        distances[done : done + len(part)] = part
        done += len(part)
    median = float(np.median(distances.numpy(), overwrite_input=True))
    # Of equal images only the rounding of their distance is left.
    if median <= 4 * math.sqrt(a.shape[1]) * torch.finfo(a.dtype).eps * float(torch.cat(sizes).median()):
        raise DataError(
            f"at least half of the pairs among {n} true images are equal, so their median distance, the kernel's "
            "width, is 0: check that the images vary, or pass a bandwidth of your own."
        )
    return math.sqrt(median / 2)


def _mmd2(xx: float, yy: float, xy: float, m: int, n: int, unbiased: bool) -> float:
    """MMD² from the sums of the kernel over i ≠ j within X and Y and over all pairs between them."""
    if unbiased:
        return xx / (m * (m - 1)) + yy / (n * (n - 1)) - 2 * xy / (m * n)
    return max(0.0, (xx + m) / m**2 + (yy + n) / n**2 - 2 * xy / (m * n))  # k(a, a) = 1; ≥ 0 but for rounding


class _Flat:
    """Images (N, …) as rows (N, D), read in pieces, on one device, minus a common centre.

    Distances do not see the centre, but ‖a‖² + ‖b‖² − 2⟨a, b⟩ loses fewer digits near 0. float32 images stay float32
    on the CPU; elsewhere float64, because products of float32 may be rounded to TF32 there.
    """

    def __init__(self, images: Images, name: str, device: Device | None, centre: Tensor | None = None) -> None:
        self.images, self.name, self.n = images, name, images.shape[0]
        first = read(images, slice(0, BLOCK), name).flatten(1)
        mean = wide(first).mean(0)
        self.device = mean.device if device is None else torch.device(device)
        self.dtype = first.dtype if self.device.type == "cpu" else torch.float64
        self.centre = mean.to(self.device) if centre is None else centre

    def rows(self, start: int) -> Tensor:
        """Rows `start` to `start` + BLOCK: (b, D)."""
        rows = read(self.images, slice(start, start + BLOCK), self.name).flatten(1)
        return rows.to(self.device, self.dtype) - self.centre.to(self.dtype)


class _Pairs:
    """The kernel over all pairs within and between two sets, in sums: rows (N,) in float64, and squares."""

    def __init__(self, x: Images, y: Images, bandwidth: float | None, device: Device | None) -> None:
        sigma = median_bandwidth(x, device=device) if bandwidth is None else float(bandwidth)
        if not (math.isfinite(sigma) and sigma > 0):
            raise UsageError(f"the kernel's bandwidth must be a finite number > 0, got {bandwidth!r}.")
        self.width = 2 * sigma**2
        first = _Flat(x, NAMES[0], device)
        second = _Flat(y, NAMES[1], first.device, first.centre)
        first.dtype = second.dtype = torch.promote_types(first.dtype, second.dtype)
        self.sets = (first, second)

    def within(self, which: int) -> tuple[Tensor, float]:
        """Σ_{j≠i} k(aᵢ, aⱼ) of every image of one set (N,), and Σ_{i≠j} k²."""
        images = self.sets[which]
        rows, squares = torch.zeros(images.n, dtype=torch.float64), 0.0
        for i, j, a, b in _blocks(images, images, upper=True):
            k = self._kernel(a, b)
            if i == j:
                k.fill_diagonal_(0)
            else:
                rows[j : j + len(b)] += k.sum(0).cpu()
            rows[i : i + len(a)] += k.sum(1, dtype=torch.float64).cpu()
            squares += (1 if i == j else 2) * _sum_of_squares(k)
        return rows, squares

    def between(self) -> tuple[Tensor, Tensor, float]:
        """Σⱼ k(xᵢ, yⱼ) of every x (m,), Σᵢ k(xᵢ, yⱼ) of every y (n,), and Σ k²."""
        x, y = self.sets
        rows, columns = (torch.zeros(s.n, dtype=torch.float64) for s in self.sets)
        squares = 0.0
        for i, j, a, b in _blocks(x, y, upper=False):
            k = self._kernel(a, b)
            rows[i : i + len(a)] += k.sum(1, dtype=torch.float64).cpu()
            columns[j : j + len(b)] += k.sum(0).cpu()
            squares += _sum_of_squares(k)
        return rows, columns, squares

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """k within the first set, within the second and between them, in float64 on the CPU; for small sets."""
        x, y = (torch.cat([images.rows(i) for i in range(0, images.n, BLOCK)]) for images in self.sets)
        return self._kernel(x, x).cpu().double(), self._kernel(y, y).cpu().double(), self._kernel(x, y).cpu().double()

    def _kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return _squared_distances(a, b).mul_(-1 / self.width).exp_()


def _blocks(x: _Flat, y: _Flat, *, upper: bool) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Blocks of pairs (i, j, rows of x from i, rows of y from j); of a set with itself those with j ≥ i only."""
    for i in range(0, x.n, BLOCK):
        a = x.rows(i)
        for j in range(i if upper else 0, y.n, BLOCK):
            yield i, j, a, a if upper and i == j else y.rows(j)


def _sum_of_squares(k: Tensor) -> float:
    return float(torch.linalg.vector_norm(k, dtype=torch.float64)) ** 2


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖aᵢ − bⱼ‖²: (m, D), (n, D) → (m, n)."""
    across = torch.addmm(_sizes(b)[None], a, b.T, alpha=-2)
    return across.add_(_sizes(a)[:, None]).clamp_(min=0)


def _sizes(a: Tensor) -> Tensor:
    """‖aᵢ‖²: (m, D) → (m,)."""
    return torch.linalg.vector_norm(a, dim=1).square()
