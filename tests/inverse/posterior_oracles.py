"""Posteriors known in closed form: Gaussian priors, linear maps and operators, Gaussian noise; all in float64.

Prior x ~ N(μ, S) over images of D pixels in a row, m = A x + n, n ~ N(0, Γ). The diffusion sees u = G⁻¹(x − b), G and b
being the mirror map after the unstandardisation, so u ~ N(G⁻¹(μ − b), G⁻¹ S G⁻ᵀ).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from namm.constraints import constraint
from namm.generative import VPSDE, Diffusion, Mirrored, Straight, Velocity
from namm.inverse import DDIMSteps, Evidence, GaussianNoise, Guess, Linear, Posterior, sample_posterior
from namm.inverse.guidance import gradient
from namm.maps import IdentityMap

PIXELS = 3
MEAN = np.array([0.5, -1.0, 0.3])
COVARIANCE = np.array([[1.0, 0.6, 0.2], [0.6, 0.8, 0.3], [0.2, 0.3, 0.5]])
MATRIX = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, -0.5]])
NOISE = np.array([[0.09, 0.02], [0.02, 0.16]])
MEASUREMENT = np.array([1.2, -0.4])
MAP, OFFSET = np.array([[1.3, 0.4, 0.0], [-0.2, 0.8, 0.3], [0.1, 0.0, 1.1]]), np.array([0.2, -0.1, 0.4])
STANDARD = 0.3, 1.7  # mean and scale of the standardisation


def posterior(measurement: np.ndarray = MEASUREMENT) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of x given m."""
    gain = COVARIANCE @ MATRIX.T @ np.linalg.inv(MATRIX @ COVARIANCE @ MATRIX.T + NOISE)
    return MEAN + gain @ (measurement - MATRIX @ MEAN), COVARIANCE - gain @ MATRIX @ COVARIANCE


class LinearMirror(nn.Module):
    """f(y) = F y + b."""

    def to_mirror(self, x: Tensor) -> Tensor:
        return ((x.flatten(1) - torch.tensor(OFFSET)) @ torch.tensor(MAP).inverse().T).reshape(x.shape)

    def to_data(self, y: Tensor) -> Tensor:
        return (y.flatten(1) @ torch.tensor(MAP).T + torch.tensor(OFFSET)).reshape(y.shape)


class GaussianScore(nn.Module):
    """E[ε | u(t)] for u ~ N(mean, covariance), with marginals of its own."""

    def __init__(self, mean: np.ndarray, covariance: np.ndarray, straight: bool = False) -> None:
        super().__init__()
        self.straight = straight
        self.mean, self.covariance = torch.tensor(mean), torch.tensor(covariance)

    def forward(self, u_t: Tensor, t: Tensor) -> Tensor:
        m, s = marginal(float(t[0]), self.straight)
        spread = m**2 * self.covariance + s**2 * torch.eye(len(self.mean), dtype=torch.double)
        return (s * torch.linalg.solve(spread, (u_t.flatten(1) - m * self.mean).T).T).reshape(u_t.shape)


def marginal(t: float, straight: bool = False) -> tuple[float, float]:
    if straight:
        return 1 - t, t
    exponent = 0.1 * t + 9.95 * t**2
    return float(np.exp(-exponent / 2)), float(np.sqrt(1 - np.exp(-exponent)))


@dataclass(eq=False)
class ExactGuidance:
    """The true likelihood score: u(0) | u(t) ~ N(D, C), so m | u(t) ~ N(A(f(D)), (A G) C (A G)ᵀ + Γ)."""

    covariance: np.ndarray  # of u
    to_measurement: np.ndarray  # A G

    def shift(self, guess: Guess, evidence: Evidence) -> Tensor:
        m, s = guess.step.mean, guess.step.std
        spread = m**2 * self.covariance + s**2 * np.eye(len(self.covariance))
        left = self.covariance - m**2 * self.covariance @ np.linalg.solve(spread, self.covariance)
        precision = torch.tensor(np.linalg.inv(self.to_measurement @ left @ self.to_measurement.T + NOISE))
        residual = evidence.residual(guess.x)
        log_likelihood = -0.5 * ((residual @ precision) * residual).sum(1)
        return guess.step.score_factor * gradient(log_likelihood, guess.y_t)

    def smaller(self) -> "ExactGuidance":
        return self


def process(straight: bool) -> dict:
    """The options of a diffusion on straight paths or by the paper's schedule, down to the same noise."""
    return {"sde": Straight(), "t_min": 0.01} if straight else {"sde": VPSDE(), "t_min": 1e-3}


def problem(mirrored: bool, straight: bool = False) -> tuple[Mirrored, ExactGuidance]:
    """The same prior over x, as a diffusion in data space or in the mirror space of `LinearMirror`."""
    linear, offset = (MAP, OFFSET) if mirrored else (np.eye(PIXELS), np.zeros(PIXELS))
    mean, scale = STANDARD
    offset = offset + linear @ np.full(PIXELS, mean)
    back = np.linalg.inv(scale * linear)
    covariance = back @ COVARIANCE @ back.T
    network = GaussianScore(back @ (MEAN - offset), covariance, straight)
    model = Diffusion(network, (1, 1, PIXELS), **process(straight)).double()
    model.mean.fill_(mean)
    model.scale.fill_(scale)
    return Mirrored(model, LinearMirror() if mirrored else IdentityMap()), ExactGuidance(
        covariance, MATRIX @ (scale * linear)
    )


# What the tests of posterior sampling share

OPERATOR, GAUSSIAN = Linear(torch.tensor(MATRIX)), GaussianNoise(covariance=torch.tensor(NOISE))
SEEN = torch.tensor(MEASUREMENT)[None]


@constraint
def level(x: Tensor) -> Tensor:
    """How far the mean square is from 1."""
    return (x.square().mean((1, 2, 3)) - 1).abs()


def draw(prior: Mirrored, measurement: Tensor = SEEN, **options) -> Posterior:
    settings = {"n": 8, "steps": DDIMSteps(20), "generator": 0} | options
    return sample_posterior(prior, measurement, OPERATOR, GAUSSIAN, **settings)


class Bent(nn.Module):
    """A denoiser and a map that are not linear, nor deterministic in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, y_t: Tensor, t: Tensor) -> Tensor:
        return self.dropout(torch.sin(2 * y_t + t.reshape(-1, 1, 1, 1)))

    def to_data(self, y: Tensor) -> Tensor:
        return y + 0.5 * torch.tanh(y.flip(-1))

    def to_mirror(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def bent() -> Mirrored:
    model = Diffusion(Bent(), (1, 1, PIXELS), prediction=Velocity()).double()
    model.mean.fill_(0.4)
    model.scale.fill_(2.5)
    return Mirrored(model, Bent()).eval()
