"""How long until the first step: imports, compilers, first calls.

    python benchmarks/warm_up.py [--stages score score-compiled map sampling] [--json FILE] [--quick]

    score             training the score network of the preset `gpu`: recorded, with kernels of our own
    score-compiled    the same by torch's compiler: the baseline
    map               training g and f of that preset: compiled
    sampling          that score network for batches of 256: recorded

Each stage runs twice, in a process of its own: the first finds nothing compiled, the second what the first has left.
Python may keep its bytecode, whatever PYTHONDONTWRITEBYTECODE says: without it imports take twice as long.
Prints the seconds from the start of a process until torch is imported, until all is, and until the first step is done,
and how many times sooner that is than the baseline's. The exit code is 1 if a stage other than the baseline takes
longer than 60 s the first time or 15 s the second. It needs a GPU; `--quick` takes tiny networks, on a CPU too, and
compiles nothing: it shows that all of it runs.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

OURS, BASELINE = "score", "score-compiled"
STAGES = (OURS, BASELINE, "map", "sampling")
LIMITS = {"cold": 60.0, "warm": 15.0}


@dataclass(frozen=True)
class Moments:
    """Seconds since a process was started."""

    torch: float
    imports: float
    first_step: float


# In a process of its own, which imports as late as it can


def run(stage: str, start: float, quick: bool) -> Moments:
    """Make the first step of `stage`; `start` is a time of the machine's clock."""
    import torch

    with_torch = time.time() - start
    from gpu import map_objective, score_model
    from gpu_tools import Bench, compiled_by_torch
    from namm.experiments import build
    from namm.training.maps import project_weights
    from namm.training.models import ModelObjective
    from namm.training.objectives import Objective
    from namm.training.trainer import train

    with_all, cuda = time.time() - start, torch.cuda.is_available()
    bench = Bench(torch.device("cuda" if cuda else "cpu"), 4 if quick else 256, "bf16" if cuda else "fp32", quick)
    settings, first = bench.settings("burgers", "gpu"), []

    def done() -> None:
        bench.clock()
        first.append(time.time() - start)

    after = [done]
    if stage == "sampling":
        model = score_model(settings)
        y = bench.images(bench.batch, bench.place(model).sample_shape)
        with torch.no_grad(), bench.arithmetic(), nullcontext() if quick else model.compiled(bench.batch):
            model.denoise(y, torch.ones(len(y), device=y.device))
        done()
        return Moments(with_torch, with_all, first[0])
    objective: Objective
    if stage == "map":
        objective, own = (maps := map_objective(settings)), settings.map.train
        after.insert(0, project_weights(maps.mirror))
    else:
        objective, own = ModelObjective(score_model(settings)), settings.mdm.train

    def after_step() -> None:
        for each in after:
            each()

    how = replace(own, budget="1 steps", compile=not quick, validations=0, milestones=0)
    images = bench.images(how.batch_size, build.dataset(settings.data).shape)
    with compiled_by_torch() if stage == BASELINE else nullcontext():
        train(objective, (images,), how, after_step=after_step)
    return Moments(with_torch, with_all, first[0])


# Around them


def measured(stage: str, caches: str, quick: bool) -> Moments:
    """What a new process tells."""
    from gpu_tools import told_by

    start = ["--start", repr(time.time())]
    return Moments(**told_by(__file__, ["--run", stage, *start, *(["--quick"] if quick else [])], caches))


def _tell_where() -> None:
    import torch

    from gpu_tools import facts, stamp

    where = facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(stamp(where), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--json", type=Path, help="written anew after every stage")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--run", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        print(json.dumps(asdict(run(options.run, options.start, options.quick))))
        return 0
    _tell_where()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for stage in options.stages:
        with tempfile.TemporaryDirectory() as caches:
            found[stage] = {each: asdict(measured(stage, caches, options.quick)) for each in LIMITS}
        for each, seconds in found[stage].items():
            told = ", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in seconds.items())
            print(f"{stage}, {each}: {told}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2))
    if {OURS, BASELINE} <= found.keys():
        for each in LIMITS:
            ratio = found[BASELINE][each]["first_step"] / found[OURS][each]["first_step"]
            print(f"{BASELINE} / {OURS}, {each}: {ratio:.2f}")
    late = [
        f"{stage}, {each}: {seconds['first_step']:.1f} s, {LIMITS[each]:.0f} asked"
        for stage, rows in found.items()
        for each, seconds in rows.items()
        if stage != BASELINE and seconds["first_step"] > LIMITS[each]
    ]
    print("\n".join(f"missed: {line}" for line in late) or "every stage is in time")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
