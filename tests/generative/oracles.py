"""Distributions whose diffusion is known in closed form, as networks that cannot be improved.

For y ~ N(μ, Σ), with K = m² Σ + s² I:   y(t) ~ N(m μ, K),   E[y | y(t)] = μ + m Σ K⁻¹ (y(t) − m μ).
The marginals of both schedules are written out here again, in float64, so that they check those of the package.
"""

import torch
from torch import Tensor, nn

from namm.generative.diffusion import Diffusion
from namm.generative.schedules import VPSDE, Epsilon, Flow, Straight, Velocity


def marginals(t: Tensor, straight: bool = False) -> tuple[Tensor, Tensor]:
    """m and s, (B, 1)."""
    if straight:
        return 1 - t.double()[:, None], t.double()[:, None]
    exponent = (0.1 * t.double() + 9.95 * t.double().square())[:, None]
    return torch.exp(-exponent / 2), torch.sqrt(1 - torch.exp(-exponent))


class Exact(nn.Module):
    """A network that returns E[ε | y(t)], v if `velocity`, or E[ε − y | y(t)] of straight paths."""

    def __init__(self, velocity: bool = False, straight: bool = False) -> None:
        super().__init__()
        self.velocity, self.straight = velocity, straight

    def denoised(self, y: Tensor, m: Tensor, s: Tensor) -> Tensor:
        """E[y | y(t)] for y(t) (B, D)."""
        raise NotImplementedError

    def forward(self, y_t: Tensor, t: Tensor) -> Tensor:
        y, (m, s) = y_t.flatten(1).double(), marginals(t, self.straight)
        clean = self.denoised(y, m, s)
        epsilon = (y - m * clean) / s
        output = m * epsilon - s * clean if self.velocity else epsilon - self.straight * clean
        return output.reshape(y_t.shape).to(y_t.dtype)


class Gaussian(Exact):
    """y ~ N(mean, covariance), mean (D,)."""

    def __init__(self, mean: Tensor, covariance: Tensor, velocity: bool = False, straight: bool = False) -> None:
        super().__init__(velocity, straight)
        self.mean = mean.double()
        self.variances, self.axes = torch.linalg.eigh(covariance.double())

    def denoised(self, y: Tensor, m: Tensor, s: Tensor) -> Tensor:
        along = (y - m * self.mean) @ self.axes
        return self.mean + (along * m * self.variances / (m**2 * self.variances + s**2)) @ self.axes.T


class Mixture(Exact):
    """y ~ Σ_k weights_k N(centres_k, variance I), centres (K, D)."""

    def __init__(
        self, centres: Tensor, weights: Tensor, variance: float, velocity: bool = False, straight: bool = False
    ) -> None:
        super().__init__(velocity, straight)
        self.centres, self.weights, self.variance = centres.double(), weights.double(), variance

    def denoised(self, y: Tensor, m: Tensor, s: Tensor) -> Tensor:
        spread = m**2 * self.variance + s**2
        offsets = y[:, None] - m[..., None] * self.centres
        share = (self.weights.log() - offsets.square().sum(2) / (2 * spread)).softmax(1)[..., None]
        each = self.centres + (m * self.variance / spread)[..., None] * offsets
        return (share * each).sum(1)


def exact_diffusion(network: Exact, pixels: int) -> Diffusion:
    """A diffusion of images of `pixels` pixels in a row."""
    if network.straight:
        return Diffusion(network, (1, 1, pixels), prediction=Flow(), sde=Straight(), t_min=0.01)
    return Diffusion(network, (1, 1, pixels), prediction=Velocity() if network.velocity else Epsilon(), sde=VPSDE())
