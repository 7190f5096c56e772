"""How a measurement m = A(x) + n pulls a reverse diffusion: diffusion posterior sampling (paper Sec. 4.2, App. D.3).

The posterior's score is ∇ log p(y(t)) + ∇ log p(m | y(t)), and the second term is not known. DPS (Chung et al. 2023)
replaces the images that y(t) may have come from by one guess, x̂ = f(E[y(0) | y(t)]), and steps down the gradient

    −ζ ∇_{y(t)} ‖m − A(x̂)‖_Γ         DPS: f is the identity;   mirror DPS: f is the learned inverse map
    −ζ ∇_{y(t)} (‖m − A(x̂)‖_Γ + w ℓ(x̂))         CG-DPS: DPS guided by the constraint too, w = 200 in the paper

after the step of the prior. Norms are per sample and not squared: ζ/‖m − A(x̂)‖_Γ is App. D.3's weight of ∇ log p.
The gradient runs through A, f, the unstandardisation and the network, with respect to the standardised state, so ζ
does not depend on the units of the data. The paper does not standardise: its ζ is ours times the square of the scale,
and `DPSGuidance.of_paper` converts it. A step is as long as ζ times the gradient, about ζ/σ where Γ = σ²I: smaller
noise needs a smaller ζ.

Guidance is an object with the method `shift`, so that one sampler serves DPS and whatever comes after it.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import DataError, UsageError
from namm.generative.standardised import Standardised
from namm.inverse.noise import GaussianNoise
from namm.inverse.operators import Operator
from namm.inverse.steps import Step


@dataclass(frozen=True, eq=False)
class Evidence:
    """What was measured, one measurement for each sample of a batch.

    Args:
        measurement: m, (B, …).
        operator: A.
        noise: The distribution of n.
    """

    measurement: Tensor
    operator: Operator
    noise: GaussianNoise

    def residual(self, x: Tensor) -> Tensor:
        """m − A(x) for images (B, C, H, W): (B, …)."""
        seen = self.operator(x)
        if seen.shape != self.measurement.shape:
            raise DataError(
                f"{self.operator.name} makes measurements of shape {tuple(seen.shape)} from images "
                f"{tuple(x.shape)}, and the measurement given has {tuple(self.measurement.shape)}."
            )
        return self.measurement - seen

    def norm(self, x: Tensor) -> Tensor:
        """‖m − A(x)‖_Γ: (B,)."""
        return self.noise.norm(self.residual(x))

    def chi2(self, x: Tensor) -> Tensor:
        """χ² of images x: (B,)."""
        return self.noise.chi2(self.residual(x))

    def rows(self, index: Tensor) -> Self:
        """The measurements with these numbers; one may come more than once."""
        return replace(self, measurement=self.measurement[index])


@dataclass(frozen=True, eq=False)
class Guess:
    """What is known of a batch on its way down, at time t.

    Attributes:
        y_t: The state, standardised, a leaf of the graph: (B, C, H, W).
        denoised: D = E[y(0) | y(t)], standardised, a function of y_t.
        x: f(D), D unstandardised first: the guess in data space, a function of y_t.
        step: The step that is about to be made.
    """

    y_t: Tensor
    denoised: Tensor
    x: Tensor
    step: Step


class Guidance(Protocol):
    """The pull of a measurement."""

    def shift(self, guess: Guess, evidence: Evidence) -> Tensor:
        """What is added to the state after the step of the prior, standardised: (B, C, H, W)."""

    def smaller(self) -> "Guidance":
        """The same with a smaller step, for samples that diverged."""


@dataclass(frozen=True, eq=False)
class DPSGuidance:
    """DPS, and CG-DPS if a constraint is given.

    Args:
        zeta: ζ, for a thousand steps; with fewer, raise it in proportion. The default suits no noise in particular, and
            is not the paper's 0.1, which belongs to data that are not standardised: `of_paper`.
        constraint: ℓ for CG-DPS.
        weight: w of ℓ, relative to the norm of the residual.
    """

    zeta: float = 0.1
    constraint: Constraint | None = None
    weight: float = 200.0

    def __post_init__(self) -> None:
        for name in ("zeta", "weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"DPSGuidance: {name} must be finite and not negative, not {value}.")

    @classmethod
    def of_paper(
        cls, zeta: float, model: Standardised, *, constraint: Constraint | None = None, weight: float = 200.0
    ) -> Self:
        """The guidance whose steps have, in the units of the data, the paper's or the official code's ζ.

        Args:
            zeta: The paper's, 0.1 for instance.
            model: Whose standardisation it is; of channels that are scaled differently, the mean square counts.
            constraint: As of the class.
            weight: As of the class.
        """
        if not isinstance(model, Standardised):
            raise UsageError(
                f"DPSGuidance.of_paper needs the diffusion itself, such as prior.model, not a {type(model).__name__}."
            )
        return cls(zeta / float(model.scale.square().mean()), constraint, weight)

    def loss(self, x: Tensor, evidence: Evidence) -> Tensor:
        """‖m − A(x)‖_Γ + w ℓ(x): (B,)."""
        loss = evidence.norm(x)
        return loss if self.constraint is None else loss + self.weight * self.constraint(x)

    def shift(self, guess: Guess, evidence: Evidence) -> Tensor:
        """−ζ times the gradient of the loss."""
        return -self.zeta * gradient(self.loss(guess.x, evidence), guess.y_t)

    def smaller(self) -> "DPSGuidance":
        """Half of ζ."""
        return replace(self, zeta=self.zeta / 2)


def gradient(loss: Tensor, y_t: Tensor) -> Tensor:
    """The gradient of each sample's loss (B,) with respect to its own state: (B, C, H, W)."""
    try:
        return torch.autograd.grad(loss.sum(), y_t)[0]
    except RuntimeError as error:
        if loss.requires_grad and "appears to not have been used" not in str(error):
            raise
        raise UsageError(
            "the measurement has no gradient with respect to the state of the diffusion: the denoiser, f or the "
            "operator leaves autograd. Remove torch.no_grad, .detach(), .item() and numpy from them."
        ) from error
