"""Fig. 8: a variational autoencoder in mirror space (MVAE) against the same one on the data (VAE), App. A.

No stage samples the autoencoders, so this does: as many of each as an evaluation takes, scored like one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from namm.evaluation.rows import View
from namm.experiments.engine.run_parts import describe_samples
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages.report import view_of
from namm.experiments.paper.measurements import (
    HISTOGRAM,
    by_experiment,
    complete,
    images_of,
    score,
    settings_of,
    study,
    trained,
)
from namm.experiments.paper.output import Shown, Table
from namm.experiments.paper.table1 import FORMATS, no_kid, score_row, without_paper
from namm.experiments.sweeps.cell import CellOutcome
from namm.files import write_json
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import IdentityMap
from namm.report.figures.samples import Method, samples_figure

FILE = "scores.json"
NAMES = {"mvae": "MVAE", "vae": "VAE", "data": "data"}
SHOWN = 3
"""Samples in the picture, as in the paper."""


def fig8(outcomes: Sequence[CellOutcome]) -> Shown:
    """Samples, residuals and distances of both, and their scores."""
    rows, figures, drawn, without = [], {}, {}, []
    for experiment, cells in by_experiment(outcomes).items():
        done = complete(cells)
        found = [json.loads((_folder(outcome) / FILE).read_text()) for outcome in done]
        reported = cells[0].cell.preset.reported
        for method, name in NAMES.items():
            rows.append(score_row(experiment, name, [each[method] for each in found], reported, None))
        if found and "kid" not in found[0]["mvae"]:
            without.append(experiment)
        if done:
            rule = trained(done[0]).rule().cpu()
            methods = [_method(_folder(done[0]) / f"{name}.h5", NAMES[name], rule) for name in ("mvae", "vae")]
            floor, key = found[0]["data"]["distance"]["mean"], f"fig8-{experiment}"
            figures[key] = samples_figure(methods, view=view_of(rule), floor=floor)
            drawn[key] = {"run": done[0].cell.name} | {each.name: each.distances.tolist() for each in methods}
    return Shown(without_paper(Table(FORMATS, rows)), figures, drawn, notes=no_kid(without))


def measure(outcome: CellOutcome, progress: bool) -> None:
    """Samples and scores of both autoencoders, and the floor that real images set."""
    folder = _folder(outcome)
    if (folder / FILE).exists():
        return
    parts = trained(outcome)
    rule, asked = parts.rule(), settings_of(outcome).evaluate
    sources = {"mvae": parts.source("mvae", parts.mirror("map")), "vae": parts.source("vae", IdentityMap())}
    scores: dict[str, Any] = {}
    with images_of(outcome) as store:
        reference = store[asked.reference]
        for name, source in sources.items():
            path = folder / f"{name}.h5"
            about = describe_samples(source, None)
            write_samples(path, source, asked.n, seed=asked.seed, description=about, constraint=rule, progress=progress)
            with SampleFile(path) as samples:
                scores[name] = score(outcome, samples.images, reference, rule)
        other = "train" if asked.reference == "test" else "test"
        real = View(store[other], np.arange(min(asked.n, store.sizes[other])))
        scores["data"] = score(outcome, real, reference, rule)
    write_json(folder / FILE, scores)


def _folder(outcome: CellOutcome) -> Path:
    asked = plain(settings_of(outcome).evaluate)
    return study(outcome, "autoencoders", ("data", "map", "mvae", "vae"), asked)


@torch.no_grad()
def _method(path: Path, name: str, rule: Any) -> Method:
    with SampleFile(path) as samples:
        images, found = samples.images[:SHOWN], samples.distances
    residuals = rule.residual(images).numpy() if rule.has_residual else None
    pictures = residuals if residuals is not None and residuals.ndim == 4 else None
    return Method(name, images.numpy(), found[: len(images)], found[:HISTOGRAM], pictures)
