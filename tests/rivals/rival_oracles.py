"""A Gaussian model and a linear rule, whose laws are known: x ~ N(μ, Σ) in data space, a·x = b.

Given the rule   x ~ N(μ + Σa (b − a·μ)/(aᵀΣa), Σ − Σa aᵀΣ/(aᵀΣa)).
"""

import numpy as np
import torch

from generative.oracles import Gaussian, exact_diffusion
from namm.constraints import constraint

NORMAL, LEVEL = np.array([1.0, -2.0, 0.5, 1.5]), 0.8
MEAN = np.array([0.3, -0.2, 0.1, 0.5])
MIXING = np.array([[1.0, 0.4, 0.0, 0.2], [0.0, 0.8, -0.3, 0.1], [0.0, 0.0, 0.9, 0.5], [0.0, 0.0, 0.0, 0.6]])
CORRELATED, INDEPENDENT = MIXING @ MIXING.T, 0.49 * np.eye(4)
SHIFT, SCALE = 0.4, 2.5  # of the standardisation


def model_of(covariance):
    """A diffusion whose samples are 2.5 y + 0.4, y ~ N(MEAN, covariance)."""
    model = exact_diffusion(Gaussian(torch.from_numpy(MEAN), torch.from_numpy(covariance)), 4)
    model.mean.fill_(SHIFT)
    model.scale.fill_(SCALE)
    return model


def law(covariance):
    """μ and Σ in data space."""
    return SCALE * MEAN + SHIFT, SCALE**2 * covariance


def given_rule(mean, covariance):
    """The law given a·x = b."""
    gain = covariance @ NORMAL / (NORMAL @ covariance @ NORMAL)
    return mean + gain * (LEVEL - NORMAL @ mean), covariance - np.outer(gain, NORMAL @ covariance)


def excess(x):
    return (x.double().flatten(1) @ torch.from_numpy(NORMAL) - LEVEL).to(x.dtype)


def onto(x):
    """The nearest image with a·x = b."""
    share = excess(x.double()) / float(NORMAL @ NORMAL)
    return (x.double().flatten(1) - share[:, None] * torch.from_numpy(NORMAL)).reshape(x.shape).to(x.dtype)


ALONE = constraint(lambda x: excess(x).abs(), name="plane")
PLANE = constraint(lambda x: excess(x).abs(), residual=lambda x: excess(x)[:, None], project=onto, name="plane")
ROUNDING = 2e-6  # of a·x in float32 for |x| of about 5


def assert_law(x, mean, covariance):
    """Mean and covariance of samples (N, 1, 1, 4), to within five standard errors and a per cent."""
    x, n = x.flatten(1).double().numpy(), len(x)
    spread = np.sqrt(np.diag(covariance))
    assert (np.abs(x.mean(0) - mean) <= 5 * spread / np.sqrt(n) + 0.01 * spread + 1e-6).all()
    allowed = (5 * np.sqrt(2 / n) + 0.02) * np.outer(spread, spread) + 1e-6
    assert (np.abs(np.cov(x.T) - covariance) <= allowed).all()
