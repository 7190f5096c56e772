"""How fast the package trains and samples on one GPU, against what is known of the official code.

    python benchmarks/gpu.py [--quick] [--only NAME ...] [--precision bf16 tf32] [--prepare N] [--json FILE] [--profile]

Trainings go through the package's own loop on random images, sampling through `Diffusion.sample` and `Mirrored`, all of
it compiled or recorded, each in `bf16` (what `auto` means on such a GPU) and in `tf32`. Weights are untrained, and
those that start as zeros are drawn instead: speed does not depend on what they have learned. The same run measures the
peak of bfloat16 matrix products and the bandwidth of memory that figures are shares of. What bounds a row is told by
its kernels:

    launch        kernels fill less than 0.7 of the time
    arithmetic    more than half of their time is in matrix products and convolutions
    memory        otherwise

FLOPs are those of matrix products, convolutions and attention, two per product of two numbers, zeros at the borders and
in banded matrices included. `--profile` prints the heaviest kernels, and sums by their kind. `--prepare N` first runs
the warm-up of every row in a process of its own, N at a time, so that the measured ones find their code compiled:
warm-ups are then those of a warm cache.

Targets are for `bf16`; the exit code is 1 if one is missed, a row fails or the call is asked to stop. `--quick` takes
tiny networks and images to see that all of it runs; its figures mean nothing.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gpu_tools import (
    Bench,
    Figures,
    Row,
    bandwidth,
    bound,
    by_kind,
    calls,
    facts,
    flops,
    number,
    peak_tflops,
    prepare,
    stamp,
    training,
)
from namm.errors import Interrupted
from namm.evaluation import distance_summary
from namm.experiments import build
from namm.experiments.settings import Settings
from namm.generative import Diffusion, EulerMaruyama, Mirrored
from namm.gpu import Recorded
from namm.precision import Precision
from namm.training.maps import project_weights
from namm.training.models import ModelObjective
from namm.training.objectives import MapObjective

# What is measured


def map_step(bench: Bench, experiment: str, name: str) -> Figures:
    """A training of g and f on `experiment` as its preset `name` has it."""
    s = bench.settings(experiment, name)
    objective = map_objective(s)
    shape = build.dataset(s.data).shape
    return training(bench, objective, shape, s.map.train, project_weights(objective.mirror))


def map_objective(s: Settings) -> MapObjective:
    mirror = build.mirror(s.map, build.dataset(s.data).shape[0])
    rule, weights = build.constraint(s.data.rule), build.weights(s.map.weights)
    return MapObjective(mirror, rule, noise=build.noise(s.map), weights=weights, regulariser=build.regulariser(s.map))


def score_step(bench: Bench, name: str) -> Figures:
    """A training of the score network as the preset `name` has it."""
    s = bench.settings("burgers", name)
    model = score_model(s)
    return training(bench, ModelObjective(model), model.sample_shape, s.mdm.train)


def score_model(s: Settings) -> Diffusion:
    return build.diffusion(s.mdm.network, s.mdm.diffusion, build.dataset(s.data).shape, seed=0)


@torch.no_grad()
def network_flops(model: Diffusion) -> float:
    return flops(lambda y: model.denoise(y, torch.ones(len(y))), model.sample_shape)


def sampling(bench: Bench, name: str, steps: int) -> Figures:
    """Steps of Euler–Maruyama with the score network of the preset `name`."""
    model = score_model(bench.settings("burgers", name))
    per_image = network_flops(model)
    bench.place(model)
    few, steps = (2, 4) if bench.quick else (10, steps)

    def draw(steps: int) -> Tensor:
        sampler, size = EulerMaruyama(steps), bench.batch
        return model.sample(size, sampler=sampler, batch_size=size, generator=0, compile=bench.compile, progress=False)

    with bench.arithmetic():
        return calls(bench, partial(draw, few), few * bench.batch, per_image, partial(draw, steps), steps / few)


def whole_samples(bench: Bench, n: int) -> Figures:
    """Samples of the preset `gpu` end to end: the score network by its sampler, then f, then ℓ."""
    s = bench.settings("burgers", "gpu")
    model, mirror = score_model(s), build.mirror(s.map, 1)
    rule, source = build.constraint(s.data.rule), Mirrored(model, mirror)
    steps, n = (2, 2 * bench.batch) if bench.quick else (s.samples.sampler.steps, n)
    with torch.no_grad():
        of_rest = flops(lambda y: rule(mirror.to_data(y)), model.sample_shape)
    per_image = steps * network_flops(model) + of_rest
    bench.place(source)
    rule.to(bench.device)
    sampler = build.sampler(replace(s.samples.sampler, steps=steps))

    def draw(n: int) -> float:
        x = source.sample(
            n, sampler=sampler, batch_size=bench.batch, generator=0, compile=bench.compile, progress=False
        )
        return distance_summary(rule, x).mean

    with torch.no_grad(), bench.arithmetic():
        return calls(bench, partial(draw, bench.batch), bench.batch, per_image, partial(draw, n), n / bench.batch)


def one_map(bench: Bench, side: str) -> Figures:
    """f or g of the paper's pair, without gradients."""
    s = bench.settings("burgers", "paper")
    shape, network = build.dataset(s.data).shape, getattr(build.mirror(s.map, 1), side).eval()
    with torch.no_grad(), bench.arithmetic():
        per_image = flops(network, shape)
        x, placed = bench.images(bench.batch, shape), bench.place(network)
        quick = Recorded(placed) if side == "g" else bench.compiled(placed)  # g has kernels of its own
        return calls(bench, lambda: quick(x), bench.batch, per_image)


