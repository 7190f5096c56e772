"""Posterior sampling under a learned rule: images that agree with a measurement and obey the rule."""

from namm.generative.samplers import OfficialSteps, Step, Steps
from namm.inverse.coverage import coverage
from namm.inverse.guidance import DPSGuidance, Evidence, Guess, Guidance, LikelihoodGuidance
from namm.inverse.noise import GaussianNoise
from namm.inverse.operators import Columns, Downsample, GaussianBlur, Linear, Mask, Operator, States, operator
from namm.inverse.polishing import observed_scale, polish_posterior
from namm.inverse.posterior import (
    AncestralSteps,
    DDIMSteps,
    DiffusionPrior,
    Posterior,
    guided_step,
    reverse,
    sample_posterior,
)

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
    "observed_scale",
    "operator",
    "polish_posterior",
    "reverse",
    "sample_posterior",
]
