"""Does one recipe learn every rule? Whole runs as a user starts them, judged on means over seeds.

    python benchmarks/every_rule.py [--only burgers ink] [--seeds 0 1] [--preset demo] [--out runs/every_rule]

The five experiments, two rules about digits (`ink`, `norm`) and, named in --only, `darcy` and rules that no setting was
chosen with (`variance`, `part`, `colour`, `poisson`, `own_total`; `user_rules.py`). Each run is `namm run NAME`,
or `namm run --data FILE --constraint user_rules:NAME`, to its evaluation, with all its draws from the seed. What is
complete is not run again; a call that was cut short goes on. Printed for every rule: ℓ' = ℓ − the data's own ℓ of ours
over the baseline's at equal compute, √MMD², total variation and spread of both, compute seconds, and the verdict on
the means over seeds; beside them those of repair at equal compute, where runs have it. For `count` a second counter,
which nothing was trained with, also judges both. The exit code is 1 unless every rule of the table works with ℓ' at
most half of the baseline's, 0.6 for `count`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
import tyro

from namm.experiments import own
from namm.experiments.count import CountData, make_counter
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import Settings, with_seed
from namm.experiments.engine.stages import stage_keys
from namm.experiments.presets import preset
from namm.formatting import format_number, print_table

FIVE = ("burgers", "divergence", "flux", "periodic", "count")
DIGITS = ("ink", "norm")
FEW = ("map", "mdm", "finetune", "dm")
SAMPLES = 2000
"""Samples of either side, at most."""
LIMIT = {"count": 0.6}
"""ℓ' over the baseline's that is asked for, 0.5 where nothing is said."""


@dataclass(frozen=True)
class Options:
    """Which rules, seeds and preset."""

    only: tuple[str, ...] = (*FIVE, *DIGITS)
    """Names of experiments and of rules in user_rules.py."""
    seeds: tuple[int, ...] = (0, 1)
    preset: Literal["demo", "gpu"] = "demo"
    out: Path = Path("runs/every_rule")
    """Folder of the runs."""
    until: str = "evaluate"
    """The last stage."""
    steps: tuple[int, int, int] | None = None
    """Steps of map, model and finetuning, instead of the preset's budgets."""
    compile: bool = True
    """Whether what the preset compiles is compiled: less to wait for in short runs without."""
    quick: bool = False
    """A few steps and samples: only to see that everything runs."""


def settings_of(name: str, seed: int, options: Options) -> Any:
    """The preset of an experiment, or that of a rule of a user's own with its images in a file."""
    if name in (*FIVE, "darcy"):
        chosen = preset(name, options.preset)
        s = shortened(with_seed(chosen.settings, seed), options)
        # Pixels can be moved until a counter says eight, at which the data themselves are not.
        return replace(chosen, settings=replace(s, evaluate=replace(s.evaluate, polish=name != "count")))
    from user_rules import IMAGES

    file = options.out / "images" / f"{name}-{seed}.npy"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, IMAGES[name](seed).numpy())
    chosen = preset("own", options.preset)
    data = own.OwnData(
        file=str(file), constraint=f"user_rules:{name}", folder=str(Path(__file__).parent), layout="NCHW"
    )
    asked = shortened(with_seed(replace(chosen.settings, data=data), seed), options)
    given = ("map.sigma_max",) if options.quick else ()  # what is given is not tuned
    return replace(chosen, settings=own.prepare(asked, given, lambda line: print(f"  {line}", flush=True)))


def shortened(s: Settings, options: Options) -> Settings:
    """`s` with the steps and the compilation that are asked for; with `quick` a few steps, images and samples of it."""
    parts: dict[str, Any] = {name: getattr(s, name) for name in ("map", "mdm", "finetune", "dm")}
    budgets = (3, 3, 3) if options.quick else options.steps
    for name, steps in zip(parts, budgets or (), strict=False):
        parts[name] = replace(parts[name], train=replace(parts[name].train, budget=f"{steps} steps"))
    if options.quick or not options.compile:
        parts = {name: replace(part, train=replace(part.train, compile=False)) for name, part in parts.items()}
        sampler = replace(s.evaluate.sampler, compile=False, steps=2 if options.quick else s.evaluate.sampler.steps)
        parts["samples"] = replace(s.samples, sampler=sampler)
        parts["evaluate"] = replace(s.evaluate, sampler=sampler)
    s = replace(s, **parts)
    if not options.quick:
        evaluate = replace(s.evaluate, n=min(SAMPLES, s.evaluate.n), polish=True)
        return replace(s, evaluate=replace(evaluate, n_fid=0, kid_subsets=0, milestone_samples=0))
    few = {name: replace(part, train=replace(part.train, batch_size=4)) for name, part in parts.items() if name in FEW}
    return replace(
        s,
        **few,
        samples=replace(s.samples, n=16, n_val=8),
        evaluate=replace(s.evaluate, n=32, subset=32, polish=True, milestone_samples=0, kid_subsets=0),
    )


