"""Posterior sampling under a learned rule: what was measured, and the images that may have been there."""

from namm.inverse.calibration import coverage
from namm.inverse.dps import sample_posterior
from namm.inverse.guidance import DPSGuidance, Evidence, Guess, Guidance
from namm.inverse.likelihood import LikelihoodGuidance
from namm.inverse.noise import GaussianNoise
from namm.inverse.operators import Columns, Downsample, GaussianBlur, Linear, Mask, Operator, States, operator
from namm.inverse.posterior import Posterior
from namm.inverse.reverse import DiffusionPrior, guided_step, reverse
from namm.inverse.steps import AncestralSteps, DDIMSteps, OfficialSteps, Step, Steps

__all__ = [
    "AncestralSteps",
    "Columns",
    "DDIMSteps",
    "DPSGuidance",
    "DiffusionPrior",
    "Downsample",
    "Evidence",
    "GaussianBlur",
    "GaussianNoise",
    "Guess",
    "Guidance",
    "LikelihoodGuidance",
    "Linear",
    "Mask",
    "OfficialSteps",
    "Operator",
    "Posterior",
    "States",
    "Step",
    "Steps",
    "coverage",
    "guided_step",
    "operator",
    "reverse",
    "sample_posterior",
]
