"""The variance-preserving diffusion in continuous time (paper Sec. 3.2; Song et al. 2021), 0 < t ≤ 1.

    dy = −½ β(t) y dt + √β(t) dw,         β(t) = β_min + (β_max − β_min) t
    y(t) = m(t) y(0) + s(t) ε,            ε ~ N(0, I)
    m(t) = exp c(t),   s(t)² = 1 − exp 2c(t),   c(t) = −½ ∫₀ᵗ β = −½ β_min t − ¼ (β_max − β_min) t²

Given y(t), four quantities carry the same information, D = E[y(0) | y(t)] the clean image among them:

    ε = (y(t) − m D) / s,       score = ∇ log p(y(t)) = −ε / s,       v = m ε − s D

so that D = (y(t) − s ε) / m = m y(t) − s v and ε = s y(t) + m v. s is computed by expm1: at small t the
difference 1 − exp 2c would lose half of its digits.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from namm.errors import UsageError


class Marginal(NamedTuple):
    """m and s of y(t) = m y(0) + s ε, shaped to multiply images."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class VPSDE:
    """The noise schedule; the defaults are the paper's. Every method takes t of any shape."""

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max:
            raise UsageError(f"need 0 < beta_min <= beta_max, not {self.beta_min} and {self.beta_max}.")

    def beta(self, t: Tensor) -> Tensor:
        """β(t); the drift is −½ β y, the diffusion coefficient √β."""
        return self.beta_min + (self.beta_max - self.beta_min) * t

    def log_mean(self, t: Tensor) -> Tensor:
        """c(t)."""
        return -0.5 * self.beta_min * t - 0.25 * (self.beta_max - self.beta_min) * t.square()

    def mean(self, t: Tensor) -> Tensor:
        """m(t)."""
        return self.log_mean(t).exp()

    def std(self, t: Tensor) -> Tensor:
        """s(t)."""
        return (-torch.expm1(2 * self.log_mean(t))).sqrt()

    def marginal(self, t: Tensor) -> Marginal:
        """m and s of shape (B, 1, 1, 1) for t (B,)."""
        t = t.reshape(-1, 1, 1, 1)
        return Marginal(self.mean(t), self.std(t))

    def noise_ratio(self, t: Tensor) -> Tensor:
        """σ = s/m, the noise level that diffusers' schedulers count in."""
        return torch.expm1(-2 * self.log_mean(t)).sqrt()

    def time_of(self, noise_ratio: Tensor) -> Tensor:
        """The t at which s/m is `noise_ratio`: the inverse of `noise_ratio(t)`, in closed form."""
        log_mean = 0.5 * torch.log1p(noise_ratio.square())  # −c
        slope = self.beta_max - self.beta_min
        return 4 * log_mean / (self.beta_min + (self.beta_min**2 + 4 * slope * log_mean).sqrt())

    def discrete_betas(self, steps: int = 1000) -> Tensor:
        """β_i = 1 − ᾱ_i/ᾱ_{i−1} with ᾱ_i = m(t_i)² at t_i = (i + 1)/steps: (steps,) in float64.

        A discrete schedule with these betas (`trained_betas` of a diffusers scheduler) has this diffusion's marginals,
        at the low-noise end too.
        """
        log_mean = self.log_mean(torch.arange(steps + 1, dtype=torch.double) / steps)
        return -torch.expm1(2 * log_mean.diff())


# What a network may predict


class Prediction(Protocol):
    """What the network's output means."""

    def target(self, y: Tensor, epsilon: Tensor, marginal: Marginal) -> Tensor:
        """What the output is regressed on, given y(0) and ε."""

    def epsilon(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """ε as the output has it."""

    def denoised(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """D as the output has it."""


@dataclass(frozen=True)
class Epsilon:
    """The output is ε, as in the paper: squared error in ε is score matching weighted by s²."""

    def target(self, y: Tensor, epsilon: Tensor, marginal: Marginal) -> Tensor:
        """ε."""
        return epsilon

    def epsilon(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """The output itself."""
        return output

    def denoised(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """(y(t) − s ε) / m: an error of the network is multiplied by s/m, 150 at t = 1."""
        return (y_t - marginal.std * output) / marginal.mean


@dataclass(frozen=True)
class Velocity:
    """The output is v = m ε − s y(0) (Salimans and Ho 2022): of unit size at every t, and so is the error of D."""

    def target(self, y: Tensor, epsilon: Tensor, marginal: Marginal) -> Tensor:
        """v."""
        return marginal.mean * epsilon - marginal.std * y

    def epsilon(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """s y(t) + m v."""
        return marginal.std * y_t + marginal.mean * output

    def denoised(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """m y(t) − s v."""
        return marginal.mean * y_t - marginal.std * output