def distance(bench: Bench) -> Figures:
    """Burgers' ℓ and its gradient."""
    s = bench.settings("burgers", "paper")
    shape, rule = build.dataset(s.data).shape, build.constraint(s.data.rule)

    per_image = flops(lambda x: rule(x.requires_grad_()).sum().backward(), shape)
    x, compiled = bench.images(bench.batch, shape).requires_grad_(), bench.compiled(rule.to(bench.device))
    with bench.arithmetic():
        return calls(bench, lambda: torch.autograd.grad(compiled(x).sum(), x), bench.batch, per_image)


@dataclass(frozen=True)
class Work:
    """A row to measure; with `n` images it is judged by the seconds they take, otherwise by images per second."""

    name: str
    title: str
    batch: int
    measure: Callable[[Bench], Figures]
    official: float | None = None
    target: float | None = None
    n: int | None = None
    stretch: float | None = None
    """What would be better still."""
    note: str = ""
    """Where the official figure is for something else."""


def works() -> list[Work]:
    burgers = partial(map_step, experiment="burgers", name="paper")
    ours = partial(map_step, experiment="burgers", name="gpu")
    divergence = partial(map_step, experiment="divergence", name="paper")
    score = partial(score_step, name="paper")
    return [
        Work("map", "map step, Burgers'", 128, burgers, 1141, 4600),
        Work("map-16", "map step, Burgers'", 16, burgers, 828, 2500),
        Work("map-gpu", "map step, Burgers', preset gpu", 32, ours),
        Work("map-divergence", "map step, divergence-free", 16, divergence, 49.4, 400),
        Work("score", "score step", 256, score, None, 3000),
        Work("score-64", "score step", 64, score, 988, 2500),
        Work("score-gpu", "score step, preset gpu", 128, partial(score_step, name="gpu")),
        Work(
            *("sampling", "sampling, image-steps", 256, partial(sampling, name="paper", steps=200), 4452, 11_000),
            stretch=15_000,
            note="at batch 128",
        ),
        Work("f", "f", 1024, partial(one_map, side="f"), 35_900, 70_000, note="at batch 256"),
        Work("g", "g", 1024, partial(one_map, side="g"), 42_300, 130_000),
        Work(
            "distance", "Burgers' ℓ and gradient", 128, distance, 713_000, note="of forward Euler, not Crank–Nicolson"
        ),
        Work(
            *("samples", "10 000 samples, seconds", 256, partial(whole_samples, n=10_000), 2247, 30),
            n=10_000,
            note="of 1000 steps of Euler–Maruyama",
        ),
    ]


# What is made of it


def measure(work: Work, precision: Precision, judged: bool, bench: Bench, peak: float) -> Row:
    """One row; whatever goes wrong is kept in it, but for a stop that was asked for."""
    unit = "images/s" if work.n is None else "s"
    target, stretch = (work.target, work.stretch) if judged else (None, None)
    row = Row(work.name, work.title, bench.batch, precision, unit, work.note, work.official, target, stretch)
    bench.fresh()
    try:
        found = work.measure(bench)
    except Interrupted:  # no row's fault
        raise
    except Exception as error:  # out of memory, not compilable: the other rows are worth having
        lines = str(error).strip().splitlines()
        return replace(row, error=": ".join([type(error).__name__, *lines[:1]]))
    finally:
        torch.compiler.reset()
    rate, cuda = found.images_per_second, bench.device.type == "cuda"
    tflops, total = 1e-12 * rate * found.flops_per_image, sum(found.kernels.values())
    heaviest = sorted(found.kernels.items(), key=lambda item: -item[1])[:10]
    return replace(
        row,
        ours=rate if work.n is None else work.n / rate,
        tflops=tflops,
        share=tflops / peak,
        peak_gib=torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        warmup_seconds=found.warmup_seconds,
        bound=bound(found.kernels, 1 / rate) if cuda else "–",
        kernels=tuple((name[:90], 1e3 * t * bench.batch, t / total) for name, t in heaviest),
        kinds={kind: 1e3 * t * bench.batch for kind, t in by_kind(found.kernels).items()},
    )


