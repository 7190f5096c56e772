"""Generative models that obey a rule.

Bring images and a differentiable distance ℓ(x) ≥ 0 that is zero where the rule holds; learn a mirror map g and its
inverse f; train any generative model on g(x); its samples, mapped back by f, keep the rule.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namm._version import __version__

if TYPE_CHECKING:
    from namm.constraints import (
        Burgers,
        Constraint,
        Count,
        DivergenceFree,
        Periodic,
        TotalFlux,
        constraint,
        split_number,
        with_number,
    )
    from namm.evaluation.verdict import Verdict, judge
    from namm.experiments.engine.run_parts import Run
    from namm.generative import VAE, Diffusion, Mirrored
    from namm.inverse import sample_posterior
    from namm.maps import IdentityMap, MirrorMap
    from namm.pipeline import NAMMPipeline
    from namm.training.objectives import ModelErrors, UniformNoise, Weights
    from namm.training.settings import TrainSettings
    from namm.training.train_map import finetune_map, train_map
    from namm.training.train_model import train_model

_EXPORTS = {
    "namm.constraints": [
        "Burgers",
        "Constraint",
        "Count",
        "DivergenceFree",
        "Periodic",
        "TotalFlux",
        "constraint",
        "split_number",
        "with_number",
    ],
    "namm.evaluation.verdict": ["Verdict", "judge"],
    "namm.experiments.engine.run_parts": ["Run"],
    "namm.generative": ["VAE", "Diffusion", "Mirrored"],
    "namm.inverse": ["sample_posterior"],
    "namm.maps": ["IdentityMap", "MirrorMap"],
    "namm.pipeline": ["NAMMPipeline"],
    "namm.training.objectives": ["ModelErrors", "UniformNoise", "Weights"],
    "namm.training.settings": ["TrainSettings"],
    "namm.training.train_map": ["finetune_map", "train_map"],
    "namm.training.train_model": ["train_model"],
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "VAE",
    "Burgers",
    "Constraint",
    "Count",
    "Diffusion",
    "DivergenceFree",
    "IdentityMap",
    "MirrorMap",
    "Mirrored",
    "ModelErrors",
    "NAMMPipeline",
    "Periodic",
    "Run",
    "TotalFlux",
    "TrainSettings",
    "UniformNoise",
    "Verdict",
    "Weights",
    "__version__",
    "constraint",
    "finetune_map",
    "judge",
    "sample_posterior",
    "split_number",
    "train_map",
    "train_model",
    "with_number",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that the command line starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'namm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
