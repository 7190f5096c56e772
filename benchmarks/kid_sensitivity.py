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
from rich.progress import track
from rich.table import Table
from torch import Tensor

from edges import features, moved
from map_choices import smooth
from namm.constraints import Burgers
from namm.datasets import burgers_trajectories
from namm.evaluation import Extractor, picture_for
from namm.files import write_json
from namm.numerics import generator

ERRORS = {"smooth": (0.001, 0.002, 0.003, 0.004), "noise": (0.0005, 0.001, 0.002)}
"""Errors that break the rule, by their rms."""
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
        return solved(x[..., 0] + rms * torch.randn(x.shape[:-1], generator=generator(SEED, "start")))

    def with_contrast(factor: float) -> Tensor:
        return x.mean() + factor * (x - x.mean())

    def with_smooth(rms: float) -> Tensor:
        return x + rms * smooth(x.shape, generator(SEED, "smooth"))

    def with_noise(rms: float) -> Tensor:
        return x + rms * torch.randn(x.shape, generator=generator(SEED, "noise"))

    return {
        **{f"fine × {a}": partial(with_fine, a) for a in (0.9, 1.1)},
        "start + 0.002": partial(with_start, 0.002),
        "contrast × 1.003": partial(with_contrast, 1.003),
        **{f"smooth {e:g}": partial(with_smooth, e) for e in ERRORS["smooth"]},
        **{f"noise {e:g}": partial(with_noise, e) for e in ERRORS["noise"]},
    }


def growth(found: Mapping[float, float]) -> float:
    """p of KID ∝ eᵖ between the two largest e; NaN where chance makes one of their KIDs negative."""
    small, large = sorted(found)[-2:]
    if min(found[small], found[large]) <= 0:
        return math.nan
    return math.log(found[large] / found[small]) / math.log(large / small)


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
    before, distances, kids = features(extractor, x), {}, {}
    for name, change in track(changes(x, rule).items(), "changes"):
        made = change()
        distances[name], kids[name] = float(rule(made).mean()), moved(before, features(extractor, made))
    table = Table("change", "mean ℓ", "KID · 10⁴")
    for name, kid in kids.items():
        table.add_row(name, f"{distances[name]:.2e}", f"{1e4 * kid:.3f}")
    powers = {kind: growth({e: kids[f"{kind} {e:g}"] for e in errors}) for kind, errors in ERRORS.items()}
    console = Console(width=120)
    console.print(table)
    for kind, power in powers.items():
        console.print(f"{kind}: KID grows as the power {power:.1f} of the error")
    if options.json:
        write_json(options.json, {"images": options.n, "distance": distances, "kid": kids, "power": powers})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
