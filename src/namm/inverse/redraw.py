"""Batches of posterior samples, in which a sample that diverged is drawn again with a smaller step.

The new draw starts from the same noise, so a sample depends on (seed, number, step) here too. Nothing is dropped: a
sample that diverges at the smallest step too is NaN, and every redraw is counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from namm.generative.noise import Noise
from namm.inverse.guidance import Evidence, Guidance
from namm.inverse.reverse import DiffusionPrior, ToData, finite, keep, reverse
from namm.inverse.steps import Steps
from namm.progress import ProgressBar


@dataclass(frozen=True, eq=False)
class Draw:
    """Turns the noise of a batch into its samples: (B, pixels + 1), mirror images, flattened, then their redraws.

    Attributes:
        model: The diffusion.
        to_data: f.
        evidence: All measurements; sample i belongs to measurement (i − `first`) // n.
        steps: The way down.
        guidance: The pull of the measurements.
        n: Samples for each measurement.
        first: Number of the first sample.
        retries: Redraws of a sample, at most.
        bar: Told of every step.
    """

    model: DiffusionPrior
    to_data: ToData
    evidence: Evidence
    steps: Steps
    guidance: Guidance
    n: int
    first: int
    retries: int
    bar: ProgressBar

    def __call__(self, noise: Noise) -> Tensor:
        """(B, pixels + 1)."""
        noise = replace(noise, shape=self.model.sample_shape)
        left = torch.arange(noise.stop - noise.start, device=noise.like.device)
        evidence, guidance = self.evidence.rows((left + noise.start - self.first) // self.n), self.guidance
        y = self._attempt(guidance, evidence, noise)
        redrawn = y.new_zeros(len(y), 1)
        for _ in range(self.retries):
            left = (~finite(y)).nonzero().flatten()
            if len(left) == 0:
                break
            guidance = guidance.smaller()
            redrawn[left] += 1
            self.bar.extend(self.steps.steps)
            y[left] = self._attempt(guidance, evidence.rows(left), _Rows(noise, left))
        return torch.cat([y.flatten(1), redrawn], 1)

    def _attempt(self, guidance: Guidance, evidence: Evidence, noise: Callable[[int], Tensor]) -> Tensor:
        """Mirror images y (B, C, H, W); NaN where they, f of them or the χ² of that are not finite."""
        u = reverse(self.model, self.to_data, self.steps, guidance, evidence, noise, self.bar.advance)
        with torch.no_grad():
            y = self.model.unstandardise(u)
            good = finite(y)
            x = self.to_data(keep(good, y, 0.0))
            return keep(good & finite(x) & evidence.chi2(x).isfinite(), y)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The noise of some samples of a batch."""

    noise: Noise
    rows: Tensor

    def __call__(self, step: int) -> Tensor:
        return self.noise(step)[self.rows]
