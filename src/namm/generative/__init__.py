"""Generative models on mirror images, `Diffusion`, `Consistency` and `VAE`, and samples mapped back (`Mirrored`).

Networks of a `Diffusion`: `NCSNpp`, `DiT` and `UNet`.
"""

from namm.generative.base import GenerativeModel
from namm.generative.consistency import Consistency
from namm.generative.diffusion import DiffusersNetwork, Diffusion
from namm.generative.mirrored import Mirrored
from namm.generative.networks.dit import DiT
from namm.generative.networks.ncsnpp.network import NCSNpp
from namm.generative.networks.unet import UNet
from namm.generative.samplers import DDIM, Ancestral, DPMSolver, EulerMaruyama, UniPC
from namm.generative.schedules import VPSDE, Epsilon, Flow, Schedule, Straight, Velocity
from namm.generative.times import LogitNormalTimes, UniformTimes
from namm.generative.vae import VAE

__all__ = [
    "DDIM",
    "VAE",
    "VPSDE",
    "Ancestral",
    "Consistency",
    "DPMSolver",
    "DiT",
    "DiffusersNetwork",
    "Diffusion",
    "Epsilon",
    "EulerMaruyama",
    "Flow",
    "GenerativeModel",
    "LogitNormalTimes",
    "Mirrored",
    "NCSNpp",
    "Schedule",
    "Straight",
    "UNet",
    "UniPC",
    "UniformTimes",
    "Velocity",
]
