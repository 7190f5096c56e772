"""Generative models on mirror images: diffusion (`Diffusion`, `NCSNpp`), and its samples mapped back (`Mirrored`)."""

from namm.generative.base import GenerativeModel
from namm.generative.diffusion import DiffusersNetwork, Diffusion
from namm.generative.mirrored import Mirrored
from namm.generative.ncsnpp import NCSNpp
from namm.generative.samplers import DDIM, Ancestral, DPMSolver, EulerMaruyama, UniPC
from namm.generative.vpsde import VPSDE, Epsilon, Velocity

__all__ = [
    "DDIM",
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
