"""Fig. 10: a map trained with σ drawn from [0, σ_max] against one trained with σ = σ_max, before and after finetuning.

The distances are those of samples that neither map was finetuned on. Finetuning draws σ in both.
"""

import numpy as np

from namm.errors import DataError
from namm.experiments.engine.stages.samples import HELD_OUT
from namm.experiments.paper.measurements import HISTOGRAM, FinishedRun
from namm.experiments.paper.output import Part, Runs, Value, over_seeds
from namm.generative.sample_file import SampleFile
from namm.report.figures import Array
from namm.report.figures.studies import fixed_noise_figure

STAGES = {"before": "before finetuning", "after": "after finetuning"}
NOISES = {"uniform": "σ ~ U(0, σ_max)", "fixed": "σ = σ_max"}
FORMATS = {"σ": "", "stage": "", "seeds": "d", "samples": "d", "mean ℓ": ".3g", "CD": ".3g"}


def fig10(runs: Runs) -> Part:
    """Histograms of the first seed that has both, and the means of all."""
    distances: dict[str, list[dict[str, Array]]] = {noise: [] for noise in NOISES}
    for run in runs.complete:
        distances["fixed" if run.settings.map.noise.endswith("fixed") else "uniform"].append(_distances(run))
    rows: list[list[Value]] = []
    for stage, title in STAGES.items():
        for noise, name in NOISES.items():
            values = [seed[stage] for seed in distances[noise]]
            means = [float(each.mean()) for each in values]
            cd = over_seeds([runs.reported.cd(mean) for mean in means])
            rows.append([name, title, len(values), len(values[0]) if values else None, over_seeds(means), cd])
    if not all(distances.values()):
        return Part(FORMATS, rows)
    figure = fixed_noise_figure(
        {title: (distances["uniform"][0][stage], distances["fixed"][0][stage]) for stage, title in STAGES.items()}
    )
    drawn = {stage: {noise: distances[noise][0][stage].tolist() for noise in NOISES} for stage in STAGES}
    return Part(FORMATS, rows, figure, drawn)


def _distances(run: FinishedRun) -> dict[str, Array]:
    """ℓ of held-out samples through f before and after finetuning."""
    path = run.folder / "samples" / HELD_OUT
    if not path.exists():
        raise DataError(f"{run.folder} holds no samples besides those f was finetuned on: ask for samples.n_val.")
    with SampleFile(path) as samples:
        before = np.asarray(samples.distances[:HISTOGRAM])
        return {"before": before, "after": run.distances("finetune", samples.mirror_images)}
