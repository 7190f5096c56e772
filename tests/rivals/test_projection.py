"""Projection of finished samples: the projected law, and a rule that knows the nearest image alone."""

import numpy as np
from rival_oracles import CORRELATED, LEVEL, NORMAL, PLANE, ROUNDING, assert_law, law, model_of, onto

from namm.constraints.base import Constraint
from namm.generative import DPMSolver
from namm.rivals import Projection


class NearestOnly(Constraint):
    """The plane, without a natural point."""

    def distance(self, x):
        return PLANE.distance(x)

    def nearest(self, x, scale):
        return onto(x)


def test_samples_have_the_projected_law():
    across = np.eye(4) - np.outer(NORMAL, NORMAL) / (NORMAL @ NORMAL)
    mean, covariance = law(CORRELATED)
    for rule in (PLANE, NearestOnly()):
        x = Projection().sample(model_of(CORRELATED), rule, 8000, sampler=DPMSolver(25), generator=0, batch_size=4000)
        assert_law(x, across @ mean + LEVEL * NORMAL / (NORMAL @ NORMAL), across @ covariance @ across)
        assert rule(x).max() < ROUNDING
