"""A reverse diffusion that a measurement pulls.

    y ← a D + b y + shift + c z,      D = E[y(0) | y(t)]

a, b and c come from `namm.inverse.steps`, the shift from `namm.inverse.guidance`. Everything is standardised but what
`to_data` takes and gives.
"""

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from namm.generative.samplers import Process
from namm.inverse.guidance import Evidence, Guess, Guidance
from namm.inverse.steps import Step, Steps

RUNAWAY = 1e4
"""Standard deviations of the data beyond which a state has diverged, though it may still be finite."""

ToData = Callable[[Tensor], Tensor]
"""f, (B, C, H, W) → (B, C, H, W)."""


class DiffusionPrior(Process, Protocol):
    """What posterior sampling needs of a model: `namm.Diffusion` has it. `is_prior` tells."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""

    @property
    def mean(self) -> Tensor:
        """Of the standardisation, (C, 1, 1): where the model lives and in its precision."""

    def unstandardise(self, u: Tensor) -> Tensor:
        """From the space of the diffusion to mirror space."""


def is_prior(model: object) -> TypeGuard[DiffusionPrior]:
    """Whether `model` has all of that. (From Python 3.12 on, `isinstance` would not see buffers of a module.)"""
    needed = ("sde", "t_min", "denoise", "score", "sample_shape", "mean", "unstandardise")
    return all(hasattr(model, name) for name in needed)


def guided_step(
    y_t: Tensor, step: Step, model: DiffusionPrior, to_data: ToData, guidance: Guidance, evidence: Evidence
) -> Tensor:
    """a D + b y + shift, without the noise: (B, C, H, W)."""
    with torch.enable_grad():
        y_t = y_t.detach().requires_grad_()
        denoised = model.denoise(y_t, y_t.new_full((len(y_t),), step.t))
        x = to_data(model.unstandardise(denoised))
        shift = guidance.shift(Guess(y_t, denoised, x, step), evidence)
    return (step.denoised * denoised + step.state * y_t + shift).detach()


def reverse(
    model: DiffusionPrior,
    to_data: ToData,
    steps: Steps,
    guidance: Guidance,
    evidence: Evidence,
    noise: Callable[[int], Tensor],
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """One batch from noise to t = 0, standardised: (B, C, H, W). Samples that diverge are NaN and touch no other."""
    y = noise(0)
    alive = _settled(y)
    for k, step in enumerate(steps.table(model)):
        y = guided_step(y, step, model, to_data, guidance, evidence)
        if step.noise > 0:
            y = y + step.noise * noise(k + 1)
        alive = alive & _settled(y)
        y = keep(alive, y, 0.0)
        tick()
    return keep(alive, y)


def _settled(y: Tensor) -> Tensor:
    """Whether each standardised image is within `RUNAWAY`, which NaN is not: (B, …) → (B,)."""
    return (y.abs() <= RUNAWAY).flatten(1).all(1)


def finite(images: Tensor) -> Tensor:
    """Whether each image is finite: (B, …) → (B,)."""
    return images.isfinite().flatten(1).all(1)


def keep(good: Tensor, images: Tensor, otherwise: float = torch.nan) -> Tensor:
    """The images where `good` (B,), `otherwise` in place of the others."""
    return torch.where(good.reshape(-1, *[1] * (images.ndim - 1)), images, otherwise)
