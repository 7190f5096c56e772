"""From settings to objects: the one place where a name is turned into the thing it names."""

from typing import Any

import torch

from namm.constraints import Constraint, Periodic, TotalFlux
from namm.constraints.burgers import Burgers
from namm.datasets import BurgersTrajectories, Dataset, UnitCells
from namm.errors import UsageError
from namm.experiments.data_settings import (
    BurgersData,
    BurgersRule,
    Data,
    FluxRule,
    PeriodicData,
    PeriodicRule,
    Rule,
)
from namm.experiments.plain import plain
from namm.experiments.settings import MapSettings, Settings, WeightSettings
from namm.maps import ICNN, MirrorMap, ResNet
from namm.numerics import fold
from namm.simulators.burgers import Step, crank_nicolson, euler
from namm.training.objectives import (
    FixedNoise,
    NoiseLevel,
    Regulariser,
    UniformNoise,
    Weights,
    gradient_regulariser,
    identity_regulariser,
)

DATASETS: dict[type[Data], type[Dataset]] = {BurgersData: BurgersTrajectories, PeriodicData: UnitCells}
STEPS: dict[str, Step] = {"crank-nicolson": crank_nicolson, "euler": euler}
NOISES: dict[str, type[UniformNoise] | type[FixedNoise]] = {"uniform": UniformNoise, "fixed": FixedNoise}
REGULARISERS: dict[str, Regulariser] = {"gradient": gradient_regulariser, "identity": identity_regulariser}


def dataset(data: Data) -> Dataset:
    """The recipe that draws the images."""
    if type(data) not in DATASETS:
        known = ", ".join(_short(kind) for kind in DATASETS)
        raise UsageError(f"this version cannot draw the data of {_short(type(data))!r} yet; it can draw {known}.")
    return DATASETS[type(data)](**data.recipe)


def constraint(rule: Rule) -> Constraint:
    """ℓ."""
    match rule:
        case FluxRule():
            return TotalFlux(rule.total)
        case PeriodicRule():
            return Periodic((rule.tiles, rule.across or rule.tiles))
        case BurgersRule():
            return Burgers(**plain(rule) | {"step": STEPS[rule.step]})
    raise UsageError(
        f"this version does not have the rule of {_short(type(rule))!r} yet; it has flux, burgers, periodic."
    )


def mirror(settings: MapSettings, channels: int) -> MirrorMap:
    """g and f with their first weights, which depend on the training's seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(settings.train.seed, "init"))
        return MirrorMap(ICNN(channels, **plain(settings.g)), ResNet(channels, **plain(settings.f)))


def noise(settings: MapSettings) -> NoiseLevel:
    """How far from g(x) f is trained."""
    return NOISES[settings.noise](settings.sigma_max)


def weights(settings: WeightSettings) -> Weights:
    """Weights of the terms of Eq. 1."""
    return Weights(**plain(settings))


def regulariser(settings: MapSettings) -> Regulariser:
    """What keeps g close to the identity."""
    return REGULARISERS[settings.regulariser]


def check(settings: Settings) -> None:
    """Refuse settings that do not fit together, by sending one empty image through everything they describe."""
    images = dataset(settings.data)
    rule = constraint(settings.data.rule)
    maps = mirror(settings.map, images.shape[0])
    with torch.no_grad():
        rule(maps.to_data(maps.to_mirror(torch.zeros(1, *images.shape))))


def _short(kind: type[Any]) -> str:
    """The experiment that a class of settings is of."""
    return kind.__name__.removesuffix("Data").removesuffix("Rule").lower()
