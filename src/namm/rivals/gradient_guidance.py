"""Guidance by the gradient of ℓ at the denoised estimate, after DPS and DiffusionPDE.

DPS (Chung et al. 2023) and, with the residual of an equation, DiffusionPDE (Huang et al. 2024) run a plain diffusion
backwards and move its state down the gradient of a loss of the estimate D = E[y(0) | y(t)], through the network:

    y ← y − ζ ∇_{y(t)} ℓ(x̂),      x̂ = D in data space,      ζ found by trial for each rule

The same gradient, added to the score, moves the estimate: by Tweedie's formula along

    d = (s²/m) ∇_{y(t)} ℓ(x̂) = C ∇_D ℓ(x̂),      C = (s²/m) ∂D/∂y(t) = Cov[y(0) | y(t)]

so that pixels move as far as the model is uncertain of them. The length is Polyak's, times a strength κ without units:

    D' = D − κ ℓ(x̂) / (∇_D ℓ · d) · d

κ = 1 goes to where the linearised ℓ is 0. For Gaussian data and ℓ = |a·x − b| that is E[y(0) | y(t), a·x = b], and the
samples have the data's law given the rule. For other data and rules it is an approximation, and κ is to be tuned.

Each step takes a backward pass through the network and ℓ besides, about twice the time of a plain one. What is reached
is near the rule and not on it: `namm.polish` goes on from there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.generative import Diffusion
from namm.generative.base import Draws
from namm.generative.samplers import Sampler
from namm.rivals.base import Denoiser, Rival

LONGEST = 1.0
"""Root mean square of the longest step, in standard deviations of the data: where ℓ is flat, Polyak's is no guide."""


@dataclass(frozen=True)
class GradientGuidance(Rival):
    """Steps along ∇ℓ at the denoised estimate.

    Args:
        strength: κ; 0 is the plain model.
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise UsageError(f"GradientGuidance: strength must be finite and not negative, not {self.strength}.")

    def draw(
        self, model: Diffusion, rule: Constraint, sampler: Sampler, noise: Draws, tick: Callable[[], None]
    ) -> Tensor:
        """One batch of guided samples."""
        return model.unstandardise(sampler(GuidedDenoiser(model, rule, self.strength), noise, tick))


class GuidedDenoiser(Denoiser):
    """D' of a model and a rule."""

    def __init__(self, model: Diffusion, rule: Constraint, strength: float) -> None:
        super().__init__(model, rule)
        self.strength = strength

    def denoise(self, y_t: Tensor, t: Tensor) -> Tensor:
        """D', standardised: (B, C, H, W), (B,) → (B, C, H, W)."""
        with torch.enable_grad():
            y_t = y_t.detach().requires_grad_()
            denoised = self.model.denoise(y_t, t)
            distance = self.rule(self.model.unstandardise(denoised))
            if not distance.requires_grad:
                raise UsageError(
                    f"{self.rule.name} cannot guide: its distance does not depend on the image differentiably. "
                    "Remove torch.no_grad, .detach(), .item() and numpy from it."
                )
            by_estimate, by_state = torch.autograd.grad(distance.sum(), (denoised, y_t))
        mean, std = self.sde.marginal(t)
        direction = std.square() / mean * by_state
        slope = (by_estimate * direction).flatten(1).sum(1)
        usable = slope > torch.finfo(slope.dtype).tiny  # 0 on the rule, negative where the network is far from a D
        length = torch.where(usable, distance / torch.where(usable, slope, 1.0), 0.0)
        move = self.strength * length.reshape(-1, 1, 1, 1) * direction
        size = move.square().mean((1, 2, 3), keepdim=True).sqrt()
        return (denoised - move * (LONGEST / size.clamp(min=LONGEST))).detach()
