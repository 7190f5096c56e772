"""The demonstration: the whole of Burgers' experiment at its smallest, told to somebody who sees it for the first time.

What is run is `namm run burgers` with the preset `demo`. Here are only the words, and a version of seconds (`quick`)
that goes through the same motions and learns nothing.
"""

import shlex
import textwrap
from dataclasses import replace
from pathlib import Path

from namm.evaluation.verdict import Verdict
from namm.experiments.burgers import BurgersData
from namm.experiments.engine.folder import SETTINGS, Record, is_done
from namm.experiments.engine.run import Logger, run
from namm.experiments.engine.settings import ForwardSettings, NetworkSettings, SamplerSettings, with_seed
from namm.experiments.engine.settings_file import changes, to_yaml
from namm.experiments.engine.stages import MAIN_LINE, stage_keys, stages_until
from namm.experiments.engine.stages.evaluate import run_verdict
from namm.experiments.engine.stages.report import FILE
from namm.experiments.presets import Preset, preset
from namm.formatting import format_number
from namm.training.settings import TrainSettings

INTRODUCTION = (
    "Images that obey Burgers' equation: each column is a velocity field, the next column the same field a moment "
    "later. ℓ(x) says how far an image x is from the equation, and it is zero where it holds. A diffusion model that "
    "is trained on such images makes new ones that look right and break the equation. Here both ways are tried, with "
    "the same network and the same compute."
)
ABOUT = {
    "data": "Solving the equation from random starts: images to learn from, and others to judge by.",
    "map": "Learning a map g to a mirror space without the rule, and a map f back that lands on the rule even where "
    "noise was added.",
    "mdm": "Training a diffusion model on the mirror images g(x), where nothing has to be obeyed.",
    "samples": "Drawing samples from it, to see what f will really be given.",
    "finetune": "Training f a little more, on those samples.",
    "dm": "The baseline: the same diffusion model on the images themselves, for the compute that all of this took.",
    "repair": "Repair, at the same compute: samples of the baseline as it was earlier in its training, and f "
    "trained on them.",
    "evaluate": "Drawing new samples of both, and comparing them with real images that nobody was trained on.",
    "report": "Writing all this on one page.",
}
FINDINGS = {
    "data": "{images} images of {shape}; their own mean ℓ is {distance_mean}, which is rounding",
    "map": "{steps} steps; on held-out images noise makes a mean ℓ of {distance_noise}, and the same noise, added "
    "in mirror space and brought back by f, {distance_map}",
    "mdm": "{steps} steps",
    "samples": "{samples} samples; brought back by f they have a mean ℓ of {distance_mean}",
    "finetune": "{steps} steps; on held-out samples mean ℓ went from {distance_samples_before} to {distance_samples}",
    "dm": "{steps} steps",
    "repair": "{steps} steps; on held-out samples mean ℓ went from {distance_samples_before} to {distance_samples}",
    "evaluate": "compute was {compute}",
}
WIDTH = 100
"""Letters in a line."""


def demo(folder: str | Path, *, seed: int = 0, quick: bool = False, log: Logger = print, progress: bool = True) -> Path:
    """Run everything, or what is missing of it, and tell what happens; returns the path of the report.

    Args:
        folder: Folder of the run; one that was interrupted goes on, a finished one is told again.
        seed: Seed of data, trainings and samples.
        quick: Shrink everything to seconds.
        log: Called with what is to be printed.
        progress: Show progress bars.
    """
    folder, chosen = Path(folder), preset("burgers", "demo")
    chosen = shrunk(chosen) if quick else chosen
    settings = with_seed(chosen.settings, seed)
    chosen = replace(chosen, settings=settings)
    stages, keys = stages_until(MAIN_LINE, settings), stage_keys(settings)
    budgets = {name: f" ({getattr(settings, name).train.budget})" for name in ("map", "mdm", "finetune")}

    text = to_yaml(chosen)
    if (folder / SETTINGS).exists() and (before_text := (folder / SETTINGS).read_text()) != text:
        log(_filled(f"settings changed since the last call: {changes(before_text, text)}"))
    log(_filled(INTRODUCTION))
    records: dict[str, Record] = {}
    for k, stage in enumerate(stages, 1):
        name = stage.name
        log("\n" + _filled(f"{k} of {len(stages)}, {name}{budgets.get(name, '')}: {ABOUT[name]}"))
        before = is_done(folder / name, keys[name])
        # It goes to its end whatever comes of it: budgets are minutes, and on a busy machine a map may be poor.
        records = run(chosen, folder, until=name, log=lambda line: None, progress=progress, force=True)
        log(_filled(f"{'done before, ' if before else ''}{_outcome(name, records[name])}.", "    "))
        if stage.gate and (judged := records[name].verdict) is not None:
            log(_filled(f"The verdict on it is {Verdict.from_json(judged).headline}", "    "))
    verdict = run_verdict(folder)
    assert verdict is not None  # the evaluation is complete
    log("\n" + "\n".join(_filled(line, "    " if k else "") for k, line in enumerate(verdict.lines())))
    if (half := records["evaluate"].results.get("distance_baseline_half_way")) is not None:
        log(_filled(f"Half-way through its training the baseline's mean ℓ was {format_number(half)}."))
    log(f"\nNext:\n{_next(folder)}\n")
    path = folder / MAIN_LINE / FILE
    log(f"The report, with pictures: {path}")
    return path


def _outcome(stage: str, record: Record) -> str:
    """How long a stage took, and what it found."""
    compute = f", {record.compute_seconds:.0f} s of it compute" if record.compute_seconds else ""
    results = {
        name: format_number(value, ".2g") if isinstance(value, float) else value
        for name, value in record.results.items()
    }
    findings = f": {FINDINGS[stage].format(**results)}" if stage in FINDINGS else ""
    return f"{record.seconds:.0f} s{compute}{findings}"


def _next(folder: Path) -> str:
    """What to try after this."""
    where = shlex.quote(str(folder))
    commands = {
        f"namm evaluate {where}": "every figure, also of the baseline projected and repaired",
        f"namm sample {where} -n 100 -o samples.h5": "more samples",
        "namm run periodic": "another rule; `namm run --help` lists all",
        "namm run burgers --preset gpu": "the paper's size of images, on a GPU",
        "python examples/own_constraint.py": "a rule of your own, on images of your own",
    }
    width = max(map(len, commands))
    return "\n".join(f"    {command:<{width}}  {what}" for command, what in commands.items())


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def shrunk(chosen: Preset) -> Preset:
    """The same with images of 8 × 8, networks of a few filters and a few steps of everything."""
    s = chosen.settings

    def short(train: TrainSettings) -> TrainSettings:
        return replace(train, budget="6 steps", batch_size=4)

    sampler = SamplerSettings(s.evaluate.sampler.method, 4)
    f = replace(s.map.f, filters=4, blocks=1, downsamplings=1)
    network = NetworkSettings(filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0, unshuffle=2)
    smaller = replace(
        s,
        data=BurgersData(80, 16, 64, size=8, dt=0.05),
        map=replace(s.map, g=ForwardSettings(layers=1, filters=4), f=f, train=short(s.map.train)),
        mdm=replace(s.mdm, network=network, train=short(s.mdm.train)),
        samples=replace(s.samples, n=32, n_val=16, sampler=sampler),
        finetune=replace(s.finetune, train=short(s.finetune.train)),
        dm=replace(s.dm, train=short(s.dm.train)),
        evaluate=replace(s.evaluate, n=64, subset=32, mmd_subsets=2, milestone_samples=16, sampler=sampler),
    )
    return replace(chosen, settings=smaller)
