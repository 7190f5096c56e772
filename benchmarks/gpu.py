"""How fast the package trains and samples on one GPU, against what is known of the official code and against itself.

    python benchmarks/gpu.py [--quick] [--only NAME ...] [--precision bf16 tf32] [--prepare N] [--json FILE] [--profile]

Rows, all of them unless `--only` names some: trainings go through the package's own loop on random images, sampling
through `Diffusion.sample` and `Mirrored`, all of it compiled or recorded, each in `bf16` (what `auto` means on such a
GPU) and in `tf32`. Weights are untrained, and those that start as zeros are drawn instead: speed does not depend on
what they have learned. The same run measures the peak of bfloat16 matrix products and the bandwidth of memory that
figures are shares of. What bounds a row follows from its kernels:

    launch        kernels fill less than 0.7 of the time
    arithmetic    more than half of their time is in matrix products and convolutions
    memory        otherwise

FLOPs are those of matrix products, convolutions and attention, two per product of two numbers, zeros at the borders and
in banded matrices included. `--profile` prints the heaviest kernels, and sums by their kind. `--prepare N` first runs
the warm-up of every row in a process of its own, N at a time, so that the measured ones find their code compiled:
warm-ups are then those of a warm cache.

Comparisons with a baseline of the same run, where `--only` names them:

    update              all weights updated as one vector, against Adam on each of them; also without a GPU
    muon                Muon's update, all matrices of a shape at once, against torch's, one by one, and against Adam's;
                        also without a GPU
    closed-form         g in closed form, against autograd of its potential; also without a GPU
    recorded            the score network recorded with our kernels, against compiled by torch
    implicit-step       an implicit step of ℓ in one kernel, against a kernel for every sweep
    warm-up             seconds from the start of a process to its first step, recorded against compiled
    posterior-memory    memory of 32 posterior samples of 128×256×2 in bf16, against float32
    forward-euler       ℓ of Burgers' and its gradient with implicit steps, against explicit ones, which are what the
                        official code computes in their place; also without a GPU
    mmd                 seconds and memory of MMD² between 10 000 and 10 000 images in blocks, against `torch.cdist` for
                        whole matrices, each in a process of its own, on the CPU; at most 120 s and 3 GiB

Targets are for `bf16`; the exit code is 1 if one is missed, a row fails or the call is asked to stop. `--quick` takes
tiny networks and images to see that all of it runs; its figures mean nothing.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpu_comparisons import CHILDREN, SECTIONS, Comparison
from gpu_tools import Bench, Figures, bound, by_kind, number, prepare
from gpu_works import distance, map_step, one_map, sampling, score_step, whole_samples
from namm.errors import Interrupted
from namm.precision import Precision
from shared import facts, stamp

WITHOUT_GPU = {"update", "closed-form", "forward-euler", "mmd"}


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
        Work("g", "g", 1024, partial(one_map, side="g"), 42_300, 60_000),
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


@dataclass(frozen=True)
class Row:
    """A row of the table; `ours`, `official` and `target` are images/s, or seconds where `unit` says so."""

    name: str
    work: str
    batch: int
    precision: str
    unit: str
    note: str
    official: float | None
    target: float | None
    stretch: float | None
    ours: float | None = None
    tflops: float | None = None
    share: float | None = None
    peak_gib: float | None = None
    warmup_seconds: float | None = None
    bound: str = "–"
    kernels: tuple[tuple[str, float, float], ...] = ()
    """The ten heaviest: name, milliseconds per batch, share of the time of all."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds per batch by kind of kernel."""
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster than the official code."""
        if self.ours is None or self.official is None:
            return None
        return self.official / self.ours if self.unit == "s" else self.ours / self.official

    @property
    def met(self) -> bool | None:
        """Whether the target is met, where there is one and a figure."""
        if self.ours is None or self.target is None:
            return None
        return self.ours <= self.target if self.unit == "s" else self.ours >= self.target

    @property
    def falls_short(self) -> bool:
        """Whether it failed or missed its target."""
        return self.error is not None or self.met is False

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ratio": self.ratio, "met": self.met}

    def line(self) -> str:
        """All that was found, in a line."""
        figure = self.error or f"{number(self.ours)} {self.unit}"
        return f"{self.work}, batch {self.batch}, {self.precision}: {figure}"

    def verdict(self) -> str:
        """What is to be said of it where it falls short."""
        return f"failed: {self.line()}" if self.error else f"missed: {self.line()}, target {number(self.target)}"


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


def warm_up_calls(names: Sequence[str], precisions: Sequence[str]) -> dict[str, list[str]]:
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


def parsed(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """The options, refused where they need a GPU that is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny networks, not compiled: only to see that it runs")
    parser.add_argument("--only", nargs="+", choices=[*names, *SECTIONS], metavar="NAME")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "tf32"), default=["bf16", "tf32"], help="on a GPU")
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile first, in N processes at a time")
    parser.add_argument("--json", type=Path, help="written anew after every row")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="print the ten heaviest kernels of every row")
    options = parser.parse_args(arguments)
    asked = set((options.child or [])[:1] or options.only or names)
    if not torch.cuda.is_available() and not options.quick and not asked <= WITHOUT_GPU:
        parser.error("there is no GPU here; --quick runs everything in miniature on a CPU")
    return options


