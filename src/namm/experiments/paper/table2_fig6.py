"""Table 2 and Fig. 6: what σ_max and λ_constr do to samples of the mirrored model, without finetuning.

The λ of the rows are the paper's times what the preset's own λ is of the paper's, so that the paper's choice for an
experiment and the preset's stand in the same place.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from namm.experiments.engine.experiment import Reported
from namm.experiments.engine.run_parts import device
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages.report import view_of
from namm.experiments.engine.stages.samples import TRAIN
from namm.experiments.paper.measurements import (
    HISTOGRAM,
    by_experiment,
    images_of,
    score,
    settings_of,
    study,
    trained,
)
from namm.experiments.paper.output import Shown, Table, Value, over_seeds
from namm.experiments.paper.reported import TABLE2, Triple
from namm.experiments.paper.runs_needed import SIGMAS, WEIGHTS
from namm.experiments.paper.table1 import FIGURES, no_kid
from namm.experiments.presets import preset
from namm.experiments.sweeps.cell import Cell, CellOutcome
from namm.files import write_json
from namm.generative.sample_file import SampleFile
from namm.report.figures.studies import Scored, Variant, ablation_figure, sensitivity_figure

FILE = "scores.json"
FORMATS = {"experiment": "", "λ_constr": "g", "σ_max": "g", **FIGURES}

Place = tuple[float, float]
"""σ_max and λ_constr."""


def table2(outcomes: Sequence[CellOutcome]) -> Shown:
    """CD, MMD and KID of all nine settings of each experiment, and a figure of those through the paper's choice."""
    rows: list[Any] = []
    figures, drawn, without = {}, {}, []
    for experiment, cells in by_experiment(outcomes).items():
        reported, weights = cells[0].cell.preset.reported, _weights(cells)
        found: dict[Place, list[dict[str, Any]]] = {}
        for outcome in cells:
            scores = [json.loads((_folder(outcome) / FILE).read_text())] if outcome.error is None else []
            found.setdefault(_place(outcome.cell), []).extend(scores)
        for (sigma, weight), scores in found.items():
            paper = TABLE2[experiment][sigma, WEIGHTS[weights.index(weight)]]
            rows.append([experiment, weight, sigma, *_figures(scores, reported, paper)])
        studies = _studies(experiment, weights, {place: scores for place, scores in found.items() if scores})
        if studies:
            name = f"table2-{experiment}"
            drawn[name] = {
                title: [_scored(value, scores, reported) for value, scores in study] for title, study in studies.items()
            }
            figures[name] = ablation_figure(
                {title: [Scored(**each) for each in study] for title, study in drawn[name].items()}
            )
        if any(scores and "kid" not in scores[0] for scores in found.values()):
            without.append(experiment)
    return Shown(Table(FORMATS, rows), figures, drawn, notes=no_kid(without))


def measure(outcome: CellOutcome, progress: bool) -> None:
    """The scores of a cell's samples."""
    folder, settings = _folder(outcome), settings_of(outcome)
    if (folder / FILE).exists():
        return
    with images_of(outcome) as store, SampleFile(outcome.folder / "samples" / TRAIN) as samples:
        reference, rule = store[settings.evaluate.reference], trained(outcome).rule()
        write_json(folder / FILE, score(outcome, samples.images, reference, rule))


