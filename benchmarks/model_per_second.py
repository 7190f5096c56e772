"""Which network, path, times, optimiser, batch and rate make the best plain model in a minute of one GPU?

    python benchmarks/model_per_second.py [--only preset dit] [--minutes 1] [--experiment burgers] [--seed 0]
    python benchmarks/model_per_second.py --both-sides --only preset dit --minutes 3 --experiment divergence

Plain models of an experiment's images, by its preset with one thing changed at a time, each for the same minutes of
compute. Printed of each at its end: ℓ, √MMD², total variation and spread of its samples by the preset's sampler and
what the data themselves have, training images per second, which share of the device's peak their arithmetic is, and
seconds of drawing. ℓ and √MMD² of fewer samples at every quarter of the training are in `quality.png`, against
seconds. With --both-sides: whole runs instead, with these minutes for the model in mirror space and a plain model at
equal compute.

What is complete is not trained again; a call that was cut short goes on. The best change in ℓ and in √MMD², each as a
ratio to the preset, is printed last.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from gpu_tools import Bench, flops
from namm.datasets import open_store, write_store
from namm.datasets.batches import Images
from namm.evaluation import Scores, compare
from namm.evaluation.mmd import Subset, in_memory
from namm.experiments.engine import build, build_models
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import ModelSettings, Settings, with_seed
from namm.experiments.engine.stages.model import load_milestone
from namm.experiments.presets import preset
from namm.formatting import format_number, print_table
from namm.generative import Diffusion, Mirrored
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import IdentityMap
from namm.report.figures.base import look, new_figure, save
from namm.training.checkpoint import PATTERN
from namm.training.train_model import train_model
from shared import facts, stamp

PASSES = 3
"""A training step is one pass forward and about two backward."""
QUARTERS = 4
PRESET = "preset"

Change = Callable[[ModelSettings], ModelSettings]


def network(**values: Any) -> Change:
    """Another score network."""
    return lambda s: replace(s, network=replace(s.network, **values))


def diffusion(**values: Any) -> Change:
    """Another process or target."""
    return lambda s: replace(s, diffusion=replace(s.diffusion, **values))


def train(**values: Any) -> Change:
    """Another way to train."""
    return lambda s: replace(s, train=replace(s.train, **values))


def rate_times(factor: float) -> Change:
    """Another learning rate."""
    return lambda s: replace(s, train=replace(s.train, learning_rate=factor * s.train.learning_rate))


CHANGES: dict[str, Change] = {
    PRESET: lambda s: s,
    "dit": network(kind="dit"),
    "dit-small": network(kind="dit", width=192, depth=6),
    "unet": network(kind="unet"),
    "unet-wide": network(kind="unet", filters=96),
    "full-resolution": network(unshuffle=1),
    "no-dropout": network(dropout=0.0),
    "epsilon": diffusion(prediction="epsilon"),
    "straight": diffusion(schedule="straight", prediction="flow"),
    "straight-logit-normal": diffusion(schedule="straight", prediction="flow", times="logit-normal"),
    "adamw": train(optimiser="adamw"),
    "muon": train(optimiser="muon"),
    "batch-64": train(batch_size=64),
    "batch-256": train(batch_size=256),
    "rate-x2": rate_times(2),
    "rate-half": rate_times(0.5),
    "constant-rate": train(schedule="constant"),
}
"""What differs from the preset, by a name; one axis each."""


@dataclass(frozen=True)
class Options:
    """Which changes, how long, on what."""

    only: tuple[str, ...] = tuple(CHANGES)
    """Names in CHANGES."""
    minutes: float = 1.0
    """Compute of each model."""
    experiment: str = "burgers"
    preset: Literal["demo", "gpu"] = "gpu"
    seed: int = 0
    samples: int = 2000
    both_sides: bool = False
    """Whole runs, with the map and the comparison, instead of plain models."""
    out: Path = Path("runs/model_per_second")
    """Folder of trainings and records; what is complete is not done again."""
    quick: bool = False
    """A few steps and images: only to see that everything runs."""

    @property
    def budget(self) -> str:
        """The same as a training's budget."""
        return "4 steps" if self.quick else f"{self.minutes:g} minutes"


@dataclass(frozen=True)
class Model:
    """What one model learned in its minutes.

    Attributes:
        scores: Of its samples.
        curve: Seconds of compute, ℓ and √MMD² at every quarter of the training.
        parameters, steps, images_per_second: Of the training.
        flops: Of one pass for one image.
        sampling_seconds: What the samples took.
    """

    scores: dict[str, Any]
    curve: list[tuple[float, float, float]]
    parameters: int
    steps: int
    images_per_second: float
    flops: float
    sampling_seconds: float