class Report:
    """What is measured, printed and written as soon as it is there."""

    def __init__(self, known: dict[str, Any], file: Path | None) -> None:
        self.known, self.file = known, file
        self.rows: list[Row] = []
        self.comparisons: list[Comparison] = []

    def add(self, measured: Row | Comparison) -> None:
        """Keep a row or a comparison."""
        if isinstance(measured, Row):
            self.rows.append(measured)
        else:
            self.comparisons.append(measured)
        print(measured.line(), flush=True)
        found = {"rows": [r.plain() for r in self.rows], "comparisons": [c.plain() for c in self.comparisons]}
        if self.file:
            self.file.write_text(json.dumps(self.known | found, indent=2))

    def judge(self, missing: int) -> int:
        """Print what falls short; the exit code."""
        if self.known["quick"]:
            print("--quick: tiny networks and images; the figures mean nothing beside baselines and targets")
        everything: list[Row | Comparison] = [*self.rows, *self.comparisons]
        short = [each.verdict() for each in everything if each.falls_short]
        for line in short:
            print(line)
        print(f"{len(short)} of {len(everything)} rows fall short" if short else "every target is met")
        if missing:
            print(f"asked to stop: {missing} rows are missing")
        return 1 if short or missing else 0


def main(arguments: Sequence[str] | None = None, chosen: Sequence[Work] | None = None) -> int:
    """Measure, tell, judge."""
    chosen = works() if chosen is None else chosen
    options = parsed(arguments, [work.name for work in chosen])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    precisions: Sequence[Precision] = options.precision if cuda else ("fp32",)
    if not options.quick:
        importlib.import_module("torch._inductor.compile_fx")  # so that no row's warm-up counts it
    gauge = Bench(device, 1, precisions[0], options.quick)
    if options.child:
        section, *given = options.child
        print(json.dumps(CHILDREN[section](gauge, *given)))
        return 0
    chosen = [work for work in chosen if work.name in (options.only or [work.name])]
    if options.prepare and not options.quick:
        prepare(__file__, warm_up_calls([work.name for work in chosen], precisions), options.prepare)
    peaks = {"peak_tflops": gauge.peak_tflops(), "bandwidth": gauge.bandwidth()} if chosen else {}
    report = Report(facts(device) | {"quick": options.quick} | peaks, options.json)
    asked = list(product(chosen, precisions))
    for work, precision in asked:
        batch = work.batch // 8 if options.quick else work.batch
        bench = Bench(device, batch, precision, options.quick, prepares=options.warm)
        try:
            report.add(measure(work, precision, precision != "tf32", bench, peaks["peak_tflops"]))
        except Interrupted:
            break
    missing = len(asked) - len(report.rows)
    if options.warm:
        return 1 if missing or any(row.error for row in report.rows) else 0
    for name in () if missing else (options.only or ()):
        for comparison in SECTIONS.get(name, lambda _: ())(gauge):
            report.add(comparison)
    if chosen:
        show(report.rows, report.known, options.profile)
    else:
        print(stamp(report.known))
    return report.judge(missing)


if __name__ == "__main__":
    sys.exit(main())