def fig6(outcomes: Sequence[CellOutcome]) -> Shown:
    """Mirror images of one held-out image and distances of 128 samples, of the first seed; means of all seeds."""
    rows: list[Any] = []
    figures, drawn = {}, {}
    for experiment, cells in by_experiment(outcomes).items():
        weights = _weights(cells)
        found: dict[Place, list[CellOutcome]] = {}
        for outcome in cells:
            found.setdefault(_place(outcome.cell), []).extend([outcome] if outcome.error is None else [])
        for (sigma, weight), done in found.items():
            images, values = zip(*(_shown(outcome) for outcome in done), strict=True) if done else ((), ())
            means = over_seeds([float(each.mean()) for each in values])
            sizes = over_seeds([float(np.abs(image).mean()) for image in images])
            rows.append([experiment, weight, sigma, len(done), means, sizes])
        first = {place: done[0] for place, done in found.items() if done}
        studies = {
            title: [Variant(f"{value:g}", *_shown(outcome)) for value, outcome in study]
            for title, study in _studies(experiment, weights, first).items()
        }
        if studies:
            name = f"fig6-{experiment}"
            rule = trained(next(iter(first.values()))).rule().cpu()
            figures[name] = sensitivity_figure(studies, view=view_of(rule))
            drawn[name] = {
                title: {each.name: each.distances.tolist() for each in study} for title, study in studies.items()
            }
    formats = {"experiment": "", "λ_constr": "g", "σ_max": "g", "seeds": "d", "ℓ": ".3g", "mean |g(x)|": ".3g"}
    return Shown(Table(formats, rows), figures, drawn)


def _place(cell: Cell) -> Place:
    return cell.preset.settings.map.sigma_max, cell.preset.settings.map.weights.constraint


def _weights(cells: Sequence[CellOutcome]) -> list[float]:
    """Every λ of the sweep, in the order of the paper's."""
    return sorted({_place(outcome.cell)[1] for outcome in cells})


def _studies(experiment: str, weights: Sequence[float], found: dict[Place, Any]) -> dict[str, list[tuple[float, Any]]]:
    """What there is along either setting, where the other is the paper's choice for the experiment."""
    chosen = preset(experiment, "paper").settings.map
    sigma, weight = chosen.sigma_max, weights[WEIGHTS.index(chosen.weights.constraint)]
    studies = {
        f"σ_max, with λ = {weight:g}": [(each, found[each, weight]) for each in SIGMAS if (each, weight) in found],
        f"λ, with σ_max = {sigma:g}": [(each, found[sigma, each]) for each in weights if (sigma, each) in found],
    }
    return {title: study for title, study in studies.items() if study}


def _figures(scores: Sequence[dict[str, Any]], reported: Reported, paper: Triple) -> list[Value]:
    """What the table says of one setting, ours beside the paper's."""
    distance = [each["distance"]["mean"] for each in scores]
    return [
        len(scores),
        over_seeds(distance),
        over_seeds([reported.cd(each) for each in distance]),
        paper[0],
        over_seeds([each["mmd"][0] for each in scores]),
        paper[1],
        over_seeds([each["kid"][0] for each in scores if "kid" in each]),
        paper[2],
        over_seeds([each["total_variation"] for each in scores]),
    ]


def _scored(value: float, scores: Sequence[dict[str, Any]], reported: Reported) -> dict[str, Any]:
    """The means over seeds, and the deviations over samples and over subsets."""
    figures = {
        "cd": [(reported.cd(each["distance"]["mean"]), reported.cd(each["distance"]["std"])) for each in scores],
        "mmd": [each["mmd"] for each in scores],
        "kid": [each["kid"] for each in scores if "kid" in each],
    }
    means = {name: tuple(np.mean(pairs, axis=0).tolist()) if pairs else None for name, pairs in figures.items()}
    return {"value": value, **means}


def _folder(outcome: CellOutcome) -> Path:
    return study(outcome, "sweep", ("data", "samples"), plain(settings_of(outcome).evaluate))


@torch.no_grad()
def _shown(outcome: CellOutcome) -> tuple[Any, Any]:
    """g(x) of the first held-out image, and ℓ of samples."""
    with images_of(outcome) as store, SampleFile(outcome.folder / "samples" / TRAIN) as samples:
        x = store["test" if store.sizes["test"] else "val"][:1].to(device())
        return trained(outcome).mirror("map").to_mirror(x)[0].cpu().numpy(), samples.distances[:HISTOGRAM]
