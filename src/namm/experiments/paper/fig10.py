"""Fig. 10: a map trained with σ drawn from [0, σ_max] against one trained with σ = σ_max, before and after finetuning.

The distances are those of samples that neither map was finetuned on. Finetuning draws σ in both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from namm.errors import DataError
from namm.experiments.engine.stages.samples import HELD_OUT
from namm.experiments.paper.measurements import HISTOGRAM, by_experiment, complete, distances, trained
from namm.experiments.paper.output import Shown, Table, over_seeds
from namm.experiments.sweeps.cell import CellOutcome
from namm.generative.sample_file import SampleFile
from namm.report.figures import Array
from namm.report.figures.studies import fixed_noise_figure

STAGES = {"before": "before finetuning", "after": "after finetuning"}
NOISES = {"uniform": "σ ~ U(0, σ_max)", "fixed": "σ = σ_max"}
FORMATS = {"experiment": "", "σ": "", "stage": "", "seeds": "d", "samples": "d", "mean ℓ": ".3g", "CD": ".3g"}


def fig10(outcomes: Sequence[CellOutcome]) -> Shown:
    """Histograms of the first seed that has both, and the means of all."""
    rows: list[Any] = []
    figures, drawn = {}, {}
    for experiment, cells in by_experiment(outcomes).items():
        reported = cells[0].cell.preset.reported
        found: dict[str, list[dict[str, Array]]] = {noise: [] for noise in NOISES}
        for outcome in complete(cells):
            found[outcome.cell.preset.settings.map.noise].append(_distances(outcome))
        for stage, title in STAGES.items():
            for noise, name in NOISES.items():
                values = [each[stage] for each in found[noise]]
                means = [float(each.mean()) for each in values]
                cd = over_seeds([reported.cd(mean) for mean in means])
                n = len(values[0]) if values else None
                rows.append([experiment, name, title, len(values), n, over_seeds(means), cd])
        if found["uniform"] and found["fixed"]:
            both = {stage: (found["uniform"][0][stage], found["fixed"][0][stage]) for stage in STAGES}
            name = f"fig10-{experiment}"
            figures[name] = fixed_noise_figure({STAGES[stage]: pair for stage, pair in both.items()})
            drawn[name] = {
                stage: {noise: values.tolist() for noise, values in zip(NOISES, pair, strict=True)}
                for stage, pair in both.items()
            }
    return Shown(Table(FORMATS, rows), figures, drawn)


def _distances(outcome: CellOutcome) -> dict[str, Array]:
    """ℓ of held-out samples through f before and after finetuning."""
    path = outcome.folder / "samples" / HELD_OUT
    if not path.exists():
        raise DataError(f"{outcome.folder} holds no samples besides those f was finetuned on: ask for samples.n_val.")
    parts = trained(outcome)
    with SampleFile(path) as samples:
        before = np.asarray(samples.distances[:HISTOGRAM])
        return {"before": before, "after": distances(parts.rule(), parts.mirror("finetune"), samples.mirror_images)}
