"""What KID sees of Burgers' images: how far it moves when real images are changed a little.

Prints, for each change, ℓ of the changed images and KID between them and the same images unchanged, from pairs of
different images alone (`edges.moved`), so that chance cancels:

    fine × a       of the initial state, column 0, the upper half of the wave numbers times a, then solved from there
    start + e      noise of rms e on the initial state, then solved from there: another image that keeps the rule
    contrast × a   all deviations from the mean times a
    smooth e       errors of rms e over 2 to 8 pixels, as a diffusion model makes them (`map_choices.smooth`)
    noise e        white noise of rms e

and by which power of e the last two grow from the second largest e to the largest.

    python benchmarks/kid_sensitivity.py [--n 400] [--json FILE]

It needs the Inception weights, and on two CPU cores a minute for every change of 400 images.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from edges import moved
from map_choices import smooth
from namm.constraints import Burgers
from namm.datasets import burgers_trajectories
from namm.evaluation import Extractor, picture_for
from namm.files import write_json
from namm.numerics import generator

SMOOTH, NOISE = (0.001, 0.002, 0.003, 0.004), (0.0005, 0.001, 0.002)
"""Errors by their rms."""
SEED = 0


def changes(x: Tensor, rule: Burgers) -> dict[str, Callable[[], Tensor]]:
    """Ways to change images (N, 1, H, W), by name."""

    def solved(start: Tensor) -> Tensor:
        return rule.project(torch.cat([start[..., None], x[..., 1:]], dim=-1))

    def with_fine(factor: float) -> Tensor:
        waves = torch.fft.rfft(x[..., 0])
        upper = torch.fft.rfftfreq(x.shape[-2]) >= 1 / 4
        return solved(torch.fft.irfft(torch.where(upper, factor * waves, waves), n=x.shape[-2]))

    def with_start(rms: float) -> Tensor:
        noise = torch.randn(x.shape[:-1], generator=generator(SEED, "start"))
        return solved(x[..., 0] + rms * noise)

    def with_smooth(rms: float) -> Tensor:
        return x + rms * smooth(x.shape, generator(SEED, "smooth"))

    def with_noise(rms: float) -> Tensor:
        return x + rms * torch.randn(x.shape, generator=generator(SEED, "noise"))

    mean = x.mean()
    return {
        **{f"fine × {a}": partial(with_fine, a) for a in (0.9, 1.1)},
        "start + 0.002": partial(with_start, 0.002),
        "contrast × 1.003": partial(torch.lerp, mean, x, 1.003),
        **{_smooth(e): partial(with_smooth, e) for e in SMOOTH},
        **{_noise(e): partial(with_noise, e) for e in NOISE},
    }


def _smooth(rms: float) -> str:
    return f"smooth {rms:g}"


def _noise(rms: float) -> str:
    return f"noise {rms:g}"


def growth(found: Mapping[str, float], errors: Sequence[float], name: Callable[[float], str]) -> float:
    """p of KID ∝ eᵖ between the two largest errors; NaN where chance makes one of them negative."""
    (small, before), (large, after) = ((e, found[name(e)]) for e in errors[-2:])
    return math.log(after / before) / math.log(large / small) if min(before, after) > 0 else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.n < 2:
        parser.error("KID needs at least two images.")
    x, rule = burgers_trajectories(options.n, split="test", seed=SEED), Burgers()
    extractor = Extractor(picture_for(rule))

    def features(images: Tensor) -> Tensor:
        return torch.cat(list(extractor.chunks(images))).double()

    before, distances, kids = features(x), {}, {}
    table = Table("change", "mean ℓ", "KID · 10⁴")
    for name, change in changes(x, rule).items():
        made = change()
        distances[name], kids[name] = float(rule(made).mean()), moved(before, features(made))
        table.add_row(name, f"{distances[name]:.2e}", f"{1e4 * kids[name]:.3f}")
        print(name, distances[name], kids[name], flush=True)
    console = Console(width=120)
    console.print(table)
    powers = {"smooth": growth(kids, SMOOTH, _smooth), "noise": growth(kids, NOISE, _noise)}
    console.print(", ".join(f"KID of {name} errors grows as their power {p:.1f}" for name, p in powers.items()))
    if options.json:
        write_json(options.json, {"images": options.n, "distance": distances, "kid": kids, "power": powers})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
