"""Which map learns most in the same minutes? Short trainings that differ in a few numbers.

    python benchmarks/map_choices.py CHOICE [CHOICE …] [--minutes 0.75 | --steps N] [--tune N] [--prepare N]
                                     [--preset gpu] [--out runs/choices] [--json FILE]

A choice is `as-is`, or says what to change in the preset of Burgers' equation, joined by commas:

    as-is    batch=32,rate=1e-3    filters=32,blocks=9,normalisation=instance    g-layers=2,weight=10,sigma=0.05

Every choice gets the same minutes on the clock, compilation aside, or the same steps, and is measured on the same
validation images:

    mean ℓ(f(g(x) + σ z)) at four σ, mean ℓ of what stands for samples, the cycle error, the rms error of f(g(x)) in the
    first four columns, and the total variation of f(g(x) + 0.1 z) over the data's

With `--tune N` f is then finetuned for N steps, as the preset or `tune-sigma=0.005,tune-weight=10,tune-rate=1e-4` has
it, and measured again. There is no model to draw samples from. g(x + e) takes their place, e smooth: a full-size model
errs so, and f leaves as much of it. Choices that differ in their finetuning alone share a map.

`--prepare N` first compiles each choice in a process of its own, N at a time, so that those measured find their code.
A finished training in --out is read back.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gpu_tools import prepare
from namm.constraints import Constraint
from namm.datasets import open_store, write_store
from namm.datasets.batches import Images, map_images, to_tensor
from namm.errors import TrainingError, UsageError
from namm.evaluation import distance_summary
from namm.experiments import build
from namm.experiments.map_stage import learn_map, measure
from namm.experiments.presets import PRESETS, preset
from namm.experiments.samples_stage import finetune
from namm.experiments.settings import Settings
from namm.experiments.trained import device
from namm.files import write_json
from namm.maps import MirrorMap
from namm.numerics import generator
from namm.training.models import mirror_images
from namm.training.trainer import TrainResult

ERROR, LENGTHS = 0.002, (2.0, 8.0)
"""What stands for a model's errors: their rms, and the shortest and longest distance over which they change, pixels."""
NOISE = (0.0, 0.005, 0.02, 0.1)
"""σ at which ℓ is measured."""
AS_IS, TUNE = "as-is", "tune-"
PLACES: dict[str, tuple[str, type]] = {
    "batch": ("map.train.batch_size", int),
    "rate": ("map.train.learning_rate", float),
    "g-layers": ("map.g.layers", int),
    "g-filters": ("map.g.filters", int),
    "filters": ("map.f.filters", int),
    "blocks": ("map.f.blocks", int),
    "downsamplings": ("map.f.downsamplings", int),
    "boundary": ("map.f.boundary", str),
    "activation": ("map.f.activation", str),
    "normalisation": ("map.f.normalisation", str),
    "weight": ("map.weights.constraint", float),
    "sigma": ("map.sigma_max", float),
    TUNE + "rate": ("finetune.train.learning_rate", float),
    TUNE + "weight": ("finetune.weights.constraint", float),
    TUNE + "sigma": ("finetune.sigma_max", float),
}
"""What a choice may change: where that is in the settings, and what it is."""
SEED = 1000
"""Of the noise that is measured with."""
FIRST = 4
"""Columns that hold the initial state and what is as rough."""


@dataclass(frozen=True)
class Row:
    """What one choice reached, or why it ended early."""

    choice: str
    steps: int = 0
    images: int = 0
    seconds: float = 0.0
    distances: tuple[float, ...] = ()
    of_samples: float = math.nan
    cycle_error: float = math.nan
    first_columns: float = math.nan
    total_variation: float = math.nan
    failed: str = ""


def changed(settings: Settings, choice: str) -> Settings:
    """`settings` with what `choice` says."""
    for pair in choice.split(",") if choice != AS_IS else ():
        name, _, value = pair.partition("=")
        if name not in PLACES or not value:
            raise UsageError(
                f"the choice {choice!r} is neither {AS_IS} nor made of NAME=VALUE with {', '.join(PLACES)}."
            )
        place, kind = PLACES[name]
        settings = _with(settings, place.split("."), kind(value))
    return settings


def _with(owner: Any, path: Sequence[str], value: object) -> Any:
    first, *rest = path
    return replace(owner, **{first: _with(getattr(owner, first), rest, value) if rest else value})


def map_of(choice: str) -> str:
    """What a choice says of the map."""
    return ",".join(pair for pair in choice.split(",") if not pair.startswith(TUNE)) or AS_IS


def study(
    base: Settings, choice: str, data: Images, held_out: Images, out: Path, *, told: bool, tuned: bool
) -> Iterator[Row]:
    """Train by one choice, and measure its map, unless that is `told`, and f after its finetuning, if it is `tuned`."""
    settings = changed(base, choice)
    try:
        rule = build.rule_of(settings.data, out.joinpath)
        mirror, trained = learn_map(settings, rule, data, held_out, out / map_of(choice))
        if not told:
            yield measured(map_of(choice), trained, mirror, rule, held_out)
        if tuned:
            samples = like_samples(mirror, data, "train")
            trained = finetune(settings, rule, mirror, (data, samples), out / f"{choice}-finetuned")
            yield measured(f"{choice}, finetuned", trained, mirror, rule, held_out)
    except TrainingError as error:
        yield Row(choice, failed=str(error))


