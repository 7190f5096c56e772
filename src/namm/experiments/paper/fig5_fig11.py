"""Figs. 5 and 11: data assimilation with the models of a finished run, at the paper's settings and at others.

Both measure in a folder of the run's own, which holds everything it depends on in its name, and show what lies there.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from namm.experiments.assimilation.assimilate import (
    METHODS,
    PAPER_STEPS,
    PAPER_WEIGHT,
    Outcome,
    Sampling,
    Score,
    Setting,
    priors,
)
from namm.experiments.assimilation.figures import outcomes_figure
from namm.experiments.assimilation.posterior_file import read_distances, read_score, read_scores, write_outcomes
from namm.experiments.assimilation.tasks import NOISE, Task, make_task
from namm.experiments.assimilation.tuning import grid, try_settings
from namm.experiments.paper.measurements import by_experiment, complete, study, trained
from namm.experiments.paper.output import Shown, Table
from namm.experiments.sweeps.cell import CellOutcome
from namm.files import write_atomically, write_json
from namm.inverse import AncestralSteps, DDIMSteps
from namm.report.figures import Array
from namm.report.figures.inverse import Tried, guidance_figure

FILE, SCORES, PICTURES = "assimilation.h5", "scores.json", "pictures.npz"
SETTINGS = [Setting(method, weight=PAPER_WEIGHT if method == "cg-dps" else 0.0) for method in METHODS]
"""The paper's, of Fig. 5."""
ZETAS, WEIGHTS, SAMPLES = (0.001, 0.01, 0.1), (50.0, 200.0), 8
"""Settings of Fig. 11: the paper's ζ and smaller ones, and samples of each setting."""
FEW_STEPS = 200
"""In place of 1000 where the preset is a demonstration."""
NEEDS = ("data", "mdm", "finetune", "dm")
FORMATS = {
    **{"experiment": "", "run": "", "method": "", "ζ": ".3g", "steps": "d", "samples": "d"},
    **{"mean ℓ": ".3g", "χ² per value": ".3g", "error": ".3g", "coverage": ".2f", "redrawn": "d", "failed": "d"},
}


# Fig. 5


def measure5(outcome: CellOutcome, progress: bool) -> None:
    """32 samples of one held-out truth by each method."""
    parts = trained(outcome)
    sources, task, sampling = priors(parts, METHODS), _task(outcome), _sampling(outcome)
    write_outcomes(_folder5(outcome) / FILE, task, sources, SETTINGS, parts.rule(), sampling, progress=progress)


def fig5(outcomes: Sequence[CellOutcome]) -> Shown:
    """Truth, observation, means, samples, spreads, residuals and distances, and the figures of every run."""
    rows: list[Any] = []
    figures, drawn = {}, {}
    for experiment, cells in by_experiment(outcomes).items():
        done = complete(cells)
        for outcome in done:
            found = read_scores(_folder5(outcome) / FILE)
            rows += [_row(experiment, outcome, score) for score in found]
        if done:
            file, name = _folder5(done[0]) / FILE, f"fig5-{experiment}"
            figures[name] = outcomes_figure(file, _task(done[0]), trained(done[0]).rule())
            distances = {s.title: values.tolist() for s, values in read_distances(file).items()}
            drawn[name] = {"run": done[0].cell.name, "distances": distances}
    return Shown(Table(FORMATS, rows), figures, drawn)


# Fig. 11


def measure11(outcome: CellOutcome, progress: bool) -> None:
    """A few samples of one held-out truth at every ζ and weight."""
    folder = _folder11(outcome)
    if (folder / SCORES).exists():
        return
    parts, pictures = trained(outcome), {}

    def keep(made: Outcome) -> None:
        if not made.failed[0, 0]:
            shown = made.samples if made.residuals is None or made.residuals.ndim != 5 else made.residuals
            pictures[_key(made.setting)] = shown[0, 0].numpy()

    sampling = replace(_sampling(outcome), n=SAMPLES)
    settings = grid(METHODS, ZETAS, WEIGHTS)
    scores = try_settings(priors(parts, METHODS), _task(outcome), settings, parts.rule(), sampling, keep)
    write_atomically(folder / PICTURES, _npz(pictures))
    write_json(folder / SCORES, [asdict(score) for score in scores])


def fig11(outcomes: Sequence[CellOutcome]) -> Shown:
    """Residuals of a sample by method and ζ, above ℓ, χ² and error."""
    rows: list[Any] = []
    figures, drawn = {}, {}
    for experiment, cells in by_experiment(outcomes).items():
        done = complete(cells)
        found = [[read_score(row) for row in json.loads((_folder11(o) / SCORES).read_text())] for o in done]
        rows += [_row(experiment, o, score) for o, scores in zip(done, found, strict=True) for score in scores]
        if done:
            name = f"fig11-{experiment}"
            figures[name], drawn[name] = _guidance(_folder11(done[0]), found[0]), {"run": done[0].cell.name}
    return Shown(Table(FORMATS, rows), figures, drawn)


def _guidance(folder: Path, scores: Sequence[Score]) -> Any:
    with np.load(folder / PICTURES, allow_pickle=False) as file:
        pictures: dict[str, Array] = {name: file[name] for name in file.files}
    ranked = sorted(scores, key=lambda s: (s.setting.method != "mirror-dps", s.setting.weight, s.setting.zeta))
    tried = [
        Tried(s.setting.title, s.setting.zeta, s.distance, s.chi2, s.error, pictures.get(_key(s.setting)))
        for s in ranked
    ]
    return guidance_figure(tried)


def _key(setting: Setting) -> str:
    return f"{setting.title} {setting.zeta:g}"


def _npz(arrays: dict[str, Any]) -> bytes:
    import io

    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


# What both share


def _task(outcome: CellOutcome) -> Task:
    return make_task(trained(outcome), None, NOISE, range(1))


def _sampling(outcome: CellOutcome) -> Sampling:
    demo = outcome.cell.preset.name == "demo"
    return Sampling(steps=DDIMSteps(FEW_STEPS) if demo else AncestralSteps(PAPER_STEPS))


def _folder5(outcome: CellOutcome) -> Path:
    asked = [[asdict(setting) for setting in SETTINGS], _sampling(outcome).steps.steps]
    return study(outcome, "assimilation", NEEDS, asked)


def _folder11(outcome: CellOutcome) -> Path:
    return study(outcome, "guidance", NEEDS, [list(ZETAS), list(WEIGHTS), SAMPLES, _sampling(outcome).steps.steps])


def _row(experiment: str, outcome: CellOutcome, s: Score) -> list[Any]:
    steps = _sampling(outcome).steps.steps
    figures = [s.distance, s.chi2, s.error, s.coverage, s.redrawn, s.failed]
    return [experiment, outcome.cell.name, s.setting.title, s.setting.zeta, steps, s.samples, *figures]
