"""Figs. 5 and 11: data assimilation with the models of a finished run, at the paper's settings and at others.

Both measure in a folder of the run's own, which holds everything it depends on in its name, and show what lies there.
"""

import io
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from namm.experiments.assimilation.assimilate import (
    METHODS,
    PAPER_STEPS,
    PAPER_WEIGHT,
    PosteriorSummary,
    Sampling,
    Score,
    Setting,
    priors,
)
from namm.experiments.assimilation.posterior_file import (
    outcomes_figure,
    read_distances,
    read_score,
    read_scores,
    write_outcomes,
)
from namm.experiments.assimilation.tasks import NOISE, Task, make_task
from namm.experiments.assimilation.tuning import grid, try_settings
from namm.experiments.paper.measurements import FinishedRun
from namm.experiments.paper.output import Part, Runs, Value
from namm.files import read_json, write_atomically, write_json
from namm.inverse import AncestralSteps, DDIMSteps
from namm.report.figures import Array
from namm.report.figures.inverse import Tried, guidance_figure

SETTINGS = [Setting(method, weight=PAPER_WEIGHT if method == "cg-dps" else 0.0) for method in METHODS]
"""The paper's, of Fig. 5."""
ZETAS, WEIGHTS, SAMPLES = (0.001, 0.01, 0.1), (50.0, 200.0), 8
"""Settings of Fig. 11: the paper's ζ and smaller ones, and samples of each setting."""
FEW_STEPS = 200
"""In place of 1000 where the preset is a demonstration."""
SCORES, PICTURES = "scores.json", "pictures.npz"
FORMATS = {
    **{"run": "", "method": "", "ζ": ".3g", "steps": "d", "samples": "d"},
    **{"mean ℓ": ".3g", "χ² per value": ".3g", "error": ".3g", "coverage": ".2f", "redrawn": "d", "failed": "d"},
}


# Fig. 5


def measure5(run: FinishedRun, progress: bool) -> None:
    """32 samples of one held-out truth by each method."""
    sources, rule, sampling = priors(run.parts, METHODS), run.parts.rule(), _sampling(run)
    write_outcomes(_file5(run), _task(run), sources, SETTINGS, rule, sampling, progress=progress)


def fig5(runs: Runs) -> Part:
    """Truth, observation, means, samples, spreads, residuals and distances, and the figures of every run."""
    rows = [_row(run, score) for run in runs.complete for score in read_scores(_file5(run))]
    if not runs.complete:
        return Part(FORMATS, rows)
    first = runs.complete[0]
    figure = outcomes_figure(_file5(first), _task(first), first.parts.rule())
    distances = {setting.title: values.tolist() for setting, values in read_distances(_file5(first)).items()}
    return Part(FORMATS, rows, figure, {"run": first.cell.name, "distances": distances})


# Fig. 11


def measure11(run: FinishedRun, progress: bool) -> None:
    """A few samples of one held-out truth at every ζ and weight."""
    folder = _folder11(run)
    if (folder / SCORES).exists():
        return
    pictures: dict[str, Any] = {}

    def keep(made: PosteriorSummary) -> None:
        if not made.failed[0, 0]:
            shown = made.samples if made.residuals is None or made.residuals.ndim != 5 else made.residuals
            pictures[_key(made.setting)] = shown[0, 0].numpy()

    sampling, settings = replace(_sampling(run), n=SAMPLES), grid(METHODS, ZETAS, WEIGHTS)
    scores = try_settings(priors(run.parts, METHODS), _task(run), settings, run.parts.rule(), sampling, keep)
    packed = io.BytesIO()
    np.savez(packed, **pictures)
    write_atomically(folder / PICTURES, packed.getvalue())
    write_json(folder / SCORES, [asdict(score) for score in scores])


def fig11(runs: Runs) -> Part:
    """Residuals of a sample by method and ζ, above ℓ, χ² and error."""
    scores = [[read_score(row) for row in read_json(_folder11(run) / SCORES)] for run in runs.complete]
    rows = [_row(run, score) for run, own in zip(runs.complete, scores, strict=True) for score in own]
    if not runs.complete:
        return Part(FORMATS, rows)
    first = runs.complete[0]
    return Part(FORMATS, rows, _guidance(_folder11(first), scores[0]), {"run": first.cell.name})


def _guidance(folder: Path, scores: Sequence[Score]) -> Figure:
    with np.load(folder / PICTURES, allow_pickle=False) as file:
        pictures: dict[str, Array] = {name: file[name] for name in file.files}
    ranked = sorted(scores, key=lambda s: (s.setting.method != "mirror-dps", s.setting.weight, s.setting.zeta))
    return guidance_figure(
        [
            Tried(s.setting.title, s.setting.zeta, s.distance, s.chi2, s.error, pictures.get(_key(s.setting)))
            for s in ranked
        ]
    )


def _key(setting: Setting) -> str:
    return f"{setting.title} {setting.zeta:g}"


# Shared by both


def _task(run: FinishedRun) -> Task:
    return make_task(run.parts, None, NOISE, range(1))


def _sampling(run: FinishedRun) -> Sampling:
    demo = run.cell.preset.name == "demo"
    return Sampling(steps=DDIMSteps(FEW_STEPS) if demo else AncestralSteps(PAPER_STEPS))


def _folder(run: FinishedRun, name: str, *asked: Any) -> Path:
    return run.study(name, ("data", "mdm", "finetune", "dm"), [*asked, _sampling(run).steps.steps])


def _file5(run: FinishedRun) -> Path:
    return _folder(run, "assimilation", [asdict(setting) for setting in SETTINGS]) / "assimilation.h5"


def _folder11(run: FinishedRun) -> Path:
    return _folder(run, "guidance", list(ZETAS), list(WEIGHTS), SAMPLES)


def _row(run: FinishedRun, s: Score) -> list[Value]:
    how: list[Value] = [run.cell.name, s.setting.title, s.setting.zeta, _sampling(run).steps.steps, s.samples]
    return [*how, s.distance, s.chi2, s.error, s.coverage, s.redrawn, s.failed]
