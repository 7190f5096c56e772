"""What a mirror map is trained for: paper Section 3, equation by equation.

    min over g, f   L_cycle + λ_constr L_constr + λ_reg R                                              (1)
    noisy mirror distributions   y = g(x) + σ z,   σ ~ U(0, σ_max),   z ~ N(0, I)                      (2)
    L_cycle  = ‖x − f(g(x))‖₁ + ‖y − g(f(y))‖₁                                                          (3)
    L_constr = ℓ(f(y))                                                                                  (4)
    R        = ‖x − g(x)‖₁                                                                              (5)
    finetuning, g frozen, ỹ a sample of the mirror diffusion model, y = ỹ + σ z:
    min over f   ‖x − f(g(x))‖₁ + ‖y − g(f(y))‖₁ + λ_constr ℓ(f(y))                                     (7)

Norms are means over pixels and expectations are means over the batch. An objective draws its random numbers in `draw`
and is otherwise a pure function of tensors: `forward` compiles as one graph, and a process that holds a slice of
the batch gets its slice of the draws.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.maps import ICNN, MirrorMap

Losses = dict[str, Tensor]


class Objective(nn.Module, ABC):
    """A loss to train by: the networks it holds are trained where their parameters require gradients."""

    @abstractmethod
    def draw(self, batch: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
        """The random tensors that `forward` takes after the batch, each with the batch as its first axis."""

    def draw_whole(self, part: tuple[Tensor, ...], size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """What `draw` gives for the batch of `size` of which `part` is a slice: shapes alone matter, so views serve."""
        return self.draw(tuple(tensor[:1].expand(size, *tensor.shape[1:]) for tensor in part), generator)

    @abstractmethod
    def forward(self, *tensors: Tensor) -> Losses:
        """`loss`, a scalar to minimise, first; then the terms it is made of, for the log."""


# Eq. 2: how far from g(x) the inverse map is trained


class NoiseLevel(Protocol):
    """Draws σ, one per image."""

    @property
    def maximum(self) -> float:
        """The largest σ that is drawn."""

    def __call__(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """σ of shape (B, 1, 1, 1) for images `like` (B, C, H, W)."""


@dataclass(frozen=True)
class UniformNoise:
    """σ ~ U(0, maximum): the paper's choice, since the error of a generative model is not known in advance."""

    maximum: float = 0.1

    def __call__(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """σ of shape (B, 1, 1, 1)."""
        u = torch.rand(len(like), 1, 1, 1, generator=generator, device=like.device, dtype=like.dtype)
        return self.maximum * u


@dataclass(frozen=True)
class FixedNoise:
    """σ = maximum always: the paper's ablation (App. D.2)."""

    maximum: float = 0.1

    def __call__(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """σ of shape (B, 1, 1, 1)."""
        return like.new_full((len(like), 1, 1, 1), self.maximum)


def perturb(y: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
    """Eq. 2: y + σ z."""
    return y + sigma * z


# Eqs. 3 to 5: the terms


def cycle_loss(a: Tensor, there_and_back: Tensor) -> Tensor:
    """Eq. 3, one half: ‖a − there_and_back‖₁."""
    return (a - there_and_back).abs().mean()


def constraint_loss(constraint: Constraint, x: Tensor) -> Tensor:
    """Eq. 4: ℓ(x), mean over the batch."""
    distance: Tensor = constraint(x)
    return distance.mean()


Regulariser = Callable[[nn.Module, Tensor, Tensor], Tensor]


def identity_regulariser(g: nn.Module, x: Tensor, gx: Tensor) -> Tensor:
    """Eq. 5: ‖x − g(x)‖₁."""
    return (x - gx).abs().mean()


def gradient_regulariser(g: nn.Module, x: Tensor, gx: Tensor) -> Tensor:
    """What the published results used: mean |∇P(x)|, read off g(x) = (1 − α) ∇P(x) + α x."""
    if not isinstance(g, ICNN):
        raise UsageError(
            f"gradient_regulariser needs g to be an ICNN, not a {type(g).__name__}: use identity_regulariser."
        )
    alpha = g.strong_convexity
    if alpha == 1:
        raise UsageError("with strong_convexity 1 g is the identity and has no gradient to regularise.")
    return ((gx - alpha * x) / (1 - alpha)).abs().mean()


def default_regulariser(g: nn.Module) -> Regulariser:
    """The regulariser where none is chosen: mean |∇P| as published for an ICNN, Eq. 5 for a g without a potential.

    An ICNN of strong convexity 1 is the identity, which has no gradient to regularise: Eq. 5 is zero there.
    """
    has_gradient = isinstance(g, ICNN) and g.strong_convexity != 1
    return gradient_regulariser if has_gradient else identity_regulariser


# Eqs. 1 and 7: the objectives


@dataclass(frozen=True)
class Weights:
    """Weights of the terms of Eq. 1.

    `cycle` multiplies both halves of Eq. 3; 0.5 is that of the published results.
    """

    constraint: float = 1.0
    cycle: float = 0.5
    regulariser: float = 1e-3


class MapObjective(Objective):
    """Eq. 1 for g and f together; a batch is (x,). Without a regulariser `default_regulariser` chooses it."""

    def __init__(
        self,
        mirror: MirrorMap,
        constraint: Constraint,
        *,
        noise: NoiseLevel = UniformNoise(0.1),
        weights: Weights = Weights(),
        regulariser: Regulariser | None = None,
    ) -> None:
        super().__init__()
        self.mirror, self.constraint = mirror, constraint.requires_grad_(False)
        self.noise, self.weights = noise, weights
        self.regulariser = regulariser or default_regulariser(mirror.g)

    def train(self, mode: bool = True) -> Self:
        """Training mode for the maps; the rule is given, not learned."""
        super().train(mode)
        self.constraint.eval()
        return self

    def draw(self, batch: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
        """σ (B, 1, 1, 1) and z (B, C, H, W)."""
        return _draw_noise(self.noise, batch[0], generator)

    def forward(self, *tensors: Tensor) -> Losses:
        """x, σ, z -> losses; f runs once on clean and noisy mirror images together."""
        x, sigma, z = tensors
        g, f = self.mirror.to_mirror, self.mirror.to_data
        gx = g(x)
        y = perturb(gx, sigma, z)
        x_cycle, x_noisy = f(torch.cat([gx, y])).chunk(2)
        cycle = cycle_loss(x, x_cycle) + cycle_loss(y, g(x_noisy))
        distance = constraint_loss(self.constraint, x_noisy)
        closeness = self.regulariser(self.mirror.g, x, gx)
        w = self.weights
        loss = w.cycle * cycle + w.constraint * distance + w.regulariser * closeness
        return {"loss": loss, "cycle": cycle, "constraint": distance, "regulariser": closeness}


class FinetuneObjective(Objective):
    """Eq. 7 for f alone; a batch is (x, ỹ): data and, independently, samples in mirror space."""

    def __init__(
        self,
        mirror: MirrorMap,
        constraint: Constraint,
        *,
        noise: NoiseLevel = UniformNoise(0.1),
        weights: Weights = Weights(),
    ) -> None:
        super().__init__()
        self.mirror, self.constraint = mirror, constraint.requires_grad_(False)
        self.noise, self.weights = noise, weights
        mirror.g.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Training mode for f; g and the rule stay as they are."""
        super().train(mode)
        self.mirror.g.eval()
        self.constraint.eval()
        return self

    def draw(self, batch: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
        """σ (B, 1, 1, 1) and z (B, C, H, W)."""
        return _draw_noise(self.noise, batch[1], generator)

    def forward(self, *tensors: Tensor) -> Losses:
        """x, ỹ, σ, z -> losses."""
        x, samples, sigma, z = tensors
        g, f = self.mirror.to_mirror, self.mirror.to_data
        y = perturb(samples, sigma, z)
        x_cycle, x_noisy = f(torch.cat([g(x), y])).chunk(2)
        cycle = cycle_loss(x, x_cycle) + cycle_loss(y, g(x_noisy))
        distance = constraint_loss(self.constraint, x_noisy)
        loss = self.weights.cycle * cycle + self.weights.constraint * distance
        return {"loss": loss, "cycle": cycle, "constraint": distance}


def _draw_noise(noise: NoiseLevel, like: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    z = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return noise(like, generator), z
