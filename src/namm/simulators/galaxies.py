"""Galaxies before a noisy sky: elliptical Gaussian sources on a blurred background.

A source of peak A, semi-axes a and b and position angle θ, with (u, v) the offsets from its centre along its axes, is

    A exp(−(u²/a² + v²/b²) / (4 ln 2)),      b = a √((1 − e)/(1 + e)),

a Gaussian of standard deviation √(2 ln 2) a = 1.177 a along its major axis. In a catalogue

    a ~ 2 Γ(1.6) px, drawn again below 1 px,    e ~ Beta(1.7, 4.5),    θ ~ U(0, π),    A ~ U(A_min, A_max),

and every centre is uniform over the pixels that keep a distance from the centres before it. Centres lie on pixels, so
the brightest pixel of a source *is* its peak.

The sky is white noise of standard deviation s, blurred by a normalised Gaussian kernel k cut off at four widths. It is
drawn on a larger canvas, so its variance (s Σ k²)² is the same everywhere, edges included. A source of d decibels
against the sky has A² = 10^(d/10) times that variance.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from namm.errors import UsageError

SIZE_SHAPE, RADIUS, SMALLEST = 1.6, 2.0, 1.0
"""Shape and scale (px) of the gamma distribution of the semi-major axis, and where it is cut."""
ELLIPTICITY = (1.7, 4.5)
"""Parameters of the beta distribution of the ellipticity."""
KERNEL_WIDTHS = 4.0
"""Half the extent of the blur's kernel, in its own widths."""


@dataclass(frozen=True)
class Catalogue:
    """What n images of k sources hold; float64, lengths in pixels.

    Attributes:
        centres: Row and column, whole numbers: (n, k, 2).
        major: Semi-major axis a: (n, k).
        ellipticity: e in [0, 1]: (n, k).
        angle: θ in [0, π), from the direction of growing columns to that of growing rows: (n, k).
        peak: A: (n, k).
    """

    centres: Tensor
    major: Tensor
    ellipticity: Tensor
    angle: Tensor
    peak: Tensor

    @property
    def minor(self) -> Tensor:
        """Semi-minor axis b: (n, k)."""
        return self.major * ((1 - self.ellipticity) / (1 + self.ellipticity)).sqrt()


def draw_catalogue(
    n: int,
    *,
    count: int,
    size: int,
    peaks: tuple[float, float],
    separation: float,
    rng: torch.Generator,
    radius: float = RADIUS,
) -> Catalogue:
    """`n` images of `count` sources on size × size pixels, on the generator's device.

    `peaks` are A_min and A_max; two centres of an image are at least `separation` apart; `radius` is the scale of a.
    """
    require_room(count, size, separation)
    # One seed from torch, then NumPy, whose gamma and beta variates take a generator.
    numpy = np.random.default_rng(int(torch.randint(2**62, (), generator=rng, device=rng.device)))
    shape = (n, count)
    columns = (
        _centres(n, count, size, separation, numpy).astype(np.float64),
        _axes(shape, radius, numpy),
        numpy.beta(*ELLIPTICITY, size=shape),
        numpy.uniform(0, math.pi, size=shape),
        numpy.uniform(*peaks, size=shape),
    )
    return Catalogue(*(torch.from_numpy(column).to(rng.device) for column in columns))


def require_room(count: int, size: int, separation: float) -> None:
    """Refuse what may not fit: the last source must find a free pixel wherever the others are."""
    reach = math.ceil(min(separation, size))
    offsets = np.arange(-reach, reach + 1) ** 2
    covered = int((offsets[:, None] + offsets < separation**2).sum())
    if count < 1 or not (count - 1) * covered < size**2:
        most = (size**2 - 1) // max(1, covered) + 1
        raise UsageError(
            f"{count} sources at least {separation:g} px apart need not fit into {size}×{size} pixels: choose a count "
            f"from 1 to {most}, a larger size or a smaller separation."
        )


