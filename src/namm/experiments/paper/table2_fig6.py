"""Table 2 and Fig. 6: what σ_max and λ_constr do to samples of the mirrored model, without finetuning.

The λ of the rows are the paper's times what the preset's own λ is of the paper's, so that the paper's choice for an
experiment and the preset's stand in the same place.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from namm.experiments.engine.experiment import Reported
from namm.experiments.engine.run_parts import device
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages.report import view_of
from namm.experiments.engine.stages.samples import TRAIN
from namm.experiments.paper.items import SIGMAS, WEIGHTS
from namm.experiments.paper.measurements import HISTOGRAM, FinishedRun
from namm.experiments.paper.output import Part, Runs, Value, over_seeds
from namm.experiments.paper.table1 import SCORES, score_columns
from namm.experiments.presets import preset
from namm.experiments.sweeps.cell import Cell
from namm.files import read_json, write_json
from namm.generative.sample_file import SampleFile
from namm.report.figures import Array
from namm.report.figures.studies import Scored, Variant, ablation_figure, sensitivity_figure

Place = tuple[float, float]
"""σ_max and λ_constr."""
T = TypeVar("T")

FORMATS = {"λ_constr": "g", "σ_max": "g", **SCORES}
del FORMATS["spread"]
FORMATS6 = {"λ_constr": "g", "σ_max": "g", "seeds": "d", "ℓ": ".3g", "mean |g(x)|": ".3g"}
REPORTED: dict[str, tuple[tuple[tuple[float, float, float], ...], ...]] = {
    "flux": (
        ((0.66, 0.0517, 0.0386), (0.55, 0.0549, 0.0078), (0.66, 0.0757, 0.0062)),
        ((0.03, 1.1723, 0.4372), (0.02, 1.1723, 0.5275), (0.22, 1.1727, 0.6396)),
        ((0.07, 1.1721, 0.5052), (0.03, 1.1722, 0.5191), (0.11, 1.1727, 0.6151)),
    ),
    "burgers": (
        ((0.20, 0.0488, 0.0483), (0.27, 0.0631, 0.1111), (0.26, 0.0945, 0.1142)),
        ((0.20, 0.0784, 0.0434), (0.20, 0.0682, 0.0495), (0.18, 0.1069, 0.0499)),
        ((0.20, 0.1159, 0.0494), (0.07, 0.1092, 0.0026), (0.17, 0.2169, 0.0144)),
    ),
    "divergence": (
        ((4.17, 0.0493, 0.0007), (5.17, 0.0484, 0.0029), (6.01, 0.0522, 0.0062)),
        ((3.37, 0.0593, 0.0029), (3.16, 0.0569, 0.0009), (3.56, 0.0588, 0.0020)),
        ((2.42, 0.0554, 0.0031), (2.28, 0.0548, 0.0031), (2.61, 0.0593, 0.0029)),
    ),
    "periodic": (
        ((0.25, 0.2133, 0.0215), (0.28, 0.0484, 0.0006), (0.30, 0.0507, 0.0019)),
        ((0.35, 0.0795, 0.0054), (0.15, 0.0621, 0.0015), (0.35, 0.1013, 0.0044)),
        ((0.30, 0.1092, 0.0049), (0.05, 0.0856, 0.0044), (0.00, 0.7822, 0.8408)),
    ),
    "count": (
        ((0.73, 0.0715, 0.0084), (0.65, 0.0449, 0.0514), (0.61, 0.2119, 0.0266)),
        ((0.13, 0.1773, 0.5006), (0.59, 0.0884, 0.0594), (0.52, 0.0520, 0.0086)),
        ((0.01, 0.6346, 0.4995), (0.02, 0.6774, 0.4957), (0.03, 0.7988, 0.4786)),
    ),
}
"""The paper's CD, √MMD² and KID: a line for each λ_constr, in it one for each σ_max.

Means over 10 000 samples of the mirrored model without finetuning. CD is with the λ that the paper chose for each
experiment, not with that of the row.
"""


def table2(runs: Runs) -> Part:
    """CD, √MMD² and KID of all nine settings, and a figure of those through the paper's choice."""
    weights, reported = _weights(runs), runs.reported
    scores = {place: [read_json(_file(run)) for run in finished] for place, finished in _by_place(runs).items()}
    rows: list[list[Value]] = []
    for (sigma, weight), seeds in scores.items():
        paper = REPORTED[runs.experiment][weights.index(weight)][SIGMAS.index(sigma)]
        *columns, _ = score_columns(seeds, reported, paper)
        rows.append([weight, sigma, *columns])
    drawn = {
        title: [_scored(value, seeds, reported) for value, seeds in study.items()]
        for title, study in _studies(runs.experiment, weights, scores).items()
    }
    if not drawn:
        return Part(FORMATS, rows)
    studies = {title: [Scored(**each) for each in study] for title, study in drawn.items()}
    return Part(FORMATS, rows, ablation_figure(studies), drawn)