def alone(names: Sequence[str], precisions: Sequence[str]) -> dict[str, list[str]]:
    """What to give this script for the warm-up of each row by itself."""
    return {
        f"{name}, {how}": ["--only", name, "--precision", how, "--warm"] for name, how in product(names, precisions)
    }


def show(rows: Sequence[Row], known: dict[str, Any], profiles: bool) -> None:
    """The table, the machine, and the heaviest kernels where they are asked for."""
    columns = ("work", "batch", "precision", "ours", "official", "ratio", "TFLOP/s", "of peak", "GiB", "warm-up s")
    table = Table(*columns, "target", "met", "bound by")
    for r in rows:
        figures = (number(r.ours), number(r.official), number(r.ratio, ".2f"), number(r.tflops, ".1f"))
        costs = (number(r.share, ".0%"), number(r.peak_gib, ".2f"), number(r.warmup_seconds, ".1f"))
        goal = number(r.target) + (f" ({number(r.stretch)})" if r.stretch else "")
        met = "failed" if r.error else {True: "yes", False: "no", None: "–"}[r.met]
        table.add_row(r.work, str(r.batch), r.precision, *figures, *costs, goal, met, r.bound)
    Console(width=150).print(table)
    print("images/s; of sampling images × steps per second, of 10 000 samples seconds")
    for work, note in {r.work: r.note for r in rows if r.note}.items():
        print(f"the official figure of {work}: {note}")
    print(stamp(known))
    print(f"measured: {known['peak_tflops']:.4g} TFLOP/s of bf16 products, {known['bandwidth']:.4g} GB/s of memory")
    for r in rows if profiles else ():
        print(f"\n{r.work}, batch {r.batch}, {r.precision}: ms per batch, share of the time in kernels")
        print(", ".join(f"{kind} {milliseconds:.3g}" for kind, milliseconds in r.kinds.items()))
        for name, milliseconds, share in r.kernels:
            print(f"{milliseconds:10.3f} {share:6.1%}  {name}")


def main(arguments: Sequence[str] | None = None, chosen: Sequence[Work] | None = None) -> int:
    """Measure, tell, judge."""
    chosen = works() if chosen is None else chosen
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny networks, not compiled: only to see that it runs")
    parser.add_argument("--only", nargs="+", choices=[work.name for work in chosen], metavar="NAME")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "tf32"), default=["bf16", "tf32"], help="on a GPU")
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile first, in N processes at a time")
    parser.add_argument("--json", type=Path, help="written anew after every row")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="print the ten heaviest kernels of every row")
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        parser.error("there is no GPU here; --quick runs everything in miniature on a CPU")
    if not options.quick:
        importlib.import_module("torch._inductor.compile_fx")  # so that no row's warm-up counts it
    device = torch.device("cuda" if cuda else "cpu")
    precisions: Sequence[Precision] = options.precision if cuda else ("fp32",)
    chosen = [work for work in chosen if work.name in (options.only or [work.name])]
    if options.prepare and not options.quick:
        prepare(__file__, alone([work.name for work in chosen], precisions), options.prepare)
    gauge = Bench(device, 1, "fp32", options.quick)
    peaks = {"peak_tflops": peak_tflops(gauge), "bandwidth": bandwidth(gauge)}
    known: dict[str, Any] = facts(device) | {"quick": options.quick} | peaks
    rows: list[Row] = []
    asked = list(product(chosen, precisions))
    for work, precision in asked:
        batch = work.batch // 8 if options.quick else work.batch
        bench = Bench(device, batch, precision, options.quick, prepares=options.warm)
        try:
            rows.append(measure(work, precision, precision != "tf32", bench, known["peak_tflops"]))
        except Interrupted:
            break
        found = rows[-1].error or f"{number(rows[-1].ours)} {rows[-1].unit}"
        print(f"{work.title}, batch {bench.batch}, {precision}: {found}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(known | {"rows": [row.plain() for row in rows]}, indent=2))
    if options.warm:
        return 1 if len(rows) < len(asked) or any(row.error for row in rows) else 0
    show(rows, known, options.profile)
    if options.quick:
        print("--quick: tiny networks and images; the figures mean nothing beside the official ones and the targets")
    short = [row for row in rows if row.falls_short]
    for row in short:
        print(row.verdict())
    print(f"{len(short)} of {len(rows)} rows fall short" if short else "every target is met")
    if missing := len(asked) - len(rows):
        print(f"asked to stop: {missing} rows are missing")
    return 1 if short or missing else 0


if __name__ == "__main__":
    sys.exit(main())
