"""Coverage: how often the truth lies within the spread of posterior samples.

If the truth and n samples are draws of one distribution, the rank of the truth among them is uniform on 0 … n. So the
order statistics k and n + 1 − k enclose it with probability 1 − 2k/(n + 1), and between them one interpolates.
"""

import math

import torch
from torch import Tensor

from namm.errors import DataError, UsageError


def coverage(samples: Tensor, truth: Tensor, level: float = 0.9) -> Tensor:
    """How often the truth lies inside the central interval of its samples; calibrated samples give `level`.

    Args:
        samples: (M, n, …), n samples for each of M measurements, as `Posterior.samples`.
        truth: (M, …), the image that was measured, on any device and of any type.
        level: Probability of the interval, between 0 and 1. It needs at least 2/(1 − level) − 1 samples: 19 for 0.9.

    Returns:
        The share of the M measurements, for each entry: (…). Its mean over entries is one figure for all. Entries that
        vary together count as fewer than they are, so judge it by its scatter over measurements.
    """
    if not 0 < level < 1:
        raise UsageError(f"coverage: level must lie between 0 and 1, not {level}.")
    if samples.ndim < 2 or samples.shape[:1] + samples.shape[2:] != truth.shape or samples.numel() == 0:
        raise DataError(
            f"coverage needs samples (M, n, …) and truth (M, …), not {tuple(samples.shape)} and {tuple(truth.shape)}."
        )
    truth = truth.to(samples)
    if not (samples.isfinite().all() and truth.isfinite().all()):
        raise DataError(
            "coverage: the samples or the truth hold NaN or inf. Leave out the measurements with failed samples, "
            "~posterior.failed.any(1), and say how many they were."
        )
    n = samples.shape[1]
    rank = (n + 1) * (1 - level) / 2
    if rank < 1 - 1e-9:
        needed = math.ceil(2 / (1 - level) - 1e-6) - 1
        raise UsageError(f"coverage at level {level:g} needs at least {needed} samples, not {n}.")
    ordered = samples.sort(1).values
    lower, upper = _at(ordered, rank), _at(ordered, n + 1 - rank)
    return ((lower <= truth) & (truth <= upper)).to(samples.dtype).mean(0)


def _at(ordered: Tensor, rank: float) -> Tensor:
    """The order statistic `rank`, 1 … n, interpolated between whole ranks: (M, n, …) → (M, …)."""
    below = min(max(int(rank + 1e-9), 1), ordered.shape[1])
    above = min(below + 1, ordered.shape[1])
    return torch.lerp(ordered[:, below - 1], ordered[:, above - 1], min(max(rank - below, 0.0), 1.0))
