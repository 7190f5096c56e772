"""What a user would do instead of learning a map, and ours, on the same runs: who keeps the rule, at which price?

    python benchmarks/head_to_head.py [--only burgers flux] [--methods DM guidance finetuned] [--preset demo]
                                      [--seeds 0] [--tune-seed 2] [--n 1000] [--figure FILE]

Takes the runs of `every_rule.py`, finishes those that are not complete, and draws samples by every method, with the
run's sampler and seed: the methods of `namm.rivals` from the run's baseline DM, ours from its mirror model and maps.
A method with numbers to choose gets them from a small grid, on the run of another seed and fewer samples: those with
the smallest ℓ whose √MMD² is at most 1.25 times the DM's there. `residual loss` is trained for the DM's compute, and in
tuning for a quarter of it, beside a DM of a quarter; on the experiments in --informed.

Printed for each experiment, means over seeds: mean ℓ and its 99 % quantile, √MMD² to held-out images on the subsets of
the run's evaluation, total variation and spread over the data's, compute seconds of training, of tuning and of a
sample, and what a method needs. A star marks the front: no other row is as good in ℓ and √MMD² and better in one. Rows
of which 99 % reach the rule, by their certificate, are all as good in ℓ. Methods that end near the rule are also
polished.

What was measured is kept in --records, a file for each experiment, method and seed, and not measured again. The exit
code is 0: this compares, and asks for nothing.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

import exact
from namm.clock import clock
from namm.datasets import open_store
from namm.datasets.batches import map_images, to_tensor
from namm.errors import UsageError
from namm.evaluation import compare, distance_summary
from namm.exact import certify
from namm.experiments.engine import build, build_models
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.run_parts import RunParts, untrained
from namm.experiments.engine.settings_file import digest
from namm.experiments.engine.stages import Work, stage_keys
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.repair import shorter_model
from namm.files import read_json, write_json
from namm.formatting import ABSENT, format_number, print_table
from namm.generative import Diffusion, DPMSolver
from namm.generative.mirrored import Mirrored
from namm.generative.samplers import Sampler
from namm.maps import IdentityMap
from namm.rivals import (
    ExtrapolateCorrect,
    GradientGuidance,
    ProjectedEstimate,
    ProjectedSteps,
    Projection,
    Rejection,
    ResidualLoss,
    Rival,
)
from namm.training.train_model import train_model

PLAIN = Rival()
BATCH = 64
WORSE = 1.25
"""√MMD² over the DM's up to which tuning looks at ℓ."""
NEGLIGIBLE = 1e-4
"""ℓ over the DM's below which tuning takes two for equal."""
REACHED = 0.99
"""Share of the samples that reach the rule in a row that counts as exact."""
TUNING_SHARE = 0.25
"""Of the DM's compute, for a training that is tuned."""
Draw = Callable[[int], Tensor]


@dataclass(frozen=True)
class Options:
    """Which experiments, methods and seeds."""

    only: tuple[str, ...] = exact.RULES
    methods: tuple[str, ...] = ()
    """Names in the table; all by default."""
    seeds: tuple[int, ...] = (0,)
    preset: Literal["demo", "gpu"] = "demo"
    n: int = 1000
    """Samples of each method."""
    tune_seed: int = 2
    tune_n: int = 256
    """Samples for each candidate of a grid."""
    informed: tuple[str, ...] = ("burgers", "darcy")
    """Experiments that `residual loss` is trained on."""
    out: Path = Path("runs/every_rule")
    """Folder of the runs."""
    records: Path = Path("runs/head_to_head")
    figure: Path | None = None
    """Picture of ℓ against √MMD²; head_to_head.png beside the records by default."""
    quick: bool = False
    """A few steps and samples: only to see that everything runs."""