def measure(run: FinishedRun, progress: bool) -> None:
    """The scores of a run's samples."""
    if _file(run).exists():
        return
    with run.images() as store, SampleFile(run.folder / "samples" / TRAIN) as samples:
        scores = run.score(samples.images, store[run.settings.evaluate.reference], run.parts.rule())
    write_json(_file(run), scores)


def fig6(runs: Runs) -> Part:
    """Mirror images of one held-out image and distances of 128 samples, of the first seed; means of all seeds."""
    pictures = {place: [_mirror_image(run) for run in finished] for place, finished in _by_place(runs).items()}
    rows: list[list[Value]] = []
    for (sigma, weight), seeds in pictures.items():
        means = over_seeds([float(distances.mean()) for _, distances in seeds])
        sizes = over_seeds([float(np.abs(image).mean()) for image, _ in seeds])
        rows.append([weight, sigma, len(seeds), means, sizes])
    studies = {
        title: [Variant(f"{value:g}", *seeds[0]) for value, seeds in study.items()]
        for title, study in _studies(runs.experiment, _weights(runs), pictures).items()
    }
    if not studies:
        return Part(FORMATS6, rows)
    figure = sensitivity_figure(studies, view=view_of(runs.complete[0].parts.rule().cpu()))
    drawn = {title: {each.name: each.distances.tolist() for each in study} for title, study in studies.items()}
    return Part(FORMATS6, rows, figure, drawn)


def _place(cell: Cell) -> Place:
    return cell.preset.settings.map.sigma_max, cell.preset.settings.map.weights.constraint


def _weights(runs: Runs) -> list[float]:
    """Every λ of the sweep, in the order of the paper's."""
    return sorted({_place(outcome.cell)[1] for outcome in runs.outcomes})


def _by_place(runs: Runs) -> dict[Place, list[FinishedRun]]:
    """The finished runs of each setting, none where all failed."""
    places: dict[Place, list[FinishedRun]] = {_place(outcome.cell): [] for outcome in runs.outcomes}
    for run in runs.complete:
        places[_place(run.cell)].append(run)
    return places


def _studies(
    experiment: str, weights: Sequence[float], found: Mapping[Place, list[T]]
) -> dict[str, dict[float, list[T]]]:
    """What there is along either setting, where the other is the paper's choice for the experiment."""
    chosen = preset(experiment, "paper").settings.map
    sigma, weight = chosen.sigma_max, weights[WEIGHTS.index(chosen.weights.constraint)]
    studies = {
        f"σ_max, with λ = {weight:g}": {each: found.get((each, weight), []) for each in SIGMAS},
        f"λ, with σ_max = {sigma:g}": {each: found.get((sigma, each), []) for each in weights},
    }
    there = {title: {value: seeds for value, seeds in study.items() if seeds} for title, study in studies.items()}
    return {title: study for title, study in there.items() if study}


def _scored(value: float, scores: Sequence[dict[str, Any]], reported: Reported) -> dict[str, Any]:
    """The means over seeds, and the deviations over samples and over subsets."""
    figures = {
        "cd": [(reported.cd(each["distance"]["mean"]), reported.cd(each["distance"]["std"])) for each in scores],
        "mmd": [each["mmd"] for each in scores],
        "kid": [each["kid"] for each in scores if "kid" in each],
    }
    means = {name: tuple(np.mean(pairs, axis=0).tolist()) if pairs else None for name, pairs in figures.items()}
    return {"value": value, **means}


def _file(run: FinishedRun) -> Path:
    return run.study("sweep", ("data", "samples"), plain(run.settings.evaluate)) / "scores.json"


@torch.no_grad()
def _mirror_image(run: FinishedRun) -> tuple[Array, Array]:
    """g(x) of the first held-out image, and ℓ of samples."""
    image = run.parts.mirror("map").to_mirror(run.held_out_image().to(device()))[0].cpu().numpy()
    with SampleFile(run.folder / "samples" / TRAIN) as samples:
        return image, samples.distances[:HISTOGRAM]