def settings_of(options: Options) -> Settings:
    """The preset with the seed; with `quick` a miniature of it."""
    s = with_seed(preset(options.experiment, options.preset).settings, options.seed)
    s = replace(s, evaluate=replace(s.evaluate, n=options.samples, n_fid=0, kid_subsets=0, milestone_samples=0))
    if not options.quick:
        return s
    plain: dict[str, Any] = {
        name: replace(part, train=replace(part.train, budget="3 steps", batch_size=4, compile=False))
        for name, part in (("map", s.map), ("mdm", s.mdm), ("finetune", s.finetune), ("dm", s.dm))
    }
    sampler = replace(s.evaluate.sampler, steps=2, compile=False)
    few = replace(s.mdm.network, filters=8, multipliers=(1, 1), blocks=1, attention=(), width=16, depth=1, heads=1)
    return replace(
        s,
        **{**plain, "mdm": replace(plain["mdm"], network=few)},
        data=replace(s.data, n_train=32, n_val=8, n_test=32),
        samples=replace(s.samples, n=8, n_val=4, sampler=sampler),
        evaluate=replace(s.evaluate, n=16, subset=16, mmd_subsets=2, sampler=sampler),
    )


# Plain models


def learned(name: str, options: Options, folder: Path, images: Mapping[str, Images]) -> Model:
    """Train the preset with the change `name` on plain images, and measure it; read back where that was done."""
    record = folder / f"{name}.json"
    if record.exists():
        return Model(**json.loads(record.read_text()))
    s = settings_of(options)
    part = CHANGES[name](s.mdm)
    shape = build.dataset(s.data).shape
    model = build_models.diffusion(part.network, part.diffusion, shape, part.train.seed)
    parameters = sum(p.numel() for p in model.network.parameters())
    with torch.no_grad():
        per_image = flops(lambda y: model.denoise(y, torch.ones(len(y))), shape)
    settings = replace(part.train, budget=options.budget, milestones=QUARTERS)
    done = train_model(model, images["train"], IdentityMap(), settings=settings, folder=folder / name)
    rule, curve = build.placed(s.data.rule.build()), []
    for path in sorted((folder / name / "milestones").glob(PATTERN)):
        at = load_milestone(model, path)
        found, seconds = measured(model, s, images["test"], rule, folder / name / f"{path.stem}.h5")
        curve.append((at["compute_seconds"], found.distance.mean, found.mmd.mean))
    rate = done.images / done.compute_seconds
    model_found = Model(asdict(found), curve, parameters, done.steps, rate, per_image, seconds)
    record.write_text(json.dumps(asdict(model_found), indent=1))
    return model_found


def measured(model: Diffusion, s: Settings, reference: Images, rule: Any, file: Path) -> tuple[Scores, float]:
    """Scores of samples, which are kept in `file`, and what drawing them took."""
    evaluate = s.evaluate
    write_samples(
        file,
        Mirrored(model, IdentityMap()),
        evaluate.n,
        seed=evaluate.seed,
        description={"model": file.stem},
        precision=s.mdm.train.precision,
        **build_models.sampling(evaluate.sampler),
    )
    with SampleFile(file) as samples:
        return scored(samples.images, reference, rule, s), samples.compute_seconds


def scored(images: Images, reference: Images, rule: Any, s: Settings) -> Scores:
    """Images beside the reference, as the preset evaluates."""
    how = s.evaluate
    return compare(
        images, reference, rule, size=how.subset, subsets=how.mmd_subsets, seed=how.seed, device=build.device()
    )


