"""From posterior samples in a file to pictures: Fig. 5 for any run."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import DataError
from namm.experiments.assimilation.posterior_file import read_distances, read_truth
from namm.experiments.assimilation.tasks import Task
from namm.experiments.engine.stages.report import view_of
from namm.inverse import Columns, Mask, Operator, States
from namm.report.figures import Array
from namm.report.figures.inverse import Reconstruction, assimilation_figure

ORDER = ("mirror-dps", "dps", "cg-dps")


def outcomes_figure(file: Path, task: Task, rule: Constraint, k: int = 0) -> Figure:
    """Fig. 5 of truth k of a file: its samples and residuals, and ℓ of all samples of all truths."""
    own, found = read_truth(file, k)
    distances, rule = read_distances(file), rule.cpu()
    methods = []
    for setting in sorted(found, key=lambda s: ORDER.index(s.method)):
        arrays = found[setting]
        good = ~arrays["failed"].astype(bool)
        if good.any():
            residuals = arrays["residuals"][good] if "residuals" in arrays else None
            first = float(arrays["distance"][good][0])
            methods.append(Reconstruction(setting.title, arrays["samples"][good], distances[setting], first, residuals))
    if not methods:
        raise DataError(f"every sample of truth {k} in {file} diverged: there is nothing to show.")
    observed = as_image(task.operator, torch.from_numpy(own["measurement"]), own["truth"].shape)
    floor = float(rule(task.truth).mean())
    return assimilation_figure(own["truth"], observed, methods, view=view_of(rule), floor=floor)


def as_image(operator: Operator, measurement: Tensor, shape: tuple[int, ...]) -> Array | None:
    """A measurement of an image of `shape` (C, H, W) as such an image, NaN where nothing was seen, if it is one."""
    if isinstance(operator, Columns | Mask | States):
        count = int(np.prod(shape))
        where = operator.cpu()(torch.arange(count, dtype=torch.double).reshape(1, *shape)).flatten().long()
        image = np.full(count, np.nan)
        image[where.numpy()] = measurement.flatten().numpy()
        return image.reshape(shape)
    return measurement.numpy() if tuple(measurement.shape) == shape else None
