"""Generative models on mirror images: `Diffusion` with its `NCSNpp`, `VAE`, and samples mapped back (`Mirrored`)."""

from namm.generative.base import GenerativeModel
from namm.generative.diffusion import DiffusersNetwork, Diffusion
from namm.generative.mirrored import Mirrored
from namm.generative.networks.ncsnpp.network import NCSNpp
from namm.generative.samplers import DDIM, Ancestral, DPMSolver, EulerMaruyama, UniPC
from namm.generative.schedules import VPSDE, Epsilon, Velocity
from namm.generative.vae import VAE

__all__ = [
    "DDIM",
    "VAE",
    "VPSDE",
    "Ancestral",
    "DPMSolver",
    "DiffusersNetwork",
    "Diffusion",
    "Epsilon",
    "EulerMaruyama",
    "GenerativeModel",
    "Mirrored",
    "NCSNpp",
    "UniPC",
    "Velocity",
]
