"""The demonstration: the periodic experiment's smallest preset, up to its map, shown on images it has not seen.

Held-out images x get noise of σ_max twice: directly, and in mirror space before they are mapped back. If the map has
learned the rule, ℓ(f(g(x) + σz)) is far below ℓ(x + σz), while f(g(x)) is still x.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from namm.datasets import open_store
from namm.experiments import build
from namm.experiments.data_stage import images_file
from namm.experiments.map_stage import measure, mirror_folder
from namm.experiments.presets import Preset, preset
from namm.experiments.run import Tell, run
from namm.maps import MirrorMap
from namm.numerics import generator

HELD_OUT = 256


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration shows.

    Attributes:
        figures: As `namm.experiments.map_stage.measure` returns them.
        images: x, x + σz, g(x) and f(g(x) + σz) by these names, each (N, 1, H, W).
        distances: ℓ of those of them that live in data space, each (N,).
        sigma: σ.
        compute_seconds: Time spent in training steps.
    """

    figures: dict[str, float]
    images: dict[str, Tensor]
    distances: dict[str, Tensor]
    sigma: float
    compute_seconds: float


def demo(folder: str | Path, *, steps: int = 1000, seed: int = 0, tell: Tell = print) -> DemoResult:
    """Make the images and learn the map, or go on with it, then measure it."""
    chosen = _chosen(steps, seed)
    records = run(chosen, folder, until="map", tell=tell)
    return _show(chosen, Path(folder), records["map"].compute_seconds)


def _chosen(steps: int, seed: int) -> Preset:
    chosen = preset("periodic", "demo")
    s = chosen.settings
    train = replace(s.map.train, budget=f"{steps} steps", seed=seed)
    return replace(chosen, settings=replace(s, data=replace(s.data, seed=seed), map=replace(s.map, train=train)))


@torch.no_grad()
def _show(chosen: Preset, folder: Path, compute_seconds: float) -> DemoResult:
    settings = chosen.settings
    rule, sigma = build.constraint(settings.data.rule), settings.map.sigma_max
    mirror = MirrorMap.load(mirror_folder(folder / "map"))
    with open_store(images_file(folder / "data")) as store:
        x = store["test"][:HELD_OUT]
    noise = sigma * torch.randn(x.shape, generator=generator(settings.map.train.seed, "demo"))
    y = mirror.to_mirror(x)
    images = {"x": x, "x + σz": x + noise, "g(x)": y, "f(g(x) + σz)": mirror.to_data(y + noise)}
    distances = {name: rule(batch) for name, batch in images.items() if name != "g(x)"}
    figures = measure(mirror, rule, x, sigma, settings.map.train.seed)
    return DemoResult(figures, images, distances, sigma, compute_seconds)
