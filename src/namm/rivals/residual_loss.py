"""ℓ as a part of the training loss, after physics-informed diffusion models (PIDM; Bastek, Sun and Kochmann 2025).

PIDM trains a plain diffusion model to denoise and, at once, to make the estimate D = E[y(0) | y(t)] obey the rule:

    loss = E [ (network(y(t), t) − target)² + c (m/s) ℓ(x̂) ],      x̂ = D in data space,      y(t) = m y + s ε

The rule counts more the less noise there is: with much noise D is a mean of many images, and the mean of images that
obey a curved rule does not obey it. The paper takes residuals to be Gaussian with the variance of a reverse step and
weights their squares by its inverse; ℓ, which is mostly a mean of absolute residuals, is weighted by the inverse of the
noise level s/m. This is its mean estimation (PIDM-ME), which needs no sampling in training.

Samples are those of a plain model, by any sampler, at no further cost. The method needs a training of its own for each
rule, and for each c that is tried:

    informed = ResidualLoss(c).informed(model, rule)
    namm.train_model(informed, data, namm.IdentityMap(), settings=settings)
    x = ResidualLoss(c).sample(informed, rule, n)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from namm.constraints import Constraint
from namm.constraints.base import RuleFunction, as_rule
from namm.errors import UsageError
from namm.generative import Diffusion
from namm.rivals.base import Need, Rival


@dataclass(frozen=True)
class ResidualLoss(Rival):
    """A plain model trained with ℓ of its estimate.

    Args:
        weight: c, in units of 1/ℓ. One over ℓ of a plain model's samples gives both terms about the same size.
    """

    requires: ClassVar[tuple[Need, ...]] = ("training",)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise UsageError(f"ResidualLoss: weight must be finite and not negative, not {self.weight}.")

    def informed(self, model: Diffusion, rule: Constraint | RuleFunction) -> "InformedDiffusion":
        """The same model, its network not copied, with this loss."""
        return InformedDiffusion(model, as_rule(rule), self.weight)

    def meets(self, need: Need, model: Diffusion, rule: Constraint) -> bool:
        """Whether the model has this loss."""
        return isinstance(model, InformedDiffusion)


class InformedDiffusion(Diffusion):
    """A diffusion model whose loss holds ℓ; its weights are those of a `Diffusion`, by the same names."""

    def __init__(self, model: Diffusion, rule: Constraint, weight: float) -> None:
        super().__init__(
            model.network,
            model.sample_shape,
            prediction=model.prediction,
            t_min=model.t_min,
            sde=model.sde,
            times=model.times,
        )
        self.mean, self.scale = model.mean.clone(), model.scale.clone()
        self.weight, self._rule = weight, (rule,)  # in a tuple, so that it is no part of the model's state

    @property
    def has_kernels(self) -> bool:
        """False: a rule may do what cannot be recorded."""
        return False

    def extra_repr(self) -> str:
        """What makes this model differ from another with the same network."""
        (rule,) = self._rule
        return f"{super().extra_repr()}, {self.weight:g} (m/s) of {rule!r}"

    def loss(self, y: Tensor, *draws: Tensor) -> Tensor:
        """The denoising loss of y (B, C, H, W) and c (m/s) ℓ of the estimate; `draws` are t and ε."""
        u_t, marginal, output, error = self._trial(y, *draws)
        (rule,) = self._rule
        distance = rule(self.unstandardise(self.prediction.denoised(output, u_t, marginal)))
        return error + self.weight * ((marginal.mean / marginal.std).flatten() * distance).mean()
