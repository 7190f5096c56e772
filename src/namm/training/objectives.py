"""What a mirror map is trained for: paper Section 3, equation by equation.

    min over g, f   L_cycle + λ_constr L_constr + λ_reg R                                              (1)
    noisy mirror distributions   y = g(x) + σ z,   σ ~ U(0, σ_max),   z ~ N(0, I) or `ModelErrors`     (2)
    L_cycle  = ‖x − f(g(x))‖₁ + ‖y − g(f(y))‖₁                                                          (3)
    L_constr = ℓ(f(y))                                                                                  (4)
    R        = ‖x − g(x)‖₁                                                                              (5)
    finetuning, g frozen, ỹ a sample of the mirror diffusion model, y = ỹ + σ z:
    min over f   ‖x − f(g(x))‖₁ + ‖y − g(f(y))‖₁ + λ_constr ℓ(f(y))                                     (7)

Norms are means over pixels and expectations are means over the batch; cycle terms and R are in the units of the
networks, where images are standardised (`MirrorMap`), and ℓ in those of the data. An objective draws its
random numbers in `draw` and is otherwise a pure function of tensors: `forward` compiles as one graph, and a process
that holds a slice of the batch gets its slice of the draws.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

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


class Noise(Protocol):
    """Draws σ, one per image, and the errors that it multiplies."""

    @property
    def maximum(self) -> float:
        """The largest σ that is drawn."""

    def __call__(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """σ of shape (B, 1, 1, 1) for images `like` (B, C, H, W)."""

    def errors(self, like: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """z (B, C, H, W) and, where it has one, a gain γ (B, 1, 1, 1): y becomes y + σ (z + γ y)."""


class WhiteNoise:
    """z ~ N(0, I)."""

    def errors(self, like: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """z (B, C, H, W)."""
        return (torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype),)


@dataclass(frozen=True)
class UniformNoise(WhiteNoise):
    """White noise, σ ~ U(0, maximum): the paper's, since the error of a generative model is not known in advance."""

    maximum: float = 0.1

    def __call__(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """σ of shape (B, 1, 1, 1)."""
        u = torch.rand(len(like), 1, 1, 1, generator=generator, device=like.device, dtype=like.dtype)
        return self.maximum * u


@dataclass(frozen=True)
class FixedNoise(WhiteNoise):
    """White noise, σ = maximum always: the paper's ablation (App. D.2)."""

    maximum: float = 0.1

    def __call__(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """σ of shape (B, 1, 1, 1)."""
        return like.new_full((len(like), 1, 1, 1), self.maximum)


@dataclass(frozen=True)
class ModelErrors(UniformNoise):
    """Errors of the kinds that generative models make, σ ~ U(0, maximum).

    White noise and a smooth field share the variance at random, and each channel's level and the image's contrast are
    off besides. White noise alone moves a sum over N pixels √N times less than a smooth error of the same size does,
    so that an f trained on it never meets what samples are wrong in.

    Attributes:
        maximum: σ_max.
        level: Standard deviation of each channel's offset, and of the image's gain, in σ.
    """

    level: float = 0.3

    def errors(self, like: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """z (B, C, H, W) and γ (B, 1, 1, 1)."""
        (white,) = super().errors(like, generator)
        to: dict[str, Any] = {"generator": generator, "device": like.device, "dtype": like.dtype}
        one = (len(like), 1, 1, 1)
        share, length = torch.rand(one, **to), torch.rand(one, **to)
        offset = torch.randn((*like.shape[:2], 1, 1), **to)
        gain = self.level * torch.randn(one, **to)
        smooth = smoothed(torch.randn(like.shape, **to), length)
        return share.sqrt() * white + (1 - share).sqrt() * smooth + self.level * offset, gain


@dataclass(frozen=True)
class FixedModelErrors(ModelErrors):
    """Errors of the kinds that generative models make, σ = maximum always."""

    def __call__(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """σ of shape (B, 1, 1, 1)."""
        return like.new_full((len(like), 1, 1, 1), self.maximum)


def smoothed(z: Tensor, length: Tensor) -> Tensor:
    """White noise z (B, C, H, W) under a Gaussian filter, scaled to variance one.

    `length` (B, 1, 1, 1) in [0, 1] leads from 0.7 pixels to a fifth of the shorter side.
    """
    height, width = z.shape[-2:]
    pixels = 0.7 * max(min(height, width) / 3.5, 1.0) ** length
    rows, columns = torch.fft.fftfreq(height, device=z.device), torch.fft.rfftfreq(width, device=z.device)
    window = torch.exp(-2 * (math.pi * pixels) ** 2 * (rows[:, None].square() + columns.square()))
    field = torch.fft.irfft2(torch.fft.rfft2(z) * window, s=(height, width))
    return field / field.std((1, 2, 3), keepdim=True).clamp_min(1e-12)


def perturb(y: Tensor, sigma: Tensor, z: Tensor, gain: Tensor | float = 0.0) -> Tensor:
    """Eq. 2: y + σ z, or y + σ (z + γ y)."""
    return y + sigma * (z + gain * y)


# Eqs. 3 to 5: the terms


def cycle_loss(a: Tensor, there_and_back: Tensor, squared: float = 0.0) -> Tensor:
    """Eq. 3, one half: ‖a − there_and_back‖₁, and `squared` times ‖a − there_and_back‖²₂ beside it."""
    error = a - there_and_back
    return error.abs().mean() + squared * error.square().mean() if squared else error.abs().mean()


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

    `cycle` multiplies both halves of Eq. 3; 0.5 is that of the published results. `squared` adds squared errors to
    them, which keeps f from changing few pixels by much: in Eq. 3 a star costs no more than the sky around it.
    """

    constraint: float = 1.0
    cycle: float = 0.5
    regulariser: float = 1e-3
    squared: float = field(default=0.0, repr=False)


class MapObjective(Objective):
    """Eq. 1 for g and f together; a batch is (x,). Without a regulariser `default_regulariser` chooses it."""

    def __init__(
        self,
        mirror: MirrorMap,
        constraint: Constraint,
        *,
        noise: Noise = UniformNoise(0.1),
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
        """σ (B, 1, 1, 1), z (B, C, H, W) and, where the noise has one, γ (B, 1, 1, 1)."""
        return _draw_noise(self.noise, batch[0], generator)

    def forward(self, *tensors: Tensor) -> Losses:
        """x, σ, z[, γ] -> losses; f runs once on clean and noisy mirror images together."""
        x, sigma, *errors = tensors
        g, f, u = self.mirror.g, self.mirror.f, self.mirror.standardise(x)
        gx = g(u)
        y = perturb(gx, sigma, *errors)
        u_cycle, u_noisy = f(torch.cat([gx, y])).chunk(2)
        squared = self.weights.squared
        cycle = cycle_loss(u, u_cycle, squared) + cycle_loss(y, g(u_noisy), squared)
        distance = constraint_loss(self.constraint, self.mirror.unstandardise(u_noisy))
        closeness = self.regulariser(g, u, gx)
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
        noise: Noise = UniformNoise(0.1),
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
        """σ (B, 1, 1, 1), z (B, C, H, W) and, where the noise has one, γ (B, 1, 1, 1)."""
        return _draw_noise(self.noise, batch[1], generator)

    def forward(self, *tensors: Tensor) -> Losses:
        """x, ỹ, σ, z[, γ] -> losses."""
        x, samples, sigma, *errors = tensors
        g, f, u = self.mirror.g, self.mirror.f, self.mirror.standardise(x)
        y = perturb(samples, sigma, *errors)
        u_cycle, u_noisy = f(torch.cat([g(u), y])).chunk(2)
        squared = self.weights.squared
        cycle = cycle_loss(u, u_cycle, squared) + cycle_loss(y, g(u_noisy), squared)
        distance = constraint_loss(self.constraint, self.mirror.unstandardise(u_noisy))
        loss = self.weights.cycle * cycle + self.weights.constraint * distance
        return {"loss": loss, "cycle": cycle, "constraint": distance}


def _draw_noise(noise: Noise, like: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    errors = noise.errors(like, generator)
    return noise(like, generator), *errors
