"""Generative models that obey a rule.

Bring images and a differentiable distance ℓ(x) ≥ 0 that is zero where the rule holds; learn a mirror map g and its
inverse f; train any generative model on g(x); its samples, mapped back by f, keep the rule.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namm._version import __version__

if TYPE_CHECKING:
    from namm.constraints import Burgers, Constraint, Count, DivergenceFree, Periodic, TotalFlux, constraint
    from namm.evaluation.verdict import Verdict, judge
    from namm.experiments.engine.run_handle import Run
    from namm.generative import VAE, Diffusion, Mirrored
    from namm.inverse import sample_posterior
    from namm.maps import IdentityMap, MirrorMap
    from namm.pipeline import NAMMPipeline
    from namm.training.objectives import Weights
    from namm.training.settings import TrainSettings
    from namm.training.train_map import finetune_map, train_map
    from namm.training.train_model import train_model

_HOMES = {
    "Burgers": "namm.constraints",
    "Constraint": "namm.constraints",
    "Count": "namm.constraints",
    "Diffusion": "namm.generative",
    "DivergenceFree": "namm.constraints",
    "IdentityMap": "namm.maps",
    "MirrorMap": "namm.maps",
    "Mirrored": "namm.generative",
    "NAMMPipeline": "namm.pipeline",
    "Periodic": "namm.constraints",
    "Run": "namm.experiments.engine.run_handle",
    "TotalFlux": "namm.constraints",
    "TrainSettings": "namm.training.settings",
    "VAE": "namm.generative",
    "Verdict": "namm.evaluation.verdict",
    "Weights": "namm.training.objectives",
    "constraint": "namm.constraints",
    "finetune_map": "namm.training.train_map",
    "judge": "namm.evaluation.verdict",
    "sample_posterior": "namm.inverse",
    "train_map": "namm.training.train_map",
    "train_model": "namm.training.train_model",
}

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
    "NAMMPipeline",
    "Periodic",
    "Run",
    "TotalFlux",
    "TrainSettings",
    "Verdict",
    "Weights",
    "__version__",
    "constraint",
    "finetune_map",
    "judge",
    "sample_posterior",
    "train_map",
    "train_model",
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
