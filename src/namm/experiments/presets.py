"""The experiments by name, and their presets.

An experiment is one file that declares an `EXPERIMENT`, and one line here; one of another package is added by
`register`. Files are imported when their experiment is asked for.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

from namm.errors import UsageError
from namm.experiments.engine.experiment import Experiment, Reported
from namm.experiments.engine.settings import Settings

PRESETS = {
    "demo": "minutes on two CPU cores",
    "gpu": "minutes on one modern GPU",
    "paper": "the paper's sizes and epochs",
}

EXPERIMENTS: dict[str, str | Experiment] = {
    "flux": "namm.experiments.flux",
    "burgers": "namm.experiments.burgers",
    "divergence": "namm.experiments.divergence",
    "periodic": "namm.experiments.periodic",
    "count": "namm.experiments.count",
    "darcy": "namm.experiments.darcy",
}
"""The module of each experiment, or the experiment itself."""

OWN = "own"
"""The experiment with the user's own images and rule, which has no name on the command line."""


@dataclass(frozen=True)
class Preset:
    """An experiment's name, the name of the preset, its settings, and what the paper reports for it."""

    experiment: str
    name: str
    settings: Settings
    reported: Reported


def register(experiment: Experiment) -> None:
    """Add an experiment, for this process; a name that another one has is refused."""
    if experiment.name == OWN or EXPERIMENTS.get(experiment.name, experiment) != experiment:
        raise UsageError(f"there is an experiment {experiment.name!r} already: choose another name.")
    EXPERIMENTS[experiment.name] = experiment


def find(name: str) -> Experiment:
    """The experiment of that name; a misspelt name is answered with the nearest."""
    require_name(name, (*EXPERIMENTS, OWN), "experiment")
    entry = EXPERIMENTS.get(name, "namm.experiments.own")
    experiment: Experiment = import_module(entry).EXPERIMENT if isinstance(entry, str) else entry
    return experiment


def preset(experiment: str, name: str = "demo") -> Preset:
    """The preset of that name; a misspelt name is answered with the nearest."""
    declared = find(experiment)
    require_name(name, declared.presets, "preset")
    return Preset(experiment, name, declared.presets[name], declared.reported)


def require_name(name: str, known: Collection[str], kind: str, where: str = "") -> str:
    """`name` if it is one of `known`, else a `UsageError` that suggests one."""
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
    raise UsageError(f"there is no {kind} {name!r}{where}. {hint}")
