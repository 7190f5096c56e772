"""Projected steps: the law given the rule where pixels are alike, another known one where not, and exactness."""

from itertools import pairwise

import numpy as np
import torch
from rival_oracles import (
    CORRELATED,
    INDEPENDENT,
    LEVEL,
    MEAN,
    NORMAL,
    PLANE,
    ROUNDING,
    SCALE,
    SHIFT,
    assert_law,
    given_rule,
    law,
    model_of,
    onto,
)

from generative.oracles import marginals
from namm.constraints import TotalFlux
from namm.generative import DDIM, DPMSolver
from namm.generative.samplers import even_in_noise
from namm.rivals import ProjectedSteps


def sample(covariance, method=ProjectedSteps(), n=8000, steps=25):  # noqa: B008
    return method.sample(model_of(covariance), PLANE, n, sampler=DPMSolver(steps), generator=0, batch_size=4000)


def test_independent_pixels_get_the_law_given_the_rule():
    x = sample(INDEPENDENT, steps=100)
    assert_law(x, *given_rule(*law(INDEPENDENT)))
    assert PLANE(x).max() < ROUNDING


def test_correlated_pixels_get_the_law_of_the_projected_chain():
    """Every step is affine with Gaussian noise: mean and covariance follow it, in NumPy and float64."""
    steps = 12
    times = even_in_noise(model_of(CORRELATED), steps)
    ms = np.concatenate([each.numpy() for each in marginals(times)], 1)
    across = np.eye(4) - np.outer(NORMAL, NORMAL) / (NORMAL @ NORMAL)
    foot = (LEVEL - SHIFT * NORMAL.sum()) / SCALE * NORMAL / (NORMAL @ NORMAL)  # nearest to 0, standardised
    mean, covariance = np.zeros(4), np.eye(4)
    for (m, s), (m_next, s_next) in pairwise(ms):
        gain = m * CORRELATED @ np.linalg.inv(m**2 * CORRELATED + s**2 * np.eye(4))
        forward = (
            1 - (m / m_next) ** 2 * (1 - s_next**2) / (1 - s**2) if s_next == 0 else s**2 - (m / m_next * s_next) ** 2
        )
        fresh = np.sqrt(forward) * s_next / s
        kept = np.sqrt(max(s_next**2 - fresh**2, 0)) / s
        matrix = (m_next - kept * m) * gain + kept * np.eye(4)
        offset = (m_next - kept * m) * (MEAN - m * gain @ MEAN)
        mean, covariance = matrix @ mean + offset, matrix @ covariance @ matrix.T + fresh**2 * np.eye(4)
        mean, covariance = across @ mean + m_next * foot, across @ covariance @ across
    x = sample(CORRELATED, steps=steps)
    assert_law(x, SCALE * mean + SHIFT, SCALE**2 * covariance)
    assert not np.allclose(SCALE**2 * covariance, given_rule(*law(CORRELATED))[1], atol=0.05)  # it is another law


def test_with_the_state_left_alone_only_the_end_is_projected():
    model = model_of(CORRELATED)
    plain = model.sample(6, sampler=DDIM(8, eta=1.0), generator=5, progress=False)
    x = ProjectedSteps(below=0.0).sample(model, PLANE, 6, sampler=DPMSolver(8), generator=5)
    torch.testing.assert_close(x, onto(plain))


def test_the_rules_own_nearest_image_is_exact():
    rule = TotalFlux(3.0)
    x = ProjectedSteps().sample(model_of(CORRELATED), rule, 20, sampler=DPMSolver(5), generator=0)
    assert rule(x).max() < ROUNDING