def render(catalogue: Catalogue, size: int) -> Tensor:
    """The sources alone, added up, each without end: float64, (n, 1, size, size)."""
    pixels = torch.arange(size, dtype=torch.float64, device=catalogue.major.device)
    cosine, sine = catalogue.angle.cos(), catalogue.angle.sin()
    major, minor = ((4 * math.log(2) * axis.square()).reciprocal() for axis in (catalogue.major, catalogue.minor))
    # The quadratic form p dy² + 2 q dy dx + r dx² of every source: (n, k).
    p = sine.square() * major + cosine.square() * minor
    q = sine * cosine * (major - minor)
    r = cosine.square() * major + sine.square() * minor
    images = torch.zeros(len(major), size, size, dtype=torch.float64, device=pixels.device)
    for k in range(major.shape[1]):  # a source at a time: whole images stay in cache, and memory does not grow with k
        dy, dx = (pixels - catalogue.centres[:, k, axis, None] for axis in (0, 1))
        form = (2 * q[:, k, None] * dy)[:, :, None] * dx[:, None, :]
        form += (p[:, k, None] * dy.square())[:, :, None] + (r[:, k, None] * dx.square())[:, None, :]
        images += form.neg_().exp_().mul_(catalogue.peak[:, k, None, None])
    return images[:, None]


def blur_kernel(blur: float) -> Tensor:
    """One axis of the blur of width `blur` (px): float64, (2⌈4 blur⌉ + 1,), adding up to 1."""
    if not 0 < blur < math.inf:
        raise UsageError(f"the blur of a background must have a positive width in pixels, not {blur}.")
    reach = math.ceil(KERNEL_WIDTHS * blur)
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    kernel = torch.exp(-offsets.square() / (2 * blur**2))
    return kernel / kernel.sum()


def background(n: int, size: int, *, scale: float, blur: float, rng: torch.Generator) -> Tensor:
    """`n` skies, white noise of standard deviation `scale` blurred by `blur` px: float64, (n, 1, size, size)."""
    return blurred(white_canvas(n, size, blur=blur, rng=rng), scale=scale, blur=blur)


def white_canvas(n: int, size: int, *, blur: float, rng: torch.Generator) -> Tensor:
    """White noise that leaves size × size pixels when it is blurred: float64, (n, 1, width, width)."""
    width = size + len(blur_kernel(blur)) - 1
    return torch.randn(n, 1, width, width, generator=rng, device=rng.device, dtype=torch.float64)


def blurred(white: Tensor, *, scale: float, blur: float) -> Tensor:
    """`scale` times noise (n, 1, width, width), blurred by `blur` px where the kernel fits: (n, 1, size, size)."""
    kernel, width = blur_kernel(blur), white.shape[-1]
    size = width - len(kernel) + 1
    # Row i of the band matrix holds the kernel at columns i, i + 1, …: a blur without borders is two products.
    band = torch.zeros(size, width, dtype=white.dtype)
    for i in range(size):
        band[i, i : i + len(kernel)] = kernel
    band = band.to(white.device)
    return scale * (band @ white @ band.T)


def background_variance(scale: float, blur: float) -> float:
    """Variance of a pixel of `background`; scale²/(4π blur²) for wide blurs."""
    return float(scale * blur_kernel(blur).square().sum()) ** 2


def _axes(shape: tuple[int, ...], radius: float, numpy: np.random.Generator) -> NDArray[np.float64]:
    """Semi-major axes; those below `SMALLEST` are drawn again."""
    axes = radius * numpy.gamma(SIZE_SHAPE, size=shape)
    while (small := axes < SMALLEST).any():
        axes[small] = radius * numpy.gamma(SIZE_SHAPE, size=int(small.sum()))
    return axes


def _centres(n: int, count: int, size: int, separation: float, numpy: np.random.Generator) -> NDArray[np.int64]:
    """Centres placed one after the other, each drawn again until it keeps its distance: (n, count, 2)."""
    centres = numpy.integers(size, size=(n, count, 2))
    for k in range(1, count):
        rows = np.arange(n)  # images whose source k is too close to one before it
        while True:
            offsets = centres[rows, :k] - centres[rows, k, None]
            rows = rows[((offsets**2).sum(-1) < separation**2).any(-1)]
            if not len(rows):
                break
            centres[rows, k] = numpy.integers(size, size=(len(rows), 2))
    return centres
