"""Generative models that obey a rule.

Bring images and a differentiable distance ℓ(x) ≥ 0 that is zero where the rule holds; learn a mirror map g and its
inverse f; train any generative model on g(x); its samples, mapped back by f, keep the rule.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namm._version import __version__

if TYPE_CHECKING:
    from namm.constraints import Burgers as Burgers
    from namm.constraints import Constraint as Constraint
    from namm.constraints import Count as Count
    from namm.constraints import Darcy as Darcy
    from namm.constraints import DivergenceFree as DivergenceFree
    from namm.constraints import Periodic as Periodic
    from namm.constraints import TotalFlux as TotalFlux
    from namm.constraints import constraint as constraint
    from namm.constraints import split_number as split_number
    from namm.constraints import with_number as with_number
    from namm.evaluation.verdict import Verdict as Verdict
    from namm.evaluation.verdict import judge as judge
    from namm.exact import Certificate as Certificate
    from namm.exact import certify as certify
    from namm.exact import polish as polish
    from namm.experiments.engine.run_parts import Run as Run
    from namm.generative import VAE as VAE
    from namm.generative import Consistency as Consistency
    from namm.generative import Diffusion as Diffusion
    from namm.generative import Mirrored as Mirrored
    from namm.generative.repair import repair as repair
    from namm.inverse import sample_posterior as sample_posterior
    from namm.maps import IdentityMap as IdentityMap
    from namm.maps import MirrorMap as MirrorMap
    from namm.pipeline import NAMMPipeline as NAMMPipeline
    from namm.report.figures.show import show as show
    from namm.training.objectives import ModelErrors as ModelErrors
    from namm.training.objectives import UniformNoise as UniformNoise
    from namm.training.objectives import Weights as Weights
    from namm.training.settings import TrainSettings as TrainSettings
    from namm.training.train_map import finetune_map as finetune_map
    from namm.training.train_map import train_map as train_map
    from namm.training.train_model import train_model as train_model

_EXPORTS = {
    "namm.constraints": "Burgers Constraint Count Darcy DivergenceFree Periodic TotalFlux "
    "constraint split_number with_number",
    "namm.evaluation.verdict": "Verdict judge",
    "namm.exact": "Certificate certify polish",
    "namm.experiments.engine.run_parts": "Run",
    "namm.generative": "VAE Consistency Diffusion Mirrored",
    "namm.generative.repair": "repair",
    "namm.inverse": "sample_posterior",
    "namm.maps": "IdentityMap MirrorMap",
    "namm.pipeline": "NAMMPipeline",
    "namm.report.figures.show": "show",
    "namm.training.objectives": "ModelErrors UniformNoise Weights",
    "namm.training.settings": "TrainSettings",
    "namm.training.train_map": "finetune_map train_map",
    "namm.training.train_model": "train_model",
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = ["__version__"]
__all__ += list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that the command line starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'namm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
