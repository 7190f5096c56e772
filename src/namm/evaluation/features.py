"""KID and FID: how far two sets of images are apart to the eye of a network trained on photographs.

With features φ (2048 numbers an image, `namm.evaluation.inception`):

    KID = unbiased MMD² of the features under k(a, b) = (⟨a, b⟩/2048 + 1)³, mean ± std over 100 random subsets of 1000
    FID = ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½), the Fréchet distance of two Gaussians with the features' moments

both in float64, where the network is; KID by torchmetrics. FID is biased upwards by a term that falls with the number
of images: compare equal numbers only (the paper: 50 000 against 50 000; KID 10 000 against 10 000).

What the network sees is a *picture*: `Clipped` for images in [0, 1]; for flows the vorticity, `Vorticity`.

Images are read 512 at a time, and FID keeps no features at all, only their running sums. With a `cache` folder, each
512 images' features are a file there, named after a hash of the pictures and of the network's weights.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from namm.constraints import Constraint
from namm.constraints.base import Scaled
from namm.constraints.divergence import DivergenceFree
from namm.datasets.batches import Images, check_images
from namm.errors import CheckpointError, DataError, UsageError
from namm.evaluation.inception import load_inception
from namm.evaluation.mmd import Estimate, read, require_comparable, require_size
from namm.numerics import fold
from namm.simulators.fluid import cut, lay_out, vorticity
from namm.weights_file import read_weights, write_weights

CHUNK = 512
"""Images read, and features kept in one file of the cache, at a time."""
NAMES = ("real images", "samples")

Picture = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to pictures in [0, 1], (B, 3, H′, W′)."""


@dataclass(frozen=True)
class Clipped:
    """Values clipped to [low, high] and scaled to [0, 1]; grey images become RGB."""

    low: float = 0.0
    high: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """(B, 1 or 3, H, W) → (B, 3, H, W)."""
        if x.shape[1] not in (1, 3):
            raise DataError(
                f"images with {x.shape[1]} channels are no pictures: give `picture`, a function that makes "
                "(B, 3, H, W) in [0, 1] of them, such as Vorticity() for velocities."
            )
        scaled = (x.clamp(self.low, self.high) - self.low) / (self.high - self.low)
        return scaled.expand(-1, 3, -1, -1)


CLIPPED = Clipped()


@dataclass(frozen=True)
class Vorticity:
    """The vorticity of each state of a flow, clipped to ±limit, as a grey picture laid out as the image is."""

    size: int = 64
    extent: float = 2 * math.pi
    limit: float = 20.0

    def __call__(self, x: Tensor) -> Tensor:
        """Velocities (B, 2, r·n, c·n) → (B, 3, r·n, c·n)."""
        if x.shape[1] != 2 or x.shape[2] % self.size or x.shape[3] % self.size:
            raise DataError(f"{self} needs velocities (B, 2, H, W) in whole states; these are {tuple(x.shape)}.")
        rotation = vorticity(cut(x, self.size), self.extent / self.size)
        return Clipped(-self.limit, self.limit)(lay_out(rotation.unsqueeze(-3)))


def picture_for(constraint: Constraint) -> Picture:
    """What the paper shows the network of images under this rule: the vorticity of flows, else the image clipped."""
    rule = constraint.inner if isinstance(constraint, Scaled) else constraint
    return Vorticity(rule.size, rule.extent) if isinstance(rule, DivergenceFree) else Clipped()


