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
from 10 000 of its images, drawn with a fixed seed. Images may be on disk: all metrics read them by rows, as the last
section of this file does.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from namm.datasets.batches import Images, in_chunks, to_tensor
from namm.errors import DataError, UsageError
from namm.numerics import fold, generator

BLOCK = 1024
"""Images along each side of a block of pairs."""
MEDIAN_IMAGES = 10_000
"""Up to so many images the median is over all pairs; beyond, over the pairs of so many of them."""
BOOTSTRAP_IMAGES = 1000
"""Images of either set that `mmd_error` draws from."""
ROUNDING = 1e-12
"""E k̃² of a kernel ≤ 1 that cannot be told from 0."""
PIECE = 512
"""Images read from disk at a time."""
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
    """MMD² between the true images x (m, …) and the samples y (n, …): tensors, arrays or images on disk.

    `unbiased` leaves out the pairs of an image with itself. The kernel's σ is `bandwidth`, `median_bandwidth(x)` by
    default; computed on `device`, where x is by default. Raises `DataError` where shapes differ, an image is not
    finite, or x has no σ.
    """
    require_comparable(x, y, NAMES)
    (xx, _, _), (yy, _, _), (xy, _, _) = _Pairs(x, y, bandwidth, device).sums()
    return _mmd2(float(xx.sum()), float(yy.sum()), float(xy.sum()), x.shape[0], y.shape[0], unbiased)


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

    Each of `subsets` pairs has `size` images of either set, drawn without repetition by `seed`; σ comes from each
    subset of x unless `bandwidth` gives one for all. The biased value depends on `size`: compare equal sizes only.
    """
    require_comparable(x, y, NAMES)
    require_size(x.shape[0], size, NAMES[0])
    require_size(y.shape[0], size, NAMES[1])
    x, y = in_memory(x), in_memory(y)

    def draw(k: int) -> Iterator[Subset]:
        return (Subset(s, random_rows(s.shape[0], size, seed, "mmd", name, k)) for s, name in ((x, "x"), (y, "y")))

    return _over_subsets("mmd", subsets, draw, bandwidth=bandwidth, device=device)


def mmd_floor(
    x: Images, *, subsets: int = 50, size: int = 1000, seed: int = 0, device: Device | None = None
) -> Estimate:
    """`mmd` between disjoint random subsets of one set x (m ≥ 2·`size`, …): what samples as good as data would score.

    Each pair of subsets is drawn anew from all of x, so that no chance division of x in two is in every one of them.
    """
    require_comparable(x, x, (NAMES[0], NAMES[0]))
    require_size(x.shape[0] // 2, size, "images, half of the true ones")
    x = in_memory(x)

    def draw(k: int) -> Iterator[Subset]:
        rows = random_rows(x.shape[0], 2 * size, seed, "mmd floor", k)
        half = random_rows(2 * size, size, seed, "mmd half", k)
        return (Subset(x, part) for part in (rows[half], np.delete(rows, half)))

    return _over_subsets("mmd_floor", subsets, draw, device=device)


def _over_subsets(name: str, subsets: int, draw: Callable[[int], Iterator["Subset"]], **options: Any) -> Estimate:
    """√MMD² over the pairs `draw(0)`, `draw(1)`, …"""
    if subsets < 1:
        raise UsageError(f"{name} needs at least one subset, got {subsets}.")
    values = [math.sqrt(mmd2(*draw(k), **options)) for k in range(subsets)]
    return Estimate(float(np.mean(values)), float(np.std(values)))


def mmd_error(x: Images, y: Images, *, replicates: int = 200, seed: int = 0, device: Device | None = None) -> float:
    """Bootstrap standard error of `mmd` between true images x (m, …) and samples y (n, …).

    Images are drawn again with repetition, `replicates` times: as weights a and b on the kernel matrices of up to 1000
    of each, √(aᵀ Kxx a + bᵀ Kyy b − 2 aᵀ Kxy b). Where there are more, the error is less by the root of their number.
    """
    require_comparable(x, y, NAMES)
    used = min(x.shape[0], y.shape[0], BOOTSTRAP_IMAGES)
    parts = [Subset(s, random_rows(s.shape[0], used, seed, "mmd error", k)) for k, s in enumerate((x, y))]
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
    m, n = x.shape[0], y.shape[0]
    (xx, _, xx2), (yy, _, yy2), (xy, yx, xy2) = _Pairs(x, y, bandwidth, device).sums()
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

    Raises `DataError` where half of the pairs or more are equal, so that the median is 0.
    """
    require_comparable(x, x, (NAMES[0], NAMES[0]))
    n = x.shape[0]
    if n > MEDIAN_IMAGES:
        x, n = Subset(x, random_rows(n, MEDIAN_IMAGES, 0, "median")), MEDIAN_IMAGES
    images = _Flat(x, NAMES[0], device)
    distances = torch.empty(n * (n - 1) // 2, dtype=images.dtype)
    sizes, done = [], 0
    for i, j, a, b in _blocks(images, images):
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


# The kernel in blocks


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


Sums = tuple[Tensor, Tensor, float]
"""Σⱼ k(aᵢ, bⱼ) of every a, Σᵢ k(aᵢ, bⱼ) of every b, both in float64, and Σ k²; i ≠ j where a set meets itself."""


class _Pairs:
    """The kernel over all pairs within and between two sets."""

    def __init__(self, x: Images, y: Images, bandwidth: float | None, device: Device | None) -> None:
        sigma = median_bandwidth(x, device=device) if bandwidth is None else float(bandwidth)
        if not (math.isfinite(sigma) and sigma > 0):
            raise UsageError(f"the kernel's bandwidth must be a finite number > 0, got {bandwidth!r}.")
        self.width = 2 * sigma**2
        self.x = _Flat(x, NAMES[0], device)
        self.y = _Flat(y, NAMES[1], self.x.device, self.x.centre)
        self.x.dtype = self.y.dtype = torch.promote_types(self.x.dtype, self.y.dtype)

    def sums(self) -> tuple[Sums, Sums, Sums]:
        """Sums within x, within y and between them."""
        return self._sums(self.x, self.x), self._sums(self.y, self.y), self._sums(self.x, self.y)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """k within x, within y and between them, in float64 on the CPU; for small sets."""
        x, y = (torch.cat([images.rows(i) for i in range(0, images.n, BLOCK)]) for images in (self.x, self.y))
        return self._kernel(x, x).cpu().double(), self._kernel(y, y).cpu().double(), self._kernel(x, y).cpu().double()

    def _sums(self, x: _Flat, y: _Flat) -> Sums:
        rows = torch.zeros(x.n, dtype=torch.float64)
        columns = rows if x is y else torch.zeros(y.n, dtype=torch.float64)
        squares = 0.0
        for i, j, a, b in _blocks(x, y):
            k = self._kernel(a, b)
            if x is y and i == j:
                k.fill_diagonal_(0)
            else:
                columns[j : j + len(b)] += k.sum(0).cpu()
            rows[i : i + len(a)] += k.sum(1, dtype=torch.float64).cpu()
            times = 2 if x is y and i != j else 1
            squares += times * float(torch.linalg.vector_norm(k, dtype=torch.float64)) ** 2
        return rows, columns, squares

    def _kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return _squared_distances(a, b).mul_(-1 / self.width).exp_()


def _blocks(x: _Flat, y: _Flat) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Blocks of pairs (i, j, rows of x from i, rows of y from j); of a set with itself those with j ≥ i only."""
    for i in range(0, x.n, BLOCK):
        a = x.rows(i)
        for j in range(i if x is y else 0, y.n, BLOCK):
            yield i, j, a, a if x is y and i == j else y.rows(j)


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖aᵢ − bⱼ‖²: (m, D), (n, D) → (m, n)."""
    across = torch.addmm(_sizes(b)[None], a, b.T, alpha=-2)
    return across.add_(_sizes(a)[:, None]).clamp_(min=0)


def _sizes(a: Tensor) -> Tensor:
    """‖aᵢ‖²: (m, D) → (m,)."""
    return torch.linalg.vector_norm(a, dim=1).square()


# How metrics read images: by rows, checked, whatever holds them


class Subset:
    """Some rows of a set of images (N, …), by their sorted indices (n,), read when asked for."""

    def __init__(self, images: Images, rows: np.ndarray) -> None:
        self.images, self.rows = images, rows

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, …)."""
        return (len(self.rows), *self.images.shape[1:])

    def __getitem__(self, index: Any) -> Any:
        """The rows that `index`, a slice or a sorted array, selects among these."""
        return self.images[self.rows[index]]


def in_memory(images: Images) -> Images:
    """Read into memory if that takes less than an eighth of what is free."""
    if isinstance(images, Tensor | np.ndarray):
        return images
    if isinstance(images, Subset):
        return Subset(in_memory(images.images), images.rows)
    if 8 * 4 * int(np.prod(images.shape, dtype=np.int64)) > psutil.virtual_memory().available:
        return images
    return torch.cat(list(in_chunks(images, PIECE)))


def read(images: Images, index: Any, name: str) -> Tensor:
    """The rows that `index`, a slice or a sorted array, selects, as floating-point numbers (n, …).

    NaN or inf is a `DataError` that names the set, `name`, and the image.
    """
    rows = to_tensor(images[index])
    if torch.isfinite(rows.flatten(1).sum(1)).all():  # any NaN or infinity would survive the sum
        return rows
    finite = torch.isfinite(rows.flatten(1)).all(1)
    if not finite.all():
        bad = np.arange(images.shape[0])[index][int((~finite).nonzero()[0])]
        while isinstance(images, Subset):  # the number that it has in the user's own set
            bad, images = images.rows[bad], images.images
        raise DataError(
            f"image {bad} of the {name} holds NaN or inf ({int((~finite).sum())} of the {len(rows)} images read "
            "with it do): a mean over it says nothing. Mend what made it, or leave such images out and say how many."
        )
    return rows


def wide(x: Tensor) -> Tensor:
    """`x` in float64, where it is or, if that device has no float64, on the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def random_rows(n: int, size: int, seed: int, *path: int | str) -> np.ndarray:
    """`size` of the indices 0 … n − 1 without repetition, sorted, as a function of (seed, path)."""
    return np.sort(torch.randperm(n, generator=generator(seed, *path))[:size].numpy())


def require_comparable(x: Images, y: Images, names: tuple[str, str]) -> None:
    """Refuse sets (N, …) whose images differ in shape, or that hold fewer than two."""
    for images, name in zip((x, y), names, strict=True):
        shape = tuple(getattr(images, "shape", ()))
        if len(shape) < 2 or shape[0] < 2 or 0 in shape:
            raise DataError(f"the {name} must be at least two images, first axis N; their shape is {shape}.")
    if tuple(x.shape[1:]) != tuple(y.shape[1:]):
        raise DataError(
            f"the {names[0]} have shape {tuple(x.shape)} and the {names[1]} {tuple(y.shape)}: images of different "
            "shape cannot be compared. Resize or crop one of them, or check the order of the axes (N, C, H, W)."
        )


def require_size(n: int, size: int, name: str) -> None:
    """Refuse subsets of `size` out of `n` images where there are not as many."""
    if not 2 <= size <= n:
        raise DataError(
            f"subsets of {size} images cannot be drawn from {n} {name}: "
            f"bring more of them, or choose a size from 2 to {n}."
        )