# What a run brings


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A run, complete as far as it is used."""

    name: str
    seed: int
    folder: Path
    options: Options

    @cached_property
    def parts(self) -> RunParts:
        """The run's trained parts."""
        return RunParts.load(self.folder)

    @cached_property
    def rule(self) -> Any:
        """ℓ, where models run."""
        return self.parts.rule()

    @cached_property
    def plain(self) -> Diffusion:
        """The baseline."""
        found = self.parts.model("dm")
        assert isinstance(found, Diffusion)
        return found

    @cached_property
    def images(self) -> dict[str, Tensor]:
        """Training images, as many as samples, and all those that samples are compared with."""
        with open_store(images_file(self.folder / "data")) as store:
            return {
                "data": to_tensor(store["train"][: self.options.n]),
                "reference": to_tensor(store[self.parts.settings.evaluate.reference][:]),
            }

    @property
    def sampling(self) -> dict[str, Any]:
        """How samples are drawn: as in the run's evaluation."""
        sampler: Sampler = build_models.sampler(self.parts.settings.evaluate.sampler)
        how = {"generator": self.parts.settings.evaluate.seed, "batch_size": BATCH, "progress": False}
        return how | {"sampler": DPMSolver(10) if self.options.quick else sampler}

    def seconds(self, *stages: str) -> float:
        """Compute seconds of these stages together."""
        return sum(read_record(self.folder / stage).compute_seconds for stage in stages)

    @cached_property
    def plain_distance(self) -> float:
        """Mean ℓ of the baseline's samples."""
        with torch.no_grad():
            return float(self.rule(self.plain.sample(BATCH, **self.sampling)).mean())

    @cached_property
    def floor(self) -> float:
        """Mean ℓ of the images that samples are compared with."""
        return distance_summary(self.rule, self.images["reference"], device=build.device()).mean

    def figures(self, images: Tensor) -> dict[str, Any]:
        """What is measured of samples; those that are not finite, or whose ℓ is not, are counted and left out."""
        with torch.no_grad():
            distances = torch.cat([self.rule(part.to(build.device())).cpu() for part in images.split(BATCH)])
        good = images.flatten(1).isfinite().all(1).cpu() & distances.isfinite()
        found: dict[str, Any] = {"samples": len(images), "not_finite": int((~good).sum())}
        if good.sum() < max(2, len(images) // 2):
            return found
        settings, kept, reference = self.parts.settings.evaluate, images.cpu()[good], self.images["reference"]
        size = min(settings.subset, len(kept), len(reference))
        how: dict[str, Any] = {"subsets": settings.mmd_subsets, "size": size, "seed": settings.seed}
        scores = compare(kept, reference, self.rule, device=build.device(), **how)
        return found | {
            "distance": scores.distance.mean,
            "distance_99": float(distances[good].double().quantile(0.99)),
            "reached": float(certify(kept, self.rule, floor=self.floor, device=build.device()).reached.mean()),
            "mmd": scores.mmd.mean,
            "mmd_error": scores.mmd_error,
            "total_variation": scores.total_variation,
            "spread": scores.spread,
        }


@cache
def finished(name: str, seed: int, options: Options, until: str) -> TrainedRun:
    """The run of `every_rule.py`, complete up to the stage `until`."""
    how = exact.Options(seed=seed, out=options.out, quick=options.quick)
    return TrainedRun(name, seed, exact.finished_run(name, how, preset=options.preset, until=until), options)


# Methods: what they are prepared with, and how they draw


def rival(run: TrainedRun, method: Rival, share: float) -> tuple[Draw, float]:
    """A method of `namm.rivals` on the baseline."""
    return lambda n: method.sample(run.plain, run.rule, n, **run.sampling), run.seconds("dm")


def residual_loss(run: TrainedRun, method: Rival, share: float) -> tuple[Draw, float]:
    """A model trained with ℓ for a share of the baseline's compute; its weight is in units of 1/ℓ of the baseline."""
    assert isinstance(method, ResidualLoss)
    if run.name not in run.options.informed:
        raise UsageError("it is not trained here: name the experiment in --informed.")
    settings, weight = run.parts.settings, method.weight / run.plain_distance
    first = untrained("dm", settings, run.parts.shape)
    assert isinstance(first, Diffusion)
    model = ResidualLoss(weight).informed(first, run.rule)
    budget = "3 steps" if run.options.quick else f"{share * run.seconds('dm') / 60:.6f} minutes"
    place = f"{run.name}-{run.options.preset}-{run.seed}-residual-loss-{method.weight:g}-{share:g}"
    with open_store(images_file(run.folder / "data")) as store:
        trained = train_model(
            model,
            store["train"],
            IdentityMap(),
            settings=replace(settings.dm.train, budget=budget, milestones=0, validations=0),
            folder=run.options.records / place,
            progress=False,
        )
    model.to(build.device())
    return lambda n: method.sample(model, run.rule, n, **run.sampling), trained.compute_seconds


def ours(run: TrainedRun, method: Rival, share: float, *, f: str, stages: Sequence[str]) -> tuple[Draw, float]:
    """Samples of the mirror model through f as the stage `f` left it."""
    source = run.parts.source("mdm", run.parts.mirror(f))
    return lambda n: source.sample(n, **run.sampling), run.seconds(*stages)


def repaired(run: TrainedRun, method: Rival, share: float) -> tuple[Draw, float]:
    """Samples of the plain model mended by the map: at equal compute where the run has that, else of the whole DM."""
    settings, at_equal_compute = run.parts.settings, run.parts.settings.repairs
    mirror = run.parts.mirror("repair" if at_equal_compute else "finetune")
    if at_equal_compute:
        work = Work(settings, run.folder, {stage: run.folder / stage for stage in ("dm", "mdm")})
        source, shorter = shorter_model(work)
        seconds = run.seconds("map", "repair") + shorter
    else:
        source, seconds = Mirrored(run.plain, IdentityMap()), run.seconds("map", "mdm", "samples", "finetune", "dm")

    def draw(n: int) -> Tensor:
        return torch.from_numpy(map_images(mirror.repair, source.sample(n, **run.sampling), build.device(), "f∘g"))

    return draw, seconds


def real_images(run: TrainedRun, method: Rival, share: float) -> tuple[Draw, float]:
    """Training images, the floor of all figures."""
    return lambda n: run.images["data"][:n], 0.0


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        needs: What it needs of the rule besides ℓ, and what else.
        prepare: Gives a function that draws samples, and what its training cost, for a run and a member of the grid.
        grid: What is tried in tuning, the first of it where nothing is tuned.
        reference: What those are compared with in tuning: the plain model, prepared in the same way.
        polishes: Whether its samples are also polished, because they end near the rule and not on it.
    """

    needs: str
    prepare: Callable[[TrainedRun, Rival, float], tuple[Draw, float]] = rival
    grid: tuple[Rival, ...] = (PLAIN,)
    reference: Rival = PLAIN
    polishes: bool = True


FLOOR = "data"
MADE_BY_OURS = ("MDM + f", "finetuned", "repaired")
METHODS: dict[str, Method] = {
    FLOOR: Method("", real_images, polishes=False),
    "DM": Method(""),
    "guidance": Method("∇ℓ", grid=tuple(GradientGuidance(strength) for strength in (1.0, 0.3, 3.0))),
    "projected steps": Method(
        "projection", grid=tuple(ProjectedSteps(below) for below in (math.inf, 1.0, 0.1)), polishes=False
    ),
    "projected estimate": Method(
        "residual", grid=tuple(ProjectedEstimate(iterations=k) for k in (1, 2)), polishes=False
    ),
    "extrapolate, correct": Method(
        "linear projection",
        grid=tuple(ExtrapolateCorrect(*numbers) for numbers in ((1, 1), (1, 0), (1, 5), (5, 1), (5, 0))),
        polishes=False,
    ),
    "residual loss": Method(
        "∇ℓ, a training", residual_loss, tuple(ResidualLoss(c) for c in (0.1, 0.01, 1.0)), ResidualLoss(0.0)
    ),
    "rejection": Method("ℓ", grid=(Rejection(4),)),
    "projection": Method("projection", grid=(Projection(),), polishes=False),
    "MDM + f": Method("∇ℓ, a map", partial(ours, f="map", stages=("map", "mdm"))),
    "finetuned": Method("∇ℓ, a map", partial(ours, f="finetune", stages=("map", "mdm", "samples", "finetune"))),
    "repaired": Method("∇ℓ, a map", repaired),
}


# Cells


def cell(run: TrainedRun, name: str) -> dict[str, Any]:
    """The record of one method on one run, measured unless it is there; that of a rule it cannot serve says why."""
    method, options = METHODS[name], run.options
    try:
        for candidate in method.grid if method.prepare is rival else ():
            candidate.checked(run.plain, run.rule)
        chosen = tuned(run.name, name, options)
        key = stage_keys(run.parts.settings)["evaluate"]
        about = {"run": key, "n": options.n, "batch": BATCH, "method": repr(method.grid[chosen["index"]])}
        return kept(record_file(run, name), about, lambda: measured(run, method, chosen) | {"experiment": run.name})
    except UsageError as error:
        return {"refused": str(error)}


def measured(run: TrainedRun, method: Method, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Draw, time, measure; then polish, time and measure again."""
    draw, training = method.prepare(run, method.grid[chosen["index"]], 1.0)
    timed(lambda: draw(2))  # what is done once in a process
    images, seconds = timed(lambda: draw(run.options.n))
    found = {"training_seconds": training, "tuning_seconds": chosen["seconds"]}
    found["rows"] = {"": run.figures(images) | {"seconds": seconds / len(images)}}
    if method.polishes:
        polisher = run.parts.polisher(run.rule)
        finite = images[images.flatten(1).isfinite().all(1)]
        polished, more = timed(lambda: polisher(finite).images)
        found["rows"][" + polish"] = run.figures(polished) | {"seconds": (seconds + more) / len(images)}
    return found


def timed(make: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What is made, and the compute seconds it took."""
    start = clock(build.device())
    with torch.no_grad():
        made = make()
    return made, clock(build.device()) - start


def tuned(experiment: str, name: str, options: Options) -> dict[str, Any]:
    """Which member of its grid a method takes on an experiment, by the run of another seed, and the seconds of that."""
    method = METHODS[name]
    if len(method.grid) == 1:
        return {"index": 0, "seconds": 0.0}
    run = finished(experiment, options.tune_seed, options, "dm")
    about = {
        "run": stage_keys(run.parts.settings)["dm"],
        "n": options.tune_n,
        "grid": [repr(each) for each in method.grid],
    }

    def measure() -> dict[str, Any]:
        tried = []
        for candidate in (method.reference, *method.grid):
            start = clock(build.device())
            draw, _ = method.prepare(run, candidate, TUNING_SHARE)
            images, _ = timed(partial(draw, options.tune_n))
            tried.append(run.figures(images) | {"seconds": clock(build.device()) - start, "method": repr(candidate)})
        seconds = sum(each["seconds"] for each in tried)
        return {"index": best(tried[1:], tried[0]), "tried": tried, "seconds": seconds}

    return kept(record_file(run, f"{name}-tuning"), about, measure)


def best(tried: Sequence[Mapping[str, Any]], baseline: Mapping[str, Any]) -> int:
    """The smallest ℓ among those whose √MMD² is near enough to the baseline's; the smallest √MMD² where none is."""
    good = [k for k, each in enumerate(tried) if each.get("mmd", math.inf) <= WORSE * baseline["mmd"]]
    if not good:
        return min(range(len(tried)), key=lambda k: tried[k].get("mmd", math.inf))
    least = NEGLIGIBLE * baseline["distance"]
    return min(good, key=lambda k: (max(tried[k]["distance"], least), tried[k]["mmd"]))


def record_file(run: TrainedRun, name: str) -> Path:
    """Where a record is."""
    plain = name.replace(" + ", "-").replace(", ", "-").replace(" ", "-")
    return run.options.records / f"{run.name}-{run.options.preset}-{run.seed}-{plain}.json"


def kept(path: Path, about: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The record at `path` if it is of the same work, else a new one."""
    key = digest(dict(about))
    if path.exists() and (found := read_json(path))["key"] == key:
        return dict(found)
    found = {"key": key, **about, **make()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


# The table and the picture


def rows_of(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float] | str]:
    """By row of the table means over seeds, or why there are none."""
    rows: dict[str, dict[str, float] | str] = {}
    for name, seeds in records.items():
        if refused := next((each["refused"] for each in seeds if "refused" in each), None):
            rows[name] = refused
            continue
        for suffix in seeds[0]["rows"]:
            figures = [
                {**each["rows"][suffix], **{part: each[f"{part}_seconds"] for part in ("training", "tuning")}}
                for each in seeds
            ]
            lost = sum(each["not_finite"] for each in figures)
            if any("mmd" not in each for each in figures):
                rows[name + suffix] = f"{lost} of {sum(each['samples'] for each in figures)} samples diverged"
            else:
                rows[name + suffix] = {part: mean(float(each[part]) for each in figures) for part in figures[0]}
    return rows


def front(rows: Mapping[str, Mapping[str, float] | str]) -> set[str]:
    """Rows that none beats in ℓ or √MMD² without losing in the other; all that reach the rule are equal in ℓ."""
    points = {
        name: (0.0 if row["reached"] >= REACHED else row["distance"], row["mmd"])
        for name, row in rows.items()
        if name != FLOOR and not isinstance(row, str)
    }
    return {
        name
        for name, point in points.items()
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points.values())
    }


def print_rows(experiment: str, rows: Mapping[str, Mapping[str, float] | str]) -> None:
    """The table of one experiment."""
    best_rows, table = front(rows), []
    for name, row in rows.items():
        if isinstance(row, str):
            table.append((name, "", *[ABSENT] * 9, row.split(": ", 1)[-1].split(".")[0]))
            continue
        cost = [row["training"] or None, row["tuning"] or None]
        lost = f" ({row['not_finite']:.0f} not finite)" if row["not_finite"] else ""
        table.append(
            (
                name + lost,
                "*" if name in best_rows else "",
                *(format_number(row[part], ".2g") for part in ("distance", "distance_99")),
                f"{row['reached']:.0%}",
                *(f"{row[part]:.3f}" for part in ("mmd", "total_variation", "spread")),
                *(ABSENT if each is None else f"{each:.0f}" for each in cost),
                format_number(row["seconds"], ".2g") if row["seconds"] else ABSENT,
                METHODS[name.removesuffix(" + polish")].needs,
            )
        )
    titles = [
        "method",
        "",
        "ℓ",
        "ℓ, 99 %",
        "reached",
        "√MMD²",
        "TV",
        "spread",
        "training s",
        "tuning s",
        "s / sample",
        "needs",
    ]
    print_table(titles, table, title=experiment, width=160)


def draw_figure(experiments: Mapping[str, Mapping[str, Mapping[str, float] | str]], path: Path) -> None:
    """A panel for each experiment: ℓ against √MMD², a point for each row, lines at the data's own."""
    from namm.report.figures.base import look, new_figure, save

    columns = min(2, len(experiments))
    rows = -(-len(experiments) // columns)
    with look():
        figure = new_figure(2.6 * rows + 1.6, 4.4 * columns)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        labels: dict[str, Any] = {}
        for axis, (experiment, found) in zip(axes, experiments.items(), strict=False):
            labels |= draw_panel(axis, found)
            axis.set_title(experiment)
        for axis in axes[len(experiments) :]:
            axis.axis("off")
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=2 * columns)
        save(figure, path)


def draw_panel(axis: Any, rows: Mapping[str, Mapping[str, float] | str]) -> dict[str, Any]:
    """The points of one experiment; their handles by name."""
    from namm.report.figures.base import BASELINE_COLOUR, DATA_COLOUR, OTHER_COLOUR, OURS_COLOUR

    measured = {name: row for name, row in rows.items() if not isinstance(row, str)}
    least = min(row["distance"] for row in measured.values() if row["distance"] > 0) / 3
    handles = {}
    for name, row in measured.items():
        x, y, method = max(row["distance"], least), row["mmd"], name.removesuffix(" + polish")
        if name == FLOOR:
            axis.axvline(x, color=DATA_COLOUR, lw=0.8, ls="--")
            handles["data, the floors"] = axis.axhline(y, color=DATA_COLOUR, lw=0.8, ls="--")
            continue
        colour = OURS_COLOUR if method in MADE_BY_OURS else BASELINE_COLOUR if method == "DM" else OTHER_COLOUR
        marker = "oosDv^PX*dos^"[list(METHODS).index(method)]
        filled = colour if name == method else "none"
        (handles[name],) = axis.plot(x, y, marker, color=colour, markerfacecolor=filled, ms=6)
    axis.set(xscale="log", xlabel="mean ℓ", ylabel="√MMD²")
    return handles


def main(arguments: Sequence[str]) -> int:
    """Measure what is not measured yet, print the tables, draw the picture."""
    options = tyro.cli(Options, args=list(arguments))
    if unknown := set(options.methods) - METHODS.keys():
        raise UsageError(f"there is no method {sorted(unknown)}: they are {', '.join(METHODS)}.")
    names = [name for name in METHODS if name in (FLOOR, *(options.methods or METHODS))]
    experiments = {}
    for experiment in options.only:
        records: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for seed in options.seeds:
            run = finished(experiment, seed, options, "evaluate")
            for name in names:
                print(f"{experiment}, seed {seed}: {name}", flush=True)
                records[name].append(cell(run, name))
        experiments[experiment] = rows_of(records)
        print_rows(experiment, experiments[experiment])
    draw_figure(experiments, options.figure or options.records / "head_to_head.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
