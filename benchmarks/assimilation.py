"""Mirror DPS against DPS and CG-DPS on Burgers' equation, each at its best settings, over seeds.

Trains the demo-size experiment once per seed, with more of its minutes for f (`with_more_map`), observes the first
eighth of the columns of held-out images with noise 0.2, chooses each method's ζ, and CG-DPS's weight, on other held-out
images (`namm.experiments.assimilation.tuning` says how), and compares them:

    mean ℓ of mirror DPS at least 3 times below DPS's and 2 times below CG-DPS's, at a χ² within 10 % of the truths' own
    and no more than 10 % above the others', and with an error against the truth that is no worse: its mean excess over
    truths is within one standard error

    python benchmarks/assimilation.py [--seeds 0 1 2] [--truths 16] [--n 32] [--steps 100] [--out runs/assimilation]
                                      [--zetas …] [--weights …] [--guidance dps|likelihood] [--times 1] [--compile]
                                      [--figure FILE] [--json FILE] [--join FILE …]

What is complete in --out is not trained again. Trainings take --times their minutes, both sides alike;
`--compile` is for a GPU. Seeds that other calls wrote with --json are read from there if they are given to --join. The
exit code is 1 if a seed falls short.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from namm.cli import spin_briefly
from namm.experiments.assimilation.assimilate import (
    GUIDANCES,
    METHODS,
    TITLES,
    PosteriorSummary,
    Sampling,
    Score,
    assimilate,
    priors,
    score,
)
from namm.experiments.assimilation.posterior_file import read_score
from namm.experiments.assimilation.tasks import NOISE, make_task, other_numbers
from namm.experiments.assimilation.tuning import TOLERANCE, choose, tune
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.engine.settings import Settings, with_seed
from namm.experiments.presets import Preset, preset
from namm.files import write_json
from namm.inverse import AncestralSteps, DDIMSteps
from shared import TIMES, folder_name, lengthened

OURS, LEAST = "mirror-dps", {"dps": 3.0, "cg-dps": 2.0}
"""How many times the others' ℓ must be ours."""


@dataclass(frozen=True, eq=False)
class Study:
    """One seed: all that was tried on other truths, and what the chosen settings do on the truths to judge by.

    `tried_chi2` and `chi2` are the χ² of these truths themselves; `found` and `errors`, one for each truth to judge by,
    are by method.
    """

    tried: dict[str, list[Score]]
    tried_chi2: float
    chi2: float
    found: dict[str, Score]
    errors: dict[str, list[float]]


def with_more_map(s: Settings) -> Settings:
    """`s` with a map that learns twice as long, and finetuning thrice, with ten times the weight on the rule."""
    weights = replace(s.finetune.weights, constraint=10 * s.finetune.weights.constraint)
    tuning = replace(s.finetune.train, budget="450 steps", learning_rate=1e-3)
    return replace(
        s,
        map=replace(s.map, train=replace(s.map.train, budget="800 steps")),
        finetune=replace(s.finetune, weights=weights, train=tuning),
    )


def study(chosen: Preset, folder: Path, options: argparse.Namespace) -> Study:
    """Train what is missing, choose, compare."""
    for stage in ("finetune", "dm"):
        run(chosen, folder, until=stage, force=True)
    trained = RunParts.load(folder)
    rule, sources = trained.rule(), priors(trained, METHODS)
    steps = AncestralSteps(options.steps) if options.steps >= 1000 else DDIMSteps(options.steps)
    sampling = Sampling(options.n, steps, options.batch_size)
    task = make_task(trained, None, NOISE, range(options.truths))
    others = make_task(trained, None, NOISE, other_numbers(trained, task.numbers, options.tune_truths))
    few = replace(sampling, n=options.tune_n)
    how = {"guidance": options.guidance, "zetas": options.zetas, "weights": options.weights}
    tried = tune(sources, others, rule, few, log=_print, **how)
    found: dict[str, Score] = {}
    errors: dict[str, list[float]] = {}
    for method, own in tried.items():
        outcome = assimilate(sources[method], task, choose(own, others.truth_chi2).setting, rule, sampling)
        found[method], errors[method] = score(outcome), outcome.error.tolist()
    return Study(tried, others.truth_chi2, task.truth_chi2, found, errors)


def verdict(one: Study) -> dict[str, tuple[float, bool]]:
    """Every figure that something is asked of, and whether it is met."""
    ours, found, errors = one.found[OURS], one.found, one.errors
    judged = {"χ² of ours / truths'": (ours.chi2 / one.chi2, abs(ours.chi2 / one.chi2 - 1) <= 0.1)}
    for method, least in LEAST.items():
        other, name = found[method], TITLES[method]
        ratio, misfit = other.distance / ours.distance, ours.chi2 / other.chi2
        excess = np.subtract(errors[OURS], errors[method])
        judged[f"ℓ of {name} / ours"] = ratio, ratio >= least
        judged[f"χ² of ours / {name}"] = misfit, misfit <= 1.1
        standard_error = excess.std(ddof=1) / len(excess) ** 0.5 if len(excess) > 1 else 0.0
        judged[f"error of ours / {name}"] = ours.error / other.error, bool(excess.mean() <= standard_error)
    whole = sum(each.failed for each in found.values())
    return judged | {"samples that failed": (float(whole), whole == 0)}


def read(path: Path) -> dict[int, Study]:
    """The studies that a call wrote, by seed."""
    return {
        int(seed): Study(
            tried={method: [read_score(row) for row in each["tried"][method]] for method in METHODS},
            tried_chi2=each["tried_chi2"],
            chi2=each["chi2"],
            found={method: read_score(each["found"][method]) for method in METHODS},
            errors=each["errors"],
        )
        for seed, each in json.loads(path.read_text()).items()
    }