def like_samples(mirror: MirrorMap, images: Images, split: str) -> Tensor:
    """Mirror images of `images` as they would be if a model had made them, with errors of their `split`."""
    x = to_tensor(images[:])
    x = x + ERROR * smooth(x.shape, generator(SEED, "samples", split))
    return torch.from_numpy(mirror_images(mirror, x, device()))


def smooth(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """Random images (N, C, H, W) of rms 1, each smooth over a length of its own."""
    shortest, longest = LENGTHS
    length = shortest * (longest / shortest) ** torch.rand(shape[0], 1, 1, 1, generator=rng)
    waves = torch.fft.fftfreq(shape[-2])[:, None].square() + torch.fft.rfftfreq(shape[-1]).square()
    kept = torch.exp(-2 * (math.pi * length).square() * waves)
    made = torch.fft.irfft2(torch.fft.rfft2(torch.randn(shape, generator=rng)) * kept, s=shape[-2:])
    return made / made.square().mean((1, 2, 3), keepdim=True).sqrt()


def measured(name: str, trained: TrainResult, mirror: MirrorMap, rule: Constraint, held_out: Images) -> Row:
    """What a training reached."""
    found = [measure(mirror.to(device()), rule, held_out, sigma, SEED) for sigma in NOISE]
    return Row(
        name,
        trained.steps,
        trained.images,
        trained.compute_seconds,
        tuple(each["distance_map"] for each in found),
        distance_summary(
            rule, map_images(mirror.to_data, like_samples(mirror, held_out, "val"), device(), "f"), device=device()
        ).mean,
        found[0]["cycle_error"],
        error_of_first(mirror, held_out),
        found[-1]["total_variation"],
    )


def error_of_first(mirror: MirrorMap, images: Images) -> float:
    """The rms error of f(g(x)) in the first columns."""
    made = map_images(nn.Sequential(mirror.g, mirror.f), images, device(), "f∘g")
    return float((torch.from_numpy(made) - to_tensor(images[:]))[..., :FIRST].square().mean().sqrt())


def unlike(settings: Settings, choices: Sequence[str]) -> list[str]:
    """Those of `choices` whose code is not that of one before them."""
    kinds = {}
    for choice in reversed(choices):
        own = changed(settings, choice).map
        kinds[own.g, own.f, own.train.batch_size] = choice
    return list(kinds.values())[::-1]


def show(rows: Sequence[Row]) -> None:
    """The table."""
    distances = (*(f"ℓ at σ = {sigma:g}" for sigma in NOISE), "as of samples")
    columns = ("choice", "steps", "images", "s", *distances, "cycle error", "first columns", "total variation")
    table = Table(*columns)
    table.columns[0].overflow = "fold"
    for row in rows:
        costs = (str(row.steps), f"{row.images:,}", f"{row.seconds:.1f}")
        told = [f"{distance:.3e}" for distance in (*row.distances, row.of_samples)]
        if row.failed:
            told = ["diverged", *["–"] * len(NOISE)]
        table.add_row(
            row.choice,
            *costs,
            *told,
            f"{row.cycle_error:.2%}",
            f"{row.first_columns:.2e}",
            f"{row.total_variation:.3f}",
        )
    Console(width=160).print(table)


def main(arguments: Sequence[str] | None = None, base: Settings | None = None) -> int:
    """Train and measure every choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="+", metavar="CHOICE")
    parser.add_argument("--minutes", type=float, default=0.75)
    parser.add_argument("--steps", type=int, help="in place of minutes")
    parser.add_argument("--tune", type=int, default=0, metavar="N", help="then finetune f for so many steps")
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile first, N choices at a time")
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--out", type=Path, default=Path("runs/choices"))
    parser.add_argument("--json", type=Path, help="written anew after every choice")
    options = parser.parse_args(arguments)
    settings = base or preset("burgers", options.preset).settings
    for choice in options.choices:
        changed(settings, choice)
    budget = f"{options.steps} steps" if options.steps else f"{options.minutes} minutes"
    settings = _with(settings, ("map", "train", "budget"), budget)
    if options.tune:
        settings = _with(settings, ("finetune", "train", "budget"), f"{options.tune} steps")
    if options.prepare:
        tune = ["--tune", "3"] if options.tune else []
        few, folder = ["--preset", options.preset, "--steps", "3", *tune, "--out"], options.out / "prepared"
        kinds = unlike(settings, options.choices)
        prepare(__file__, {kind: [kind, *few, str(folder / kind)] for kind in kinds}, options.prepare)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = {"train": settings.data.n_train, "val": settings.data.n_val}
    file = write_store(options.out / "images.h5", build.dataset(settings.data), sizes, seed=settings.data.seed)
    rows: list[Row] = []
    with open_store(file) as store:
        for choice in options.choices:
            told = map_of(choice) in {row.choice for row in rows}  # finetunings share a map
            images = (store["train"], store["val"])
            for row in study(settings, choice, *images, options.out, told=told, tuned=options.tune > 0):
                rows.append(row)
                print(row, flush=True)
                if options.json:
                    write_json(options.json, [asdict(row) for row in rows])
    show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
