"""Which map learns most in the same minutes? Short trainings that differ in a few numbers.

    python benchmarks/map_choices.py CHOICE [CHOICE …] [--minutes 0.75] [--prepare N] [--preset gpu]
                                     [--out runs/choices] [--json FILE]

A choice is `as-is`, or says what to change in the preset of Burgers' equation, joined by commas:

    as-is    batch=32,rate=1e-3    filters=32,blocks=9,normalisation=instance    weight=10,sigma=0.05

Every choice gets the same minutes on the clock, compilation aside, and is measured on the same validation images:

    mean ℓ(f(g(x) + σ z)) at five σ, the cycle error, the rms error of f(g(x)) in the first four columns, and the total
    variation of f(g(x) + 0.1 z) over the data's

`--prepare N` first compiles each choice in a process of its own, N at a time, so that those measured find their code.
A finished training in --out is read back.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gpu_tools import prepare
from namm.datasets import open_store, write_store
from namm.datasets.batches import Images, map_images, to_tensor
from namm.errors import TrainingError, UsageError
from namm.experiments import build
from namm.experiments.map_stage import learn_map, measure
from namm.experiments.presets import PRESETS, preset
from namm.experiments.settings import MapSettings, Settings
from namm.experiments.trained import device
from namm.files import write_json
from namm.maps import MirrorMap

NOISE = (0.0, 0.005, 0.02, 0.05, 0.1)
"""σ at which ℓ is measured."""
AS_IS = "as-is"
PLACES = {
    "batch": ("train", "batch_size", int),
    "rate": ("train", "learning_rate", float),
    "filters": ("f", "filters", int),
    "blocks": ("f", "blocks", int),
    "downsamplings": ("f", "downsamplings", int),
    "boundary": ("f", "boundary", str),
    "normalisation": ("f", "normalisation", str),
    "weight": ("weights", "constraint", float),
    "sigma": ("", "sigma_max", float),
}
"""What a choice may change: the part of the map's settings, the field there, what it is."""
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
    cycle_error: float = math.nan
    first_columns: float = math.nan
    total_variation: float = math.nan
    failed: str = ""


def changed(settings: MapSettings, choice: str) -> MapSettings:
    """`settings` with what `choice` says."""
    for pair in choice.split(",") if choice != AS_IS else ():
        name, _, value = pair.partition("=")
        if name not in PLACES or not value:
            raise UsageError(
                f"the choice {choice!r} is neither {AS_IS} nor made of NAME=VALUE with {', '.join(PLACES)}."
            )
        part, field, kind = PLACES[name]
        own: Any = {field: kind(value)}
        whole: Any = {part: replace(getattr(settings, part), **own)} if part else own
        settings = replace(settings, **whole)
    return settings


def study(base: Settings, choice: str, data: Images, held_out: Images, out: Path) -> Row:
    """Train by one choice, and measure."""
    settings = replace(base, map=changed(base.map, choice))
    try:
        mirror, trained = learn_map(settings, data, held_out, out / choice)
    except TrainingError as error:
        return Row(choice, failed=str(error))
    rule = build.constraint(settings.data.rule).to(device())
    found = [measure(mirror.to(device()), rule, held_out, sigma, SEED) for sigma in NOISE]
    return Row(
        choice,
        trained.steps,
        trained.images,
        trained.compute_seconds,
        tuple(each["distance_map"] for each in found),
        found[0]["cycle_error"],
        error_of_first(mirror, held_out),
        found[-1]["total_variation"],
    )


def error_of_first(mirror: MirrorMap, images: Images) -> float:
    """The rms error of f(g(x)) in the first columns."""
    made = map_images(nn.Sequential(mirror.g, mirror.f), images, device(), "f∘g")
    return float((torch.from_numpy(made) - to_tensor(images[:]))[..., :FIRST].square().mean().sqrt())


def unlike(settings: MapSettings, choices: Sequence[str]) -> list[str]:
    """Those of `choices` whose code is not that of one before them."""
    kinds = {}
    for choice in reversed(choices):
        own = changed(settings, choice)
        kinds[own.f, own.train.batch_size] = choice
    return list(kinds.values())[::-1]


def show(rows: Sequence[Row]) -> None:
    """The table."""
    columns = ("steps", "images", "s", *(f"ℓ at σ = {sigma:g}" for sigma in NOISE), "cycle error", "first columns")
    table = Table("choice", *columns, "total variation")
    for row in rows:
        costs = (str(row.steps), f"{row.images:,}", f"{row.seconds:.1f}")
        distances = [f"{distance:.3e}" for distance in row.distances] or ["diverged"] + ["–"] * (len(NOISE) - 1)
        table.add_row(
            row.choice,
            *costs,
            *distances,
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
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile first, N choices at a time")
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--out", type=Path, default=Path("runs/choices"))
    parser.add_argument("--json", type=Path, help="written anew after every choice")
    options = parser.parse_args(arguments)
    settings = base or preset("burgers", options.preset).settings
    for choice in options.choices:
        changed(settings.map, choice)
    budget = f"{options.steps} steps" if options.steps else f"{options.minutes} minutes"
    settings = replace(settings, map=replace(settings.map, train=replace(settings.map.train, budget=budget)))
    if options.prepare:
        few, folder = ["--preset", options.preset, "--steps", "3", "--out"], options.out / "prepared"
        kinds = unlike(settings.map, options.choices)
        prepare(__file__, {kind: [kind, *few, str(folder / kind)] for kind in kinds}, options.prepare)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = {"train": settings.data.n_train, "val": settings.data.n_val}
    file = write_store(options.out / "images.h5", build.dataset(settings.data), sizes, seed=settings.data.seed)
    rows: list[Row] = []
    with open_store(file) as store:
        for choice in options.choices:
            rows.append(study(settings, choice, store["train"], store["val"], options.out))
            print(rows[-1], flush=True)
            if options.json:
                write_json(options.json, [asdict(row) for row in rows])
    show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