def _print(outcome: PosteriorSummary) -> None:
    s = score(outcome)
    print(
        f"  {s.setting.title:<12} ζ {s.setting.zeta:<8.3g} ℓ {s.distance:.4f}  χ² {s.chi2:<8.3g} error {s.error:.4f}  "
        f"redrawn {s.redrawn}, failed {s.failed}  {s.seconds:.1f} s",
        flush=True,
    )


def show(seed: int, one: Study, console: Console) -> None:
    """The tables of one seed."""
    columns = ("method", "ζ", "mean ℓ", "χ²", "error", "spread", "coverage", "redrawn", "seconds")
    first = one.found[OURS]
    title = f"seed {seed}: {first.truths} truths, whose χ² is {one.chi2:.3f}, {first.samples} samples each"
    table = Table(*columns, title=title, title_justify="left")
    for s in one.found.values():
        table.add_row(
            *(s.setting.title, f"{s.setting.zeta:.3g}", f"{s.distance:.2e} ± {s.distance_std:.2e}"),
            *(f"{s.chi2:.3f}", f"{s.error:.4f}", f"{s.spread:.4f}"),
            *("–" if s.coverage is None else f"{s.coverage:.2f}", str(s.redrawn), f"{s.seconds:.0f}"),
        )
    console.print(table)


def figure(studies: Mapping[int, Study], path: Path) -> None:
    """ℓ against error of everything that was tried, filled where χ² fits, a star where it was chosen; by seed."""
    from namm.report.figures import look, new_figure, plain_ticks, save
    from namm.report.figures.inverse import COLOURS

    with look("light"):
        drawing = new_figure(2.6 * len(studies) + 0.3)
        axes = drawing.subplots(len(studies), 1, squeeze=False, sharex=True)[:, 0]
        for axis, (seed, one) in zip(axes, studies.items(), strict=True):
            shown = [s for tried in one.tried.values() for s in tried if s.failed == 0]
            for s in shown:
                colour = COLOURS[TITLES[s.setting.method]]
                face = colour if abs(s.chi2 / one.tried_chi2 - 1) <= TOLERANCE else "none"
                axis.scatter([s.error], [s.distance], s=14, facecolors=face, edgecolors=colour, linewidths=0.8)
            for method, best in one.found.items():
                own = next(s for s in one.tried[method] if s.setting == best.setting)
                label = f"{best.setting.title}, ζ {best.setting.zeta:.2g}"
                star = {"s": 90, "marker": "*", "color": COLOURS[TITLES[method]], "label": label, "zorder": 3}
                axis.scatter([own.error], [own.distance], **star)
            axis.set(xscale="log", yscale="log", ylabel=f"seed {seed}: mean ℓ")
            plain_ticks(axis.yaxis, min(s.distance for s in shown), max(s.distance for s in shown) * 1.001)
            plain_ticks(axis.xaxis, min(s.error for s in shown), max(s.error for s in shown) * 1.001)
            axis.legend(loc="best")
        axes[-1].set_xlabel("error against the truth (filled: χ² within 10 % of the truth's)")
        save(drawing, path)


def main(arguments: Sequence[str] | None = None, base: Preset | None = None) -> int:
    """Run what is missing, print the tables and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--truths", type=int, default=16, help="held-out images to judge by")
    parser.add_argument("--n", type=int, default=32, help="samples of each")
    parser.add_argument("--tune-truths", type=int, default=8, help="other held-out images, to choose settings on")
    parser.add_argument("--tune-n", type=int, default=8, help="samples of each of these")
    parser.add_argument("--steps", type=int, default=100, help="DDIM steps; from 1000 on they are ancestral")
    parser.add_argument("--guidance", choices=GUIDANCES, default="dps", help="the paper's, or by the likelihood")
    parser.add_argument("--zetas", type=float, nargs="+", default=(), help="to try; by default a wide grid")
    parser.add_argument("--weights", type=float, nargs="+", default=(), help="to try in CG-DPS")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--times", type=float, default=TIMES, help="of the preset's minutes")
    parser.add_argument("--compile", action="store_true", help="compile the trainings")
    parser.add_argument("--out", type=Path, default=Path("runs/assimilation"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", type=Path, nargs="+", default=(), help="files of --json to take seeds from")
    options = parser.parse_args(arguments)
    spin_briefly()
    demo, console = preset("burgers", "demo"), Console(width=120)
    chosen = base or replace(demo, settings=with_more_map(demo.settings))
    written = {seed: one for path in options.join for seed, one in read(path).items()}
    studies = {}
    for seed in options.seeds:
        settings = lengthened(with_seed(chosen.settings, seed), options.times, compile=options.compile)
        folder = options.out / folder_name(chosen.experiment, chosen.name, options.times, seed)
        studies[seed] = written[seed] if seed in written else study(replace(chosen, settings=settings), folder, options)
        show(seed, studies[seed], console)
    verdicts = {seed: verdict(one) for seed, one in studies.items()}
    table = Table("", *(f"seed {seed}" for seed in verdicts), title="ratios", title_justify="left")
    for name in next(iter(verdicts.values())):
        figures = (judged[name] for judged in verdicts.values())
        table.add_row(name, *(f"{value:.3f}{'' if met else ' (short)'}" for value, met in figures))
    console.print(table)
    if options.json:
        write_json(options.json, {str(seed): asdict(one) for seed, one in studies.items()})
    if options.figure:
        figure(studies, options.figure)
    return 0 if all(met for judged in verdicts.values() for _, met in judged.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