def compare_models(options: Options) -> None:
    """Train, print the table, draw the figure."""
    s = settings_of(options)
    folder = options.out / f"{options.experiment}-{options.preset}-{options.minutes:g}-{options.seed}"
    write_store(folder / "images.h5", build.dataset(s.data), s.data.sizes, seed=s.data.seed)
    bench = Bench(build.device(), s.mdm.train.batch_size, s.mdm.train.precision, options.quick)
    peak = bench.peak_tflops()
    found: dict[str, Model] = {}
    with open_store(folder / "images.h5") as store:
        images = {"train": store["train"], "test": in_memory(store["test"])}
        for name in options.only:
            print(name, flush=True)
            found[name] = learned(name, options, folder, images)
        n = min(s.evaluate.n, store.sizes["train"])
        rule = build.placed(s.data.rule.build())
        floor = scored(Subset(images["train"], np.arange(n)), images["test"], rule, s)
    print_table(
        ["model", "M parameters", "steps", "images/s", "of peak", "ℓ", "√MMD²", "TV", "spread", "s to draw"],
        [
            ("data", "", "", "", "", *quality(asdict(floor)), ""),
            *(row_of(name, each, peak) for name, each in found.items()),
        ],
        width=130,
    )
    print(f"{options.budget} each, {s.evaluate.n} samples by {s.evaluate.sampler.method} of {s.evaluate.sampler.steps}")
    print(stamp(facts(build.device())))
    draw(found, asdict(floor), folder / "quality.png")
    print(folder / "quality.png")
    say_best(found)


def row_of(name: str, model: Model, peak: float) -> tuple[str, ...]:
    """What it cost and what it learned."""
    share = 1e-12 * PASSES * model.flops * model.images_per_second / peak
    size, rate = f"{1e-6 * model.parameters:.1f}", f"{model.images_per_second:,.0f}"
    return name, size, str(model.steps), rate, f"{share:.0%}", *quality(model.scores), f"{model.sampling_seconds:.1f}"


def quality(scores: Mapping[str, Any]) -> tuple[str, ...]:
    """ℓ, √MMD² with its error, total variation and spread."""
    mmd = f"{scores['mmd'][0]:.4f} ± {scores['mmd_error']:.4f}"
    return (
        format_number(scores["distance"]["mean"], ".3g"),
        mmd,
        *(f"{scores[each]:.3f}" for each in ("total_variation", "spread")),
    )


def say_best(found: Mapping[str, Model]) -> None:
    """The best ℓ and √MMD², as ratios to the preset's."""
    if PRESET not in found:
        return
    for title, read in (("ℓ", lambda m: m.scores["distance"]["mean"]), ("√MMD²", lambda m: m.scores["mmd"][0])):
        best = min(found, key=lambda name: read(found[name]))
        print(f"best {title}: {best}, {read(found[best]) / read(found[PRESET]):.3f} of the preset's")


def draw(found: Mapping[str, Model], floor: Mapping[str, Any], path: Path) -> None:
    """Quality against seconds, a line per model."""
    with look():
        figure = new_figure(3.2, width=9)
        for axes, k, title, level in zip(
            figure.subplots(1, 2),
            (1, 2),
            ("ℓ", "√MMD²"),
            (floor["distance"]["mean"], floor["mmd"][0]),
            strict=True,
        ):
            for number, (name, model) in enumerate(found.items()):
                points = np.array(model.curve).T
                line = "-" if number < 10 else "--"
                axes.plot(points[0], points[k], line, marker="o", ms=3, label=name, color=f"C{number % 10}")
            axes.axhline(level, color="0.5", lw=0.8, ls=":")
            axes.set(xlabel="compute in seconds", title=title, yscale="log")
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        save(figure, path)


# Both sides


def compare_sides(options: Options) -> None:
    """Whole runs with each change: the method and a plain model at equal compute."""
    table = []
    for name in options.only:
        s = settings_of(options)
        mdm = CHANGES[name](replace(s.mdm, train=replace(s.mdm.train, budget=options.budget)))
        s = replace(s, mdm=mdm, dm=replace(s.dm, train=mdm.train))
        folder = options.out / f"{options.experiment}-{options.preset}-{options.minutes:g}-{options.seed}-{name}"
        chosen = replace(preset(options.experiment, options.preset), settings=s)
        run(chosen, folder, until="evaluate", log=lambda line: print(f"  {line}", flush=True), force=True)
        metrics = json.loads((folder / "evaluate" / "metrics.json").read_text())
        for row in ("data", "mdm", "finetuned", "dm", "repaired"):
            table.append((name, row, *quality(metrics["rows"][row]), metrics["verdicts"].get(row, "")))
    print_table(["model", "row", "ℓ", "√MMD²", "TV", "spread", "verdict"], table, width=110)
    print(stamp(facts(build.device())))


def main(arguments: Sequence[str]) -> int:
    """Plain models, or whole runs."""
    options = tyro.cli(Options, args=list(arguments), description=__doc__)
    unknown = [name for name in options.only if name not in CHANGES]
    if unknown:
        print(f"no such change: {', '.join(unknown)}; there are {', '.join(CHANGES)}.", file=sys.stderr)
        return 2
    (compare_sides if options.both_sides else compare_models)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
