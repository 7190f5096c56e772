"""How images turn into noise, in continuous time, 0 < t ≤ 1: a schedule is a pair of functions m and s.

    y(t) = m(t) y(0) + s(t) ε,            ε ~ N(0, I)
    dy = f y dt + g dw,                   f = d log m/dt,   g² = ds²/dt − 2 f s²,   has these marginals

`VPSDE`, variance preserving (paper Sec. 3.2; Song et al. 2021), has f = −½ β and g² = β:

    m(t) = exp c(t),   s(t)² = 1 − exp 2c(t),   c(t) = −½ ∫₀ᵗ β,   β(t) = β_min + (β_max − β_min) t

`Straight` joins image and noise by a straight line (flow matching: Lipman et al. 2023; Liu et al. 2023): m = 1 − t,
s = t. Schedules differ in scale and in clock alone: y(t) / √(m² + s²) is a variance-preserving process with the same
s/m, and whoever knows E[y(0) | y(t)] under one schedule knows it under all.

Given y(t), these carry the same information, D = E[y(0) | y(t)] the clean image among them:

    ε = (y(t) − m D) / s,       score = ∇ log p(y(t)) = −ε / s
    v = m ε − s D               where m² + s² = 1:   D = m y(t) − s v,   ε = s y(t) + m v
    w = ε − D                   where m + s = 1:     D = y(t) − s w,     ε = y(t) + m w
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from namm.errors import UsageError


class Marginal(NamedTuple):
    """m and s of y(t) = m y(0) + s ε, shaped to multiply images."""

    mean: Tensor
    std: Tensor


class Schedule(ABC):
    """m and s, and what follows from them; every method takes t of any shape.

    A schedule of your own defines `mean`, `std` and `time_of`.
    """

    @property
    def t_max(self) -> float:
        """Where samplers start; s/m must be finite there."""
        return 1.0

    @abstractmethod
    def mean(self, t: Tensor) -> Tensor:
        """m(t), 1 at t = 0 and falling."""

    @abstractmethod
    def std(self, t: Tensor) -> Tensor:
        """s(t), 0 at t = 0."""

    @abstractmethod
    def time_of(self, noise_ratio: Tensor) -> Tensor:
        """The t at which s/m is `noise_ratio`: the inverse of `noise_ratio(t)`."""

    def marginal(self, t: Tensor) -> Marginal:
        """m and s of shape (B, 1, 1, 1) for t (B,)."""
        t = t.reshape(-1, 1, 1, 1)
        return Marginal(self.mean(t), self.std(t))

    def noise_ratio(self, t: Tensor) -> Tensor:
        """σ = s/m, the noise level that diffusers' schedulers count in."""
        return self.std(t) / self.mean(t)

    def scale(self, t: Tensor) -> Tensor:
        """√(m² + s²), the standard deviation of y(t) where that of y(0) is 1."""
        return torch.hypot(self.mean(t), self.std(t))

    def drift(self, t: Tensor) -> Tensor:
        """f(t)."""
        return _slope(lambda t: self.mean(t).log(), t)

    def diffusion(self, t: Tensor) -> Tensor:
        """g(t)²."""
        return _slope(lambda t: self.std(t).square(), t) - 2 * self.drift(t) * self.std(t).square()

    def transition(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """r and the variance of y(t) = r y(s) + noise, for s < t: r = m(t)/m(s), s(t)² − r² s(s)²."""
        kept = self.mean(t) / self.mean(s)
        return kept, self.std(t).square() - (kept * self.std(s)).square()


def _slope(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The derivative of a function of every entry of t by itself."""
    slope: Tensor = torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]
    return slope


@dataclass(frozen=True)
class VPSDE(Schedule):
    """Variance preserving, m² + s² = 1; the defaults are the paper's.

    s is computed by expm1: at small t the difference 1 − exp 2c would lose half of its digits.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max:
            raise UsageError(f"need 0 < beta_min <= beta_max, not {self.beta_min} and {self.beta_max}.")

    def beta(self, t: Tensor) -> Tensor:
        """β(t)."""
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

    def scale(self, t: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(t)

    def drift(self, t: Tensor) -> Tensor:
        """−½ β."""
        return -0.5 * self.beta(t)

    def diffusion(self, t: Tensor) -> Tensor:
        """β."""
        return self.beta(t)

    def transition(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """r and 1 − r²."""
        log_kept = self.log_mean(t) - self.log_mean(s)
        return log_kept.exp(), -torch.expm1(2 * log_kept)

    def noise_ratio(self, t: Tensor) -> Tensor:
        """s/m."""
        return torch.expm1(-2 * self.log_mean(t)).sqrt()

    def time_of(self, noise_ratio: Tensor) -> Tensor:
        """The inverse of `noise_ratio(t)`, in closed form."""
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


@dataclass(frozen=True)
class Straight(Schedule):
    """Straight paths from image to noise, y(t) = (1 − t) y(0) + t ε: m + s = 1.

    At t = 1 nothing of the image is left and s/m is infinite. Networks are trained up to there; samplers start a little
    below, at `t_max`, from noise with the variance of y(t_max). By default m is 0.005 there, about that of the paper's
    `VPSDE` at t = 1.
    """

    t_max: float = 0.995

    def __post_init__(self) -> None:
        if not 0 < self.t_max < 1:
            raise UsageError(f"t_max must lie between 0 and 1, where s/m would be infinite, not {self.t_max}.")

    def mean(self, t: Tensor) -> Tensor:
        """1 − t."""
        return 1 - t

    def std(self, t: Tensor) -> Tensor:
        """t."""
        return t

    def time_of(self, noise_ratio: Tensor) -> Tensor:
        """σ / (1 + σ)."""
        return noise_ratio / (1 + noise_ratio)


# What a network may predict


class Prediction(Protocol):
    """What the network's output means."""

    def fits(self, marginal: Marginal) -> bool:
        """Whether the conversions below hold for a schedule with these m and s."""

    def target(self, y: Tensor, epsilon: Tensor, marginal: Marginal) -> Tensor:
        """What the output is regressed on, given y(0) and ε."""

    def epsilon(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """ε as the output has it."""

    def denoised(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """D as the output has it."""


@dataclass(frozen=True)
class Epsilon:
    """The output is ε, as in the paper: squared error in ε is score matching weighted by s²."""

    def fits(self, marginal: Marginal) -> bool:
        """With every schedule."""
        return True

    def target(self, y: Tensor, epsilon: Tensor, marginal: Marginal) -> Tensor:
        """ε."""
        return epsilon

    def epsilon(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """The output itself."""
        return output

    def denoised(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """(y(t) − s ε) / m: an error of the network is multiplied by s/m, 150 at t = 1 of the paper's schedule."""
        return (y_t - marginal.std * output) / marginal.mean


@dataclass(frozen=True)
class Velocity:
    """The output is v = m ε − s y(0) (Salimans and Ho 2022): of unit size at every t, and so is the error of D."""

    def fits(self, marginal: Marginal) -> bool:
        """Where m² + s² = 1."""
        return _is_one(marginal.mean.square() + marginal.std.square())

    def target(self, y: Tensor, epsilon: Tensor, marginal: Marginal) -> Tensor:
        """v."""
        return marginal.mean * epsilon - marginal.std * y

    def epsilon(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """s y(t) + m v."""
        return marginal.std * y_t + marginal.mean * output

    def denoised(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """m y(t) − s v."""
        return marginal.mean * y_t - marginal.std * output


@dataclass(frozen=True)
class Flow:
    """The output is ε − y(0), the velocity dy(t)/dt of a straight path (flow matching); its error reaches D times t."""

    def fits(self, marginal: Marginal) -> bool:
        """Where m + s = 1."""
        return _is_one(marginal.mean + marginal.std)

    def target(self, y: Tensor, epsilon: Tensor, marginal: Marginal) -> Tensor:
        """ε − y(0)."""
        return epsilon - y

    def epsilon(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """y(t) + m output."""
        return y_t + marginal.mean * output

    def denoised(self, output: Tensor, y_t: Tensor, marginal: Marginal) -> Tensor:
        """y(t) − s output."""
        return y_t - marginal.std * output


def _is_one(values: Tensor) -> bool:
    return torch.allclose(values, torch.ones_like(values), rtol=0, atol=1e-6)
