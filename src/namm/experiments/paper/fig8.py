"""Fig. 8: a variational autoencoder in mirror space (MVAE) against the same one on the data (VAE), App. A.

No stage samples the autoencoders, so this does: as many of each as an evaluation takes, scored like one.
"""

from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from namm.constraints import Constraint
from namm.evaluation.mmd import Subset
from namm.experiments.engine.run_parts import describe_samples
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages.report import view_of
from namm.experiments.paper.measurements import HISTOGRAM, FinishedRun
from namm.experiments.paper.output import Part, Runs, Value
from namm.experiments.paper.table1 import SCORES, score_columns
from namm.files import read_json, write_json
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import IdentityMap
from namm.report.figures.samples import Method, samples_figure

FILE = "scores.json"
NAMES = {"mvae": "MVAE", "vae": "VAE", "data": "data"}
MEASURED_COLUMNS = [not title.endswith(", paper") for title in SCORES]
"""Which of the columns are not the paper's, who gives no numbers here."""
FORMATS = {"method": "", **dict(compress(SCORES.items(), MEASURED_COLUMNS))}
SHOWN = 3
"""Samples in the picture, as in the paper."""


def fig8(runs: Runs) -> Part:
    """Samples, residuals and distances of both, and their scores."""
    scores = [read_json(_folder(run) / FILE) for run in runs.complete]
    rows: list[list[Value]] = [
        [name, *compress(score_columns([seed[method] for seed in scores], runs.reported, None), MEASURED_COLUMNS)]
        for method, name in NAMES.items()
    ]
    if not runs.complete:
        return Part(FORMATS, rows)
    first = runs.complete[0]
    rule = first.parts.rule().cpu()
    methods = [_method(_folder(first) / f"{name}.h5", NAMES[name], rule) for name in ("mvae", "vae")]
    view = view_of(rule, first.settings.data.coordinates)
    figure = samples_figure(methods, view=view, floor=scores[0]["data"]["distance"]["mean"])
    drawn = {"run": first.cell.name} | {method.name: method.distances.tolist() for method in methods}
    return Part(FORMATS, rows, figure, drawn)


def measure(run: FinishedRun, progress: bool) -> None:
    """Samples and scores of both autoencoders, and the floor that real images set."""
    folder, parts, asked = _folder(run), run.parts, run.settings.evaluate
    if (folder / FILE).exists():
        return
    rule = parts.rule()
    sources = {"mvae": parts.source("mvae", parts.mirror("map")), "vae": parts.source("vae", IdentityMap())}
    scores: dict[str, Any] = {}
    with run.images() as store:
        reference = store[asked.reference]
        for name, source in sources.items():
            path = folder / f"{name}.h5"
            about = describe_samples(source, None)
            write_samples(path, source, asked.n, seed=asked.seed, description=about, constraint=rule, progress=progress)
            with SampleFile(path) as samples:
                scores[name] = run.score(samples.images, reference, rule)
        other = "train" if asked.reference == "test" else "test"
        real = Subset(store[other], np.arange(min(asked.n, store.sizes[other])))
        scores["data"] = run.score(real, reference, rule)
    write_json(folder / FILE, scores)


def _folder(run: FinishedRun) -> Path:
    return run.study("autoencoders", ("data", "map", "mvae", "vae"), plain(run.settings.evaluate))


@torch.no_grad()
def _method(path: Path, name: str, rule: Constraint) -> Method:
    with SampleFile(path) as samples:
        images, distances = samples.images[:SHOWN], samples.distances
    residuals = rule.residual(images).numpy() if rule.has_residual else None
    pictures = residuals if residuals is not None and residuals.ndim == 4 else None
    return Method(name, images.numpy(), distances[: len(images)], distances[:HISTOGRAM], pictures)
