"""Rules of a user's own that `every_rule.py` tries, and images that obey them.

Each is what a person would write: one function of images (B, C, H, W). The images are scikit-learn's handwritten
digits, enlarged to 16×16, or random fields, changed so that they keep the rule.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from namm import constraint, with_number

LAPLACIAN = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])


@constraint
def ink(x: Tensor) -> Tensor:
    """Every digit is drawn with the same amount of ink."""
    return (x.sum((1, 2, 3)) - 80).abs()


@constraint
def norm(x: Tensor) -> Tensor:
    """Every digit has the same Euclidean norm."""
    return (x.flatten(1).norm(dim=1) - 8).abs()


@constraint
def variance(x: Tensor) -> Tensor:
    """The pixels of every image have variance one, whatever their mean."""
    return (x.var((1, 2, 3), correction=0) - 1).abs()


@constraint
def part(x: Tensor) -> Tensor:
    """The ink inside a window is the same."""
    return (x[:, 0, 3:10, 4:12].sum((1, 2)) - 25).abs()


@constraint
def colour(x: Tensor) -> Tensor:
    """Red, green and blue of every pixel are a vector of length one."""
    return (x.norm(dim=1) - 1).abs().mean((1, 2))


class Poisson(torch.nn.Module):
    """−c Δu = s for the channels u and s, with a conductivity c that is a buffer."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        conductivity = torch.ones(size, size)
        conductivity[:, size // 2 :] = 2
        self.register_buffer("conductivity", 3 * conductivity)
        self.register_buffer("stencil", LAPLACIAN[None, None])

    def source(self, u: Tensor) -> Tensor:
        """−c Δu on a torus."""
        laplacian = F.conv2d(F.pad(u, (1, 1, 1, 1), mode="circular"), self.get_buffer("stencil"))
        return -self.get_buffer("conductivity") * laplacian

    def forward(self, x: Tensor) -> Tensor:
        """Mean |s + c Δu|."""
        return (x[:, 1:] - self.source(x[:, :1])).abs().mean((1, 2, 3))


poisson = constraint(Poisson())


def _own_total(x: Tensor, total: Tensor) -> Tensor:
    return (x.sum((1, 2, 3)) - 80 * total).abs()


own_total = constraint(_own_total, condition=1)
"""Every digit has an amount of ink of its own, which comes with it as a second channel."""


def digits(seed: int) -> Tensor:
    """scikit-learn's digits, (1797, 1, 16, 16), shuffled."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    x = F.interpolate(x, (16, 16), mode="bilinear").clamp(0, 1)
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]


def fields(n: int, channels: int, size: int, seed: int) -> Tensor:
    """Smooth random fields on a torus, correlated over two pixels."""
    z = torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(seed))
    rows, columns = torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)
    window = torch.exp(-2 * (2 * math.pi) ** 2 * (rows**2 + columns**2))
    smooth = torch.fft.irfft2(torch.fft.rfft2(z) * window, s=(size, size))
    return smooth / smooth.std()


def _inked(seed: int) -> Tensor:
    x = digits(seed)
    return 80 * x / x.sum((1, 2, 3), keepdim=True)


def _normed(seed: int) -> Tensor:
    x = digits(seed)
    return 8 * x / x.flatten(1).norm(dim=1)[:, None, None, None]


def _varied(seed: int) -> Tensor:
    x = digits(seed)
    level = 0.3 * torch.randn(len(x), 1, 1, 1, generator=torch.Generator().manual_seed(seed))
    return (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True, correction=0) + level


def _windowed(seed: int) -> Tensor:
    x, window = digits(seed), torch.zeros(16, 16)
    window[3:10, 4:12] = 1
    return torch.where(window > 0, 25 * x / (x * window).sum((1, 2, 3), keepdim=True), x)


def _coloured(seed: int) -> Tensor:
    x = fields(2600, 3, 32, seed) + torch.tensor([0.5, 0.0, -0.5])[:, None, None]
    return x / x.norm(dim=1, keepdim=True)


def _sourced(seed: int) -> Tensor:
    u = fields(2600, 1, 32, seed)
    return torch.cat([u, Poisson().source(u)], dim=1)


def _numbered(seed: int) -> Tensor:
    x = digits(seed)
    total = 0.7 + 0.6 * torch.rand(len(x), generator=torch.Generator().manual_seed(seed))
    return with_number(80 * total[:, None, None, None] * x / x.sum((1, 2, 3), keepdim=True), total)


IMAGES: dict[str, Callable[[int], Tensor]] = {
    "ink": _inked,
    "norm": _normed,
    "variance": _varied,
    "part": _windowed,
    "colour": _coloured,
    "poisson": _sourced,
    "own_total": _numbered,
}
"""Images of each rule, by a seed."""
