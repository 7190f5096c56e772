"""How a measurement m = A(x) + n pulls a reverse diffusion (paper Sec. 4.2, App. D.3).

The posterior's score is ∇ log p(y(t)) + ∇ log p(m | y(t)), and the second term is not known. Every guidance replaces
the images that y(t) may have come from by one guess, x̂ = f(E[y(0) | y(t)]).

DPS (Chung et al. 2023) steps down the gradient, after the step of the prior:

    −ζ ∇_{y(t)} ‖m − A(x̂)‖_Γ         DPS: f is the identity;   mirror DPS: f is the learned inverse map
    −ζ ∇_{y(t)} (‖m − A(x̂)‖_Γ + w ℓ(x̂))         CG-DPS: DPS guided by the constraint too, w = 200 in the paper

Norms are per sample and not squared: ζ/‖m − A(x̂)‖_Γ is App. D.3's weight of ∇ log p. The gradient runs through A, f,
the unstandardisation and the network, with respect to the standardised state, so ζ does not depend on the units of the
data. The paper does not standardise: its ζ is ours times the square of the scale, and `DPSGuidance.of_paper` converts
it. A step is as long as ζ times the gradient, about ζ/σ where Γ = σ²I: smaller noise needs a smaller ζ.

Guidance by the likelihood knows how uncertain its guess is. The images that y(t) may have come from scatter about x̂:
independent Gaussian pixels of variance v do so with the variance v r², r² = s²/(m² + s²), and then

    m | y(t) ~ N(A(x̂), Γ + v r² I),      the score of y(t) gains ∇ log p(m | y(t))

is exact where A picks pixels and f keeps distances. It is an approximation elsewhere, as in Rozet and Louppe (2023,
score-based data assimilation) and Song et al. (2023, pseudoinverse guidance). Far from the data it pulls gently, near
them as the noise allows. The step is that of the score itself: there is no ζ to find, and none that depends on the
number of steps.

Guidance is an object with the method `shift`, so that one sampler serves all of them.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import DataError, UsageError
from namm.generative.base import Standardised
from namm.generative.samplers import Step
from namm.inverse.noise import GaussianNoise
from namm.inverse.operators import Operator


@dataclass(frozen=True, eq=False)
class Evidence:
    """What was measured, m = A(x) + n with `noise` n: one `measurement` m (B, …) for each sample of a batch."""

    measurement: Tensor
    operator: Operator
    noise: GaussianNoise

    def residual(self, x: Tensor) -> Tensor:
        """m − A(x) for images (B, C, H, W): (B, …)."""
        simulated = self.operator(x)
        if simulated.shape != self.measurement.shape:
            raise DataError(
                f"{self.operator.name} makes measurements of shape {tuple(simulated.shape)} from images "
                f"{tuple(x.shape)}, and the measurement given has {tuple(self.measurement.shape)}."
            )
        return self.measurement - simulated

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
        _refuse_negative(self, "zeta", "weight")

    @classmethod
    def of_paper(
        cls, zeta: float, model: Standardised, *, constraint: Constraint | None = None, weight: float = 200.0
    ) -> Self:
        """The guidance whose steps have, in the units of the data, the paper's or the official code's ζ, such as 0.1.

        The model's scale converts ζ; where channels differ in scale, the mean square does.
        """
        return cls(zeta / _variance(model, "DPSGuidance.of_paper"), constraint, weight)

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


@dataclass(frozen=True, eq=False)
class LikelihoodGuidance:
    """The pull of a measurement by its likelihood, and of a rule if one is given: log p − w ℓ(x̂).

    Args:
        variance: v of the images; `of` takes it from a model.
        strength: Factor of the log-likelihood; 1 is the likelihood itself.
        constraint: ℓ, to be guided by too.
        weight: w of ℓ, as a part of log p.
    """

    variance: float
    strength: float = 1.0
    constraint: Constraint | None = None
    weight: float = 2000.0

    def __post_init__(self) -> None:
        _refuse_negative(self, "variance", "strength", "weight")

    @classmethod
    def of(
        cls, model: Standardised, strength: float = 1.0, *, constraint: Constraint | None = None, weight: float = 2000.0
    ) -> Self:
        """The guidance with the variance that the model standardises to 1, the mean over channels."""
        return cls(_variance(model, "LikelihoodGuidance.of"), strength, constraint, weight)

    def log_likelihood(self, guess: Guess, evidence: Evidence) -> Tensor:
        """log p(m | y(t)) − w ℓ(x̂) but for a constant: (B,).

        Γ + v r² I is taken as Γ (1 + v r² γ) with γ the mean of Γ⁻¹'s diagonal, which it is where all values have the
        same noise.
        """
        m, s = guess.step.mean, guess.step.std
        uncertainty = self.variance * s**2 / (m**2 + s**2) * evidence.noise.mean_precision
        log_p = -0.5 * self.strength / (1 + uncertainty) * evidence.chi2(guess.x)
        return log_p if self.constraint is None else log_p - self.weight * self.constraint(guess.x)

    def shift(self, guess: Guess, evidence: Evidence) -> Tensor:
        """The step that the gradient of `log_likelihood` makes when it is added to the score."""
        return guess.step.score_factor * gradient(self.log_likelihood(guess, evidence), guess.y_t)

    def smaller(self) -> "LikelihoodGuidance":
        """Half the pull of the measurement and of the rule."""
        return replace(self, strength=self.strength / 2, weight=self.weight / 2)


def gradient(loss: Tensor, y_t: Tensor) -> Tensor:
    """The gradient of each sample's loss (B,) with respect to its state: (B, C, H, W)."""
    try:
        return torch.autograd.grad(loss.sum(), y_t)[0]
    except RuntimeError as error:
        if loss.requires_grad and "appears to not have been used" not in str(error):
            raise
        raise UsageError(
            "the measurement has no gradient with respect to the state of the diffusion: the denoiser, f or the "
            "operator leaves autograd. Remove torch.no_grad, .detach(), .item() and numpy from them."
        ) from error


def _refuse_negative(guidance: object, *names: str) -> None:
    for name in names:
        value = getattr(guidance, name)
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{type(guidance).__name__}: {name} must be finite and not negative, not {value}.")


def _variance(model: Standardised, caller: str) -> float:
    """The variance that the model standardises to 1, the mean over channels."""
    if not isinstance(model, Standardised):
        raise UsageError(f"{caller} needs the diffusion itself, such as prior.model, not a {type(model).__name__}.")
    return float(model.scale.square().mean())
