"""Projection of the denoised estimate by Gauss–Newton, after physics-constrained flow matching (PCFM).

PCFM (Utkarsh et al. 2025) keeps the network as it is and corrects where a step of the sampler is headed for. At each
time it extrapolates to a clean image, here D = E[y(0) | y(t)]; takes Gauss–Newton steps towards a residual r of zero,

    x ← x − s²Jᵀ (J s² Jᵀ)⁻¹ r(x),      J = ∂r/∂x,      s the standard deviation of each channel,

each the nearest point of the linearised rule; and goes from there to the noise level of the next step. At the end the
samples are brought to the rule exactly, here by `namm.polish`.

The paper's way back mixes the corrected image with noise on a straight path. Here the corrected D takes the place of D
in the step of any sampler, which does the same for any path: a step of `DDIM` mixes D with the noise that y(t) holds.
The paper's further term, which relaxes the correction on the way, is left out.

For Gaussian data with independent pixels of equal variance and linear equations P(D) = E[y(0) | y(t), rule], so that
samples have the data's law given the rule; for other covariances the nearest point is not the likeliest one.

Each step takes conjugate gradients with products with J, and no gradient of the network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.exact.equations import Equations, Linearised, Problem, needs_forward, require_positive
from namm.exact.gauss_newton import largest_eigenvalue, multipliers
from namm.exact.polish import polish
from namm.generative import Diffusion
from namm.generative.base import Draws
from namm.generative.samplers import Sampler
from namm.numerics import full_precision
from namm.rivals.base import Denoiser, Need, Rival, widened


@dataclass(frozen=True)
class ProjectedEstimate(Rival):
    """The denoised estimate moved to the linearised residual in every step.

    Args:
        iterations: Steps of Gauss–Newton for each step of the sampler.
        products: Most steps of conjugate gradients in one of Gauss–Newton.
    """

    requires: ClassVar[tuple[Need, ...]] = ("residual",)
    iterations: int = 1
    products: int = 50

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.products < 1:
            raise UsageError(
                f"ProjectedEstimate: iterations and products must be 1 or more, not {self.iterations} and "
                f"{self.products}."
            )

    def draw(
        self, model: Diffusion, rule: Constraint, sampler: Sampler, noise: Draws, tick: Callable[[], None]
    ) -> Tensor:
        """One batch of samples on the rule; one that diverged is returned as it is."""
        x = model.unstandardise(sampler(LinearisedRule(model, rule, self), noise, tick))
        finite = x.isfinite().flatten(1).all(1)
        if finite.any():
            x[finite] = polish(x[finite], rule, scale=model.scale).images
        return x


class LinearisedRule(Denoiser):
    """D moved to the rule's linearisation."""

    def __init__(self, model: Diffusion, rule: Constraint, method: ProjectedEstimate) -> None:
        super().__init__(model, rule)
        equations = Equations.of(rule, (None, None))
        assert equations is not None  # the rule has a residual
        self.equations, self.method, self.preconditioner_checked = equations, method, False

    def corrected(self, x: Tensor) -> Tensor:
        """x after the steps of Gauss–Newton, each kept where it lowers ℓ."""
        with full_precision(x):
            for _ in range(self.method.iterations):
                moved = self._step(widened(x)).to(x.dtype)
                nearer = self.rule(moved) < self.rule(x)  # not so where it is NaN
                x = torch.where(nearer.reshape(-1, 1, 1, 1), moved, x)
        return x

    def _step(self, x: Tensor) -> Tensor:
        """The nearest point of the rule linearised at x."""
        scale = self.model.scale.to(x).expand(1, *x.shape[1:])
        problem, here = Problem.of(x, scale, self.equations), torch.zeros_like(x)
        lin = Linearised(problem, here, forward=needs_forward(problem, here))
        if not self.preconditioner_checked:
            require_positive(lin)
            self.preconditioner_checked = True
        size, zero = largest_eigenvalue(lin), torch.zeros_like(lin.value)
        mu, _ = multipliers(lin, here, zero, problem.at_most, size, zero[:, 0], self.method.products)
        return problem.images(-lin.transposed(mu))
