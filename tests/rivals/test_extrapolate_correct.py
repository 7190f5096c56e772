"""ECI: the closed-form law of independent pixels, how often the network is asked, kept noise, exactness."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from rival_oracles import INDEPENDENT, LEVEL, MEAN, NORMAL, PLANE, ROUNDING, SCALE, SHIFT, assert_law, model_of

from generative.oracles import marginals
from namm.constraints import Periodic, constraint
from namm.errors import UsageError
from namm.generative import DPMSolver
from namm.generative.base import SampleNoise
from namm.generative.samplers import even_in_noise
from namm.rivals import ExtrapolateCorrect
from namm.rivals.extrapolate_correct import KeptNoise


@pytest.mark.parametrize("method", [ExtrapolateCorrect(), ExtrapolateCorrect(2, 1), ExtrapolateCorrect(2, 0)])
def test_independent_pixels_follow_the_interpolation(method):
    """Along the plane y' = m' (μ + g (y − m μ)) + s' z; D is on it from the first step on."""
    steps, v = 10, INDEPENDENT[0, 0]
    times = even_in_noise(model_of(INDEPENDENT), steps // method.mixing)
    of_noise, fresh = (1.0, 0.0) if method.resample == 0 else (0.0, 1.0)
    mean, first = 0.0, True
    for t, following in pairwise(times):
        for to in [t] * (method.mixing - 1) + [following]:
            (m, s), (m_to, s_to) = (np.concatenate(marginals(each[None])).flatten() for each in (t, to))
            gain = m * v / (m**2 * v + s**2)
            offset = (0.0 - m) if first else mean  # of the mean from m μ, in units of μ
            mean, first = m_to * gain * offset, False
            of_noise = m_to * gain * of_noise + (s_to if method.resample == 0 else 0.0)
            fresh = (m_to * gain) ** 2 * fresh + (s_to**2 if method.resample else 0.0)
    across = np.eye(4) - np.outer(NORMAL, NORMAL) / (NORMAL @ NORMAL)
    foot = (LEVEL - SHIFT * NORMAL.sum()) / SCALE * NORMAL / (NORMAL @ NORMAL)
    x = method.sample(model_of(INDEPENDENT), PLANE, 8000, sampler=DPMSolver(steps), generator=0, batch_size=4000)
    assert_law(x, SCALE * (across @ MEAN * (1 + mean) + foot) + SHIFT, SCALE**2 * (of_noise**2 + fresh) * across)
    assert PLANE(x).max() < ROUNDING


@pytest.mark.parametrize(("mixing", "evaluations"), [(1, 12), (3, 12), (5, 10)])
def test_the_network_is_asked_as_often_as_mixing_divides_the_steps(mixing, evaluations, monkeypatch):
    model, calls = model_of(INDEPENDENT), []
    plain = model.denoise
    monkeypatch.setattr(model, "denoise", lambda y, t: calls.append(float(t[0])) or plain(y, t))
    ExtrapolateCorrect(mixing).sample(model, PLANE, 2, sampler=DPMSolver(12), generator=0)
    assert len(calls) == evaluations
    assert len(set(calls)) == 12 // mixing


def test_noise_is_kept_for_so_many_steps():
    noise = SampleNoise(0, 3, 7, (1, 1, 4), torch.zeros(1))
    kept = KeptNoise(noise, every=3)
    assert [next(j for j in range(8) if torch.equal(kept(k), noise(j))) for k in range(8)] == [0, 0, 0, 3, 3, 3, 6, 6]


def test_a_rule_of_the_package_holds_exactly():
    rule = Periodic((1, 2))
    x = ExtrapolateCorrect().sample(model_of(INDEPENDENT), rule, 20, sampler=DPMSolver(5), generator=0)
    assert rule(x).max() == 0


def test_a_curved_rule_is_refused():
    curved = constraint(lambda x: x.sum((1, 2, 3)).abs(), project=lambda x: x.clamp(min=0), name="curved")
    with pytest.raises(UsageError, match=r"curved: it needs a linear projection. Choose ProjectedSteps"):
        ExtrapolateCorrect().sample(model_of(INDEPENDENT), curved, 2)


def test_too_few_steps_for_the_mixing_are_refused():
    with pytest.raises(UsageError, match="mixing=5 a sampler of 10 steps or more, not of 3"):
        ExtrapolateCorrect(mixing=5).sample(model_of(INDEPENDENT), PLANE, 2, sampler=DPMSolver(3))
