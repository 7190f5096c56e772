"""Guidance by a likelihood that knows how uncertain its guess is.

DPS takes the guess x̂ = f(E[y(0) | y(t)]) for what was measured. But the images that y(t) may have come from scatter
about it: independent Gaussian pixels of variance v do so with the variance v r², r² = s²/(m² + s²), and then

    m | y(t) ~ N(A(x̂), Γ + v r² I),      the score of y(t) gains ∇ log p(m | y(t))

is exact where A picks pixels and f keeps distances. It is an approximation elsewhere, as in Rozet and Louppe (2023,
score-based data assimilation) and Song et al. (2023, pseudoinverse guidance). Far from the data it pulls gently, near
them as the noise allows. The step is that of the score itself: there is no ζ to find, and none that depends on the
number of steps.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.generative.standardised import Standardised
from namm.inverse.guidance import Evidence, Guess, gradient


@dataclass(frozen=True, eq=False)
class LikelihoodGuidance:
    """The pull of a measurement by its likelihood, and of a rule if one is given: log p − w ℓ(x̂).

    Args:
        variance: v, of the images; `of` takes it from a model.
        strength: Factor of the log-likelihood; 1 is the likelihood itself.
        constraint: ℓ, to be guided by too.
        weight: w of ℓ, as a part of log p.
    """

    variance: float
    strength: float = 1.0
    constraint: Constraint | None = None
    weight: float = 2000.0

    def __post_init__(self) -> None:
        for name in ("variance", "strength", "weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"LikelihoodGuidance: {name} must be finite and not negative, not {value}.")

    @classmethod
    def of(
        cls,
        model: Standardised,
        strength: float = 1.0,
        *,
        constraint: Constraint | None = None,
        weight: float = 2000.0,
    ) -> Self:
        """With the variance that the model standardises to 1, the mean over channels."""
        if not isinstance(model, Standardised):
            raise UsageError(
                f"LikelihoodGuidance.of needs the diffusion itself, such as prior.model, not a {type(model).__name__}."
            )
        return cls(float(model.scale.square().mean()), strength, constraint, weight)

    def log_likelihood(self, guess: Guess, evidence: Evidence) -> Tensor:
        """log p(m | y(t)) − w ℓ(x̂) but for a constant: (B,).

        Γ + v r² I is taken as Γ (1 + v r² γ) with γ the mean of Γ⁻¹'s diagonal, which it is where all values have the
        same noise.
        """
        m, s = guess.step.mean, guess.step.std
        uncertain = self.variance * s**2 / (m**2 + s**2) * evidence.noise.mean_precision
        found = -0.5 * self.strength / (1 + uncertain) * evidence.chi2(guess.x)
        return found if self.constraint is None else found - self.weight * self.constraint(guess.x)

    def shift(self, guess: Guess, evidence: Evidence) -> Tensor:
        """What that adds to the score, as a step."""
        return guess.step.of_score * gradient(self.log_likelihood(guess, evidence), guess.y_t)

    def smaller(self) -> "LikelihoodGuidance":
        """Half the pull, of both."""
        return replace(self, strength=self.strength / 2, weight=self.weight / 2)
