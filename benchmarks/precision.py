"""Does the fast path of training learn the same as the plain one?

    fast:   precision bf16 (autocast in f and in the score network, TF32 for what stays float32), compiled, and on a
            GPU the score network recorded
    plain:  precision fp32, not compiled

Each seed trains both, for the same number of steps, from the same weights, on the same batches and with the same noise:
first the map, then the score network, both on g(x) of the *plain* map, so that they see the same images. Data are the
same for all seeds. What is learned is measured on validation images, in plain float32 and with the same draws for all:

    mean ℓ(f(g(x) + σ z)) at σ = σ_max and at σ = 0, the cycle and the constraint loss, the loss of the score network

    python benchmarks/precision.py [--seeds 0 1 2] [--map-steps 3000] [--score-steps 3000] [--out runs/precision]
                                   [--figure FILE] [--json FILE] [--preset gpu] [--size PIXELS] [--no-compile]

Only the masks of dropout may differ between the paths, where compiled code draws them in another order. A finished
training in --out is read back. With r the mean over seeds of log(fast/plain) and s its standard error, the exit code
is 1 if for any of these figures exp(r) exceeds 1 + max(0.05, 2 s). Few seeds that scatter widely therefore pass without
showing much.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from namm import train_model
from namm.datasets import open_store, write_store
from namm.datasets.batches import Images
from namm.experiments.burgers import BurgersData
from namm.experiments.engine import build, build_models
from namm.experiments.engine.run_parts import device, untrained
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.stages.map import learn_map, measure
from namm.experiments.presets import PRESETS, Preset, preset
from namm.files import write_json
from namm.maps import MirrorMap
from namm.numerics import arithmetic
from namm.training.checkpoint import weights_digest
from namm.training.log import read_metrics
from namm.training.objectives import MapObjective, Objective
from namm.training.settings import TrainSettings
from namm.training.train_model import ModelObjective, load_model, mirror_images
from namm.training.trainer import validate
from shared import facts, stamp

PATHS: dict[str, dict[str, Any]] = {
    "plain": {"precision": "fp32", "compile": False},
    "fast": {"precision": "bf16", "compile": True},
}
"""The plain one first: its map makes the images of both score networks."""
FIGURES = {
    "distance_noisy": "ℓ at σ_max",
    "distance_clean": "ℓ at σ = 0",
    "cycle": "cycle loss",
    "constraint": "constraint loss",
    "score": "score loss",
}
CURVES = {"cycle": ("map", "val/cycle"), "constraint": ("map", "val/constraint"), "score": ("score", "val/loss")}
"""Those of them that a training logs: its folder, and the name in its log."""
LEAST, ERRORS = 0.05, 2.0
"""What the fast path may be worse by: this part, or that many standard errors."""
VALIDATIONS = 20
DRAWS, MEASURED = 4, 1000
"""Draws of noise over which a loss is averaged, and their first seed."""


@dataclass(frozen=True)
class Row:
    """What one path learned from one seed, and a digest of the weights that each training started from."""

    path: str
    seed: int
    map_start: str
    score_start: str
    figures: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """One figure over seeds."""

    figure: str
    ratio: float  # exp of `log_ratio`
    log_ratio: float  # mean over seeds of log(fast/plain)
    standard_error: float  # of that mean; 0 for a single seed
    ratio_of_means: float  # of fast over plain
    spread: float | None  # standard deviation over seeds of log(plain); none for a single seed
    limit: float  # what the ratio may be
    agrees: bool


# Training


def settings_of(base: Settings, path: str, seed: int, options: argparse.Namespace) -> Settings:
    """`base` as that path trains it: what touches neither precision nor speed is the same for both."""
    how = PATHS[path] if options.compile else PATHS[path] | {"compile": False}

    def shared(train: TrainSettings, steps: int) -> TrainSettings:
        return replace(train, budget=f"{steps} steps", seed=seed, milestones=0, validations=VALIDATIONS, **how)

    return replace(
        base,
        map=replace(base.map, train=shared(base.map.train, options.map_steps)),
        mdm=replace(base.mdm, train=shared(base.mdm.train, options.score_steps)),
    )


def learn_score(
    s: Settings, data: Images, held_out: Images, mirror: MirrorMap, folder: Path
) -> tuple[ModelObjective, str]:
    """The trained score network with its loss, and the digest of its first weights."""
    model, trained = (untrained("mdm", s, build.dataset(s.data).shape) for _ in range(2))
    start = weights_digest(model)
    train_model(model, data, mirror, settings=s.mdm.train, validation=held_out, folder=folder)
    load_model(trained, folder)
    return ModelObjective(trained).to(device()), start


def study(base: Settings, options: argparse.Namespace) -> list[Row]:
    """Both paths for every seed; trained where they are not."""
    sizes = {"train": base.data.n_train, "val": base.data.n_val}
    images, quiet = build.dataset(base.data), not sys.stdout.isatty()
    file, found = write_store(options.out / "images.h5", images, sizes, seed=base.data.seed, quiet=quiet), []
    with open_store(file) as store:
        data, held_out = store["train"], store["val"]
        for seed in options.seeds:
            plain: MirrorMap | None = None
            for path in PATHS:
                s, folder = settings_of(base, path, seed, options), training_folder(options.out, path, seed)
                map_start = weights_digest(build_models.mirror(s.map, data))
                rule = build.rule_of(s.data, options.out.joinpath)
                mirror, *_ = learn_map(s.map, rule, data, held_out, folder / "map")
                plain = plain or mirror
                model, score_start = learn_score(s, data, held_out, plain, folder / "score")
                figures = measure_all(s, mirror, model, plain, held_out)
                found.append(Row(path, seed, map_start, score_start, figures))
                print(found[-1], flush=True)
    return found


def training_folder(out: Path, path: str, seed: int) -> Path:
    """Where the two trainings of a path are kept."""
    return out / f"{path}-{seed}"


# Measuring, in plain float32


def measure_all(
    s: Settings, mirror: MirrorMap, model: ModelObjective, plain: MirrorMap, held_out: Images
) -> dict[str, float]:
    """Figures of the map, and the loss of the score network on g(x) of the plain one."""
    rule = build.placed(build.constraint(s.data.rule))
    noise = build_models.noise(s.map.noise, s.map.sigma_max)
    distances = measure(mirror, rule, held_out, noise, MEASURED)
    objective = MapObjective(mirror, rule, noise=noise, regulariser=build_models.regulariser(s.map))
    losses = mean_losses(objective, held_out, s.map.train)
    y = mirror_images(plain, held_out, device())
    return {
        "distance_noisy": distances["distance_map"],
        "distance_clean": distances["distance_cycle"],
        "cycle": losses["val/cycle"],
        "constraint": losses["val/constraint"],
        "score": mean_losses(model, y, s.mdm.train)["val/loss"],
    }


def mean_losses(objective: Objective, images: Images, train: TrainSettings) -> dict[str, float]:
    """Every term on `images`, over the same draws for whatever is measured."""
    with arithmetic("fp32", device()):
        found = [
            validate(objective, (images,), replace(train, seed=MEASURED + k), device(), torch.float32)
            for k in range(DRAWS)
        ]
    return {name: float(np.mean([losses[name] for losses in found])) for name in found[0]}


# Judging


def summarise(figure: str, fast: Sequence[float], plain: Sequence[float]) -> Summary:
    """The figures of both paths, one for each seed in the same order, against each other."""
    logs = np.array([_log(a) - _log(b) for a, b in zip(fast, plain, strict=True)])
    log_ratio, several = float(logs.mean()), len(logs) > 1
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs)) if several else 0.0
    spread = float(np.std([_log(value) for value in plain], ddof=1)) if several else None
    ratio, limit = math.exp(log_ratio), 1 + max(LEAST, ERRORS * error)
    means = float(np.mean(fast) / np.mean(plain))
    return Summary(figure, ratio, log_ratio, error, means, spread, limit, ratio <= limit)


def summaries(found: Sequence[Row]) -> list[Summary]:
    """One for each figure."""
    by_path = {path: [row.figures for row in found if row.path == path] for path in PATHS}
    return [
        summarise(name, *([figures[name] for figures in by_path[path]] for path in ("fast", "plain")))
        for name in FIGURES
    ]


def _log(value: float) -> float:
    """log of a positive number; what is none agrees with nothing."""
    return math.log(value) if 0 < value < math.inf else math.nan


# Showing


def show(found: Sequence[Row], judged: Sequence[Summary]) -> None:
    """Two tables: every figure, and the paths against each other."""
    console = Console(width=110)
    table = Table("path", "seed", *FIGURES.values())
    for row in found:
        table.add_row(row.path, str(row.seed), *(f"{row.figures[name]:.4e}" for name in FIGURES))
    console.print(table)
    columns = ("fast / plain", "log", "of the means", "spread of plain's log", "at most", "agrees")
    table = Table("", *columns, title="the fast path over the plain one, mean over seeds", title_justify="left")
    for s in judged:
        table.add_row(
            *(FIGURES[s.figure], f"{s.ratio:.4f}", f"{s.log_ratio:+.4f} ± {s.standard_error:.4f}"),
            *(f"{s.ratio_of_means:.4f}", "–" if s.spread is None else f"{s.spread:.4f}"),
            *(f"{s.limit:.4f}", "yes" if s.agrees else "no"),
        )
    console.print(table)


def figure(out: Path, seeds: Sequence[int], path: Path) -> None:
    """What each training logged of its validation images, in its own arithmetic: a thin line per seed."""
    from namm.report.figures.base import BASELINE_COLOUR, OURS_COLOUR, look, new_figure, save

    colours: Mapping[str, str] = {"plain": BASELINE_COLOUR, "fast": OURS_COLOUR}
    with look("light"):
        drawing = new_figure(2.1 * len(CURVES) + 0.4)
        axes = drawing.subplots(len(CURVES), 1)
        for axis, (quantity, (training, key)) in zip(axes, CURVES.items(), strict=True):
            for name, colour in colours.items():
                for seed in seeds:
                    lines = read_metrics(training_folder(out, name, seed) / training / "metrics.jsonl")
                    points = [(line["step"], line[key]) for line in lines if key in line]
                    axis.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, label=name)
            axis.set(yscale="log", ylabel=f"{FIGURES[quantity]}, validation")
        axes[-1].set_xlabel("steps")
        handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
        drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
        save(drawing, path)


def main(arguments: Sequence[str] | None = None, base: Preset | None = None) -> int:
    """Train what is missing, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for name in ("--map-steps", "--score-steps"):
        parser.add_argument(name, type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="gpu", help="of Burgers' equation")
    parser.add_argument("--size", type=int, help="pixels a side, the preset's by default; the time step is kept")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do not compile the fast path")
    options = parser.parse_args(arguments)
    settings = (base or preset("burgers", options.preset)).settings
    if options.size and isinstance(settings.data, BurgersData):
        settings = replace(settings, data=replace(settings.data, size=options.size))
    options.out.mkdir(parents=True, exist_ok=True)
    found = study(settings, options)
    judged = summaries(found)
    show(found, judged)
    where = facts(device())
    print(stamp(where))
    if options.json:
        write_json(
            options.json, where | {"rows": [asdict(row) for row in found], "summaries": [asdict(s) for s in judged]}
        )
    if options.figure:
        figure(options.out, options.seeds, options.figure)
    return 0 if all(s.agrees for s in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
