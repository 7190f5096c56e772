"""Rejection keeps the smallest of all distances, in the order in which their samples were drawn."""

import numpy as np
import torch
from rival_oracles import ALONE, CORRELATED, LEVEL, NORMAL, law, model_of
from scipy import stats

from namm.generative import DPMSolver
from namm.rivals import Rejection

FEW = DPMSolver(5)


def test_the_smallest_of_all_that_were_drawn_are_kept():
    model = model_of(CORRELATED)
    drawn = model.sample(120, sampler=FEW, generator=7, progress=False)
    kept = Rejection(3).sample(model, ALONE, 40, sampler=FEW, generator=7)
    distances = np.abs(drawn.flatten(1).double().numpy() @ NORMAL - LEVEL)
    expected = np.sort(np.argsort(distances)[:40])
    assert torch.equal(kept, drawn[expected])


def test_distances_have_the_law_below_their_quantile():
    """a·x is Gaussian, so that ℓ of what is kept has a known distribution."""
    kept = Rejection(4).sample(model_of(CORRELATED), ALONE, 2000, sampler=DPMSolver(25), generator=0, batch_size=4000)
    mean, covariance = law(CORRELATED)
    value = stats.norm(NORMAL @ mean, np.sqrt(NORMAL @ covariance @ NORMAL))
    below = lambda d: value.cdf(LEVEL + d) - value.cdf(LEVEL - d)  # noqa: E731
    shares = 4 * below(ALONE(kept).double().numpy())
    assert stats.kstest(shares, "uniform").pvalue > 1e-3


def test_the_next_samples_are_others():
    model = model_of(CORRELATED)
    first, second = (Rejection(2).sample(model, ALONE, 32, first=k, sampler=FEW, generator=7) for k in (0, 32))
    drawn = model.sample(128, sampler=FEW, generator=7, progress=False).flatten(1)
    assert (first.flatten(1)[:, None] == drawn[:64]).all(2).any(1).all()
    assert (second.flatten(1)[:, None] == drawn[64:]).all(2).any(1).all()
