"""Polyak's steps: a rule of which ℓ alone is known, down to its floor.

x ← x − (ℓ − floor) / ‖s∇ℓ‖² · s²∇ℓ,      the step that would be exact if ℓ were linear
"""

import numpy as np
import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.exact.equations import Bounds

POLYAK_STEPS = 300
"""Most steps."""
EXACT = 1e-9
"""ℓ over the first one that is as good as none, where the data's is 0."""


def polyak(x: Tensor, rule: Constraint, s: Tensor, bounds: Bounds, floor: float) -> tuple[Tensor, np.ndarray]:
    """Images of ℓ at most `floor`, or the best that were found, and the steps that each took."""
    best, lowest = x.clone(), x.new_full((len(x),), torch.inf)
    steps, enough = np.zeros(len(x)), None
    for step in range(POLYAK_STEPS + 1):
        if bounds != (None, None):
            x = torch.where(s > 0, x.clamp(*bounds), x)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            distance = rule(x) + 0 * x.flatten(1).sum(1)
            (gradient,) = torch.autograd.grad(distance.sum(), x)
        x, distance = x.detach(), distance.detach()
        better = distance < lowest
        best[better], lowest[better] = x[better], distance[better]
        enough = torch.clamp_min(EXACT * distance, (1 + EXACT) * floor) if enough is None else enough
        slope = (s * gradient).square().flatten(1).sum(1)
        running = (lowest > enough) & (slope > 0) & torch.isfinite(slope)
        if step == POLYAK_STEPS or not running.any():
            break
        steps[running.cpu().numpy()] += 1
        length = (running * (distance - floor).clamp_min(0) / slope)[:, None, None, None]
        x = torch.where(running[:, None, None, None], x - length * s.square() * gradient, x)
    return best, steps