class Extractor:
    """From images to features.

    Args:
        picture: what the network sees of an image.
        network: pictures (B, 3, H, W) in [0, 1] → (B, F); Inception by default, a `DataError` without its weights.
        batch_size: pictures in the network at a time.
        cache: a folder that keeps features, or none.
        device: where the network runs; where its weights are by default.
    """

    def __init__(
        self,
        picture: Picture = CLIPPED,
        network: nn.Module | None = None,
        *,
        batch_size: int = 64,
        cache: str | Path | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        network = load_inception() if network is None else network
        self.network = network if device is None else network.to(device)
        self.picture, self.batch_size = picture, batch_size
        self.cache = None if cache is None else Path(cache).expanduser()
        self._digest = b"" if cache is None else _digest(network)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    def chunks(self, images: Images, name: str = "images") -> Iterator[Tensor]:
        """Features (≤ 512, F) of images (N, C, H, W) in order, float32 on the CPU."""
        check_images(images, name)
        for start in range(0, images.shape[0], CHUNK):
            pictures = self.picture(read(images, slice(start, start + CHUNK), name))
            yield self._compute(pictures) if self.cache is None else self._cached(pictures, self.cache)

    def _cached(self, pictures: Tensor, folder: Path) -> Tensor:
        content = pictures[:, :1] if pictures.stride(1) == 0 else pictures  # grey: three times the same
        header = repr((tuple(pictures.shape), content.dtype)).encode()
        digest = hashlib.blake2b(header + self._digest, digest_size=16)
        digest.update(_bytes(content))
        path = folder / f"{digest.hexdigest()}.safetensors"
        try:
            return read_weights(path, "the features", "they are computed again.")[0]["features"]
        except (FileNotFoundError, CheckpointError, KeyError):  # absent, or damaged by something
            features = self._compute(pictures)
            write_weights(path, {"features": features}, {})
            return features

    @torch.no_grad()
    def _compute(self, pictures: Tensor) -> Tensor:
        parts = pictures.split(self.batch_size)
        return torch.cat([self.network(part.to(self.device)).float().cpu() for part in parts])


def kid(
    real: Images,
    samples: Images,
    extractor: Extractor | None = None,
    *,
    subsets: int = 100,
    size: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Kernel Inception distance between true images (M, C, H, W) and samples (N, C, H, W).

    Mean and std over `subsets` pairs of random subsets of `size` images each, drawn without repetition by `seed`.
    Raises `DataError` where shapes differ, an image holds NaN or inf, or a set is smaller than `size`.
    """
    _require_comparable(real, samples)
    require_size(real.shape[0], size, NAMES[0])
    require_size(samples.shape[0], size, NAMES[1])
    if subsets < 1:
        raise UsageError(f"kid needs at least one subset, got {subsets}.")
    from torchmetrics.image.kid import KernelInceptionDistance

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message=".*save all extracted features in buffer.*")
        torch.manual_seed(fold(seed, "kid"))
        given = nn.Identity()  # in place of torchmetrics' own network: what it is given are features already
        metric = KernelInceptionDistance(feature=given, subsets=subsets, subset_size=size, sync_on_compute=False)
        extractor = extractor or Extractor()
        metric.to(extractor.device)
        for images, name in zip((real, samples), NAMES, strict=True):
            for features in _wide(extractor, images, name):
                metric.update(features, real=name == NAMES[0])
        mean, std = metric.compute()
    return Estimate(float(mean), float(std))


def fid(real: Images, samples: Images, extractor: Extractor | None = None) -> float:
    """Fréchet Inception distance between true images (M, C, H, W) and samples (N, C, H, W)."""
    _require_comparable(real, samples)
    extractor = extractor or Extractor()
    (mean, covariance), (other_mean, other) = (
        _moments(_wide(extractor, images, name)) for images, name in zip((real, samples), NAMES, strict=True)
    )
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    common = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()  # tr (Σ₁Σ₂)^½, symmetric
    return float((mean - other_mean).square().sum() + covariance.trace() + other.trace() - 2 * common)


def _moments(chunks: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean (F,) and covariance (F, F) of features that come in chunks."""
    n, total, products = 0, torch.zeros(()), torch.zeros(())
    for features in chunks:
        n, total, products = n + len(features), total + features.sum(0), products + features.T @ features
    mean = total / n
    return mean, (products - n * mean.outer(mean)) / (n - 1)


def _wide(extractor: Extractor, images: Images, name: str) -> Iterator[Tensor]:
    """Features in float64, where the network is: their products are not for a CPU."""
    for features in extractor.chunks(images, name):
        yield features.to(extractor.device, torch.float64)


def _require_comparable(real: Images, samples: Images) -> None:
    check_images(real, NAMES[0])
    check_images(samples, NAMES[1])
    require_comparable(real, samples, NAMES)


def _digest(network: nn.Module) -> bytes:
    """A hash of the network's class and weights."""
    digest = hashlib.blake2b(f"{type(network).__module__}.{type(network).__qualname__}".encode())
    for name, tensor in network.state_dict().items():
        digest.update(name.encode() + _bytes(tensor))
    return digest.digest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
