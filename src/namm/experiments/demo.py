"""The demonstration: a mirror map for periodic unit cells, learned on a CPU in minutes.

Held-out images x get noise of σ_max twice: directly, and in mirror space before they are mapped back. If the map has
learned the rule, ℓ(f(g(x) + σz)) is far below ℓ(x + σz), while f(g(x)) is still x.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from namm.constraints import Periodic
from namm.datasets.unit_cells import UnitCells
from namm.maps import ICNN, MirrorMap, ResNet
from namm.numerics import fold, generator
from namm.training.maps import train_map
from namm.training.objectives import UniformNoise, Weights
from namm.training.settings import TrainSettings

SIGMA_MAX = 0.1
TRAIN, HELD_OUT = 2048, 256


@dataclass(frozen=True)
class DemoResult:
    """Mean ℓ over the held-out images, and the images that the figure shows, each (N, 1, H, W).

    Attributes:
        data: ℓ(x).
        noisy: ℓ(x + σz).
        restored: ℓ(f(g(x) + σz)).
        inverted: ℓ(f(g(x))).
        error: mean |x − f(g(x))| / mean |x|.
        compute_seconds: Time spent in training steps.
        images: x, x + σz, g(x) and f(g(x) + σz) by name.
        distances: ℓ per image, by the same names as above.
    """

    data: float
    noisy: float
    restored: float
    inverted: float
    error: float
    compute_seconds: float
    images: dict[str, Tensor]
    distances: dict[str, Tensor]


def demo(folder: str | Path | None, *, steps: int = 1000, seed: int = 0) -> DemoResult:
    """Make images, learn the map, measure it on images it has not seen."""
    dataset, rule = UnitCells(size=32), Periodic(tiles=(2, 2))
    with torch.random.fork_rng([]):
        torch.manual_seed(fold(seed, "initial weights"))
        g = ICNN(layers=2, filters=16)
        f = ResNet(filters=8, blocks=2, normalisation="none", dropout=0.0, skip=True, activation="sigmoid")
    mirror = MirrorMap(g, f)
    result = train_map(
        mirror,
        dataset.images(seed, "train", 0, TRAIN),
        rule,
        noise=UniformNoise(SIGMA_MAX),
        weights=Weights(constraint=5.0, regulariser=0.3),
        settings=TrainSettings(
            budget=f"{steps} steps", learning_rate=1e-3, schedule="cosine", warmup_steps=20, ema_decay=0.99, seed=seed
        ),
        validation=dataset.images(seed, "val", 0, 64),
        folder=folder,
    )
    return measure(mirror, rule, dataset.images(seed, "test", 0, HELD_OUT), result.compute_seconds, seed)


@torch.no_grad()
def measure(mirror: MirrorMap, rule: Periodic, x: Tensor, compute_seconds: float, seed: int) -> DemoResult:
    """The distances on held-out images x (N, 1, H, W)."""
    x = x.to(next(mirror.parameters()).device)
    noise = SIGMA_MAX * torch.randn(x.shape, generator=generator(seed, "demo")).to(x)
    y = mirror.to_mirror(x)
    inverted, restored = mirror.to_data(y), mirror.to_data(y + noise)
    distances = {"data": rule(x), "noisy": rule(x + noise), "restored": rule(restored), "inverted": rule(inverted)}
    return DemoResult(
        **{name: float(distance.mean()) for name, distance in distances.items()},
        error=float((x - inverted).abs().mean() / x.abs().mean()),
        compute_seconds=compute_seconds,
        images={"x": x, "x + σz": x + noise, "g(x)": y, "f(g(x) + σz)": restored},
        distances=distances,
    )