def rows_of(name: str, seed: int, options: Options) -> dict[str, Any]:
    """The rows of a run's evaluation, and its compute: of its record, or after bringing it to its end.

    A record is kept beside the run's folder, so that runs of several machines make one table.
    """
    chosen, folder = settings_of(name, seed, options), options.out / f"{name}-{options.preset}-{seed}"
    record, key = folder.with_suffix(".json"), stage_keys(chosen.settings)[options.until]
    if record.exists() and (found := json.loads(record.read_text()))["key"] == key:
        return dict(found)
    records = run(chosen, folder, until=options.until, log=lambda line: print(f"  {line}", flush=True), force=True)
    metrics = json.loads((folder / "evaluate" / "metrics.json").read_text())
    seconds = [sum(records[stage].compute_seconds for stage in side) for side in (OURS, ("dm",))]
    second = second_counter(chosen.settings.data, folder) if name == "count" else None
    found = {"key": key, "rows": metrics["rows"], "seconds": seconds, "second": second}
    record.write_text(json.dumps(found, indent=1))
    return found


OURS = ("map", "mdm", "samples", "finetune")


def second_counter(data: Any, folder: Path) -> list[float]:
    """Mean |count − 8| of our and of the baseline's samples by a counter that nothing was trained with."""
    from namm.constraints import Count
    from namm.experiments.engine import build
    from namm.experiments.engine.stages.evaluate import BASELINE, OURS
    from namm.generative.sample_file import SampleFile

    assert isinstance(data, CountData)
    training = replace(data.counter_training, seed=data.counter_training.seed + 1000)
    counter = make_counter(replace(data, counter_training=training), folder / "second_counter.safetensors")
    rule, errors = build.placed(Count(counter, data.count)), []
    for name in (OURS, BASELINE):
        with SampleFile(folder / "evaluate" / name) as samples:
            parts = (samples.images[k : k + 64] for k in range(0, len(samples.distances), 64))
            errors.append(float(np.mean(np.concatenate([rule(to_device(x)).numpy(force=True) for x in parts]))))
    return errors


def to_device(x: Any) -> Any:
    """Images as a tensor where models run."""
    import torch

    from namm.experiments.engine import build

    return torch.as_tensor(x).to(build.device())


def judged(seeds: Sequence[Mapping[str, Any]], way: str = "finetuned") -> tuple[dict[str, Any], str]:
    """Means over seeds of everything that is judged of the row `way`, and the verdict on them."""
    from namm.evaluation.verdict import Figures, judge

    found = {}
    for row in (way, "dm", "data"):
        figures = [Figures.from_row(seed["rows"][row]) for seed in seeds]
        names = ("distance", "mmd", "total_variation", "spread")
        errors = {
            name: float(np.sqrt(np.mean(np.square([getattr(each, name) for each in figures])) / len(figures)))
            for name in ("distance_error", "mmd_error")
        }
        found[row] = Figures(**{name: mean(getattr(each, name) for each in figures) for name in names}, **errors)
    ours, baseline, data = (found[row] for row in (way, "dm", "data"))
    ratio = (ours.distance - data.distance) / (baseline.distance - data.distance)
    return {"ratio": ratio, "ours": ours, "baseline": baseline, "data": data}, judge(ours, baseline, data).outcome


def main(arguments: Sequence[str]) -> int:
    """Run, print the table, judge."""
    options = tyro.cli(Options, args=list(arguments))
    table, missed = [], []
    for name in options.only:
        seeds = []
        for seed in options.seeds:
            print(f"{name}, seed {seed}", flush=True)
            seeds.append(rows_of(name, seed, options))
        found, outcome = judged(seeds)
        ours, baseline = found["ours"], found["baseline"]
        second = ""
        if name == "count":
            errors = np.mean([seed["second"] for seed in seeds], axis=0)
            second = " / ".join(format_number(float(each), ".2g") for each in errors)
            if errors[0] > errors[1]:
                missed.append("count: the second counter")
        if outcome != "works" or found["ratio"] > LIMIT.get(name, 0.5):
            missed.append(name)
        number = format_number
        repair = ""
        if all("repair" in seed["rows"] for seed in seeds):
            other, verdict = judged(seeds, "repair")
            repair = f"{verdict}, {number(other['ratio'], '.3f')}, {other['ours'].mmd:.3f}"
        table.append(
            (
                name,
                outcome,
                number(found["ratio"], ".3f"),
                f"{number(ours.distance, '.3g')} / {number(baseline.distance, '.3g')} / "
                f"{number(found['data'].distance, '.2g')}",
                f"{ours.mmd:.3f} / {baseline.mmd:.3f} / {found['data'].mmd:.3f}",
                f"{ours.total_variation:.2f} / {baseline.total_variation:.2f}",
                f"{ours.spread:.2f} / {baseline.spread:.2f}",
                " / ".join(f"{mean(seed['seconds'][k] for seed in seeds):.0f}" for k in (0, 1)),
                repair,
                second,
            )
        )
    titles = [
        "rule",
        "verdict",
        "ℓ' ratio",
        "ℓ ours / DM / data",
        "√MMD²",
        "TV",
        "spread",
        "seconds",
        "repair: ℓ' ratio, √MMD²",
        "2nd counter",
    ]
    print_table(titles, table, width=150)
    print(
        f"{len(options.only) - len({m.split(':')[0] for m in missed})} of {len(options.only)} rules: works, ℓ' as asked"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
