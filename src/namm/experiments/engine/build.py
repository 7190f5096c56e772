"""From settings to objects: the one place where a name is turned into the thing it names.

The rule of a run is made here too, by `rule_of`, and put where models run: its weights and buffers are where trainings
and samples are, and one that the run itself learned (the network that counts) is found in its stage `data`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from namm.constraints import Constraint, Count, Counter, DivergenceFree, Periodic, TotalFlux
from namm.constraints.burgers import Burgers
from namm.datasets import BlackHoles, BurgersTrajectories, Dataset, Galaxies, KolmogorovFlow, UnitCells
from namm.errors import UsageError
from namm.experiments import own
from namm.experiments.data_settings import (
    BurgersData,
    BurgersRule,
    CountData,
    CountRule,
    Data,
    DivergenceData,
    DivergenceRule,
    FluxData,
    FluxRule,
    OwnData,
    OwnRule,
    PeriodicData,
    PeriodicRule,
    Rule,
)
from namm.experiments.engine.settings import (
    DiffusionSettings,
    MapSettings,
    NetworkSettings,
    SamplerSettings,
    Settings,
    VAESettings,
    WeightSettings,
)
from namm.experiments.engine.settings_file import plain
from namm.generative import (
    DDIM,
    VAE,
    VPSDE,
    Ancestral,
    Diffusion,
    DPMSolver,
    Epsilon,
    EulerMaruyama,
    NCSNpp,
    UniPC,
    Velocity,
)
from namm.generative.samplers import Sampler
from namm.generative.schedules import Prediction
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

DATASETS: dict[type[Data], type[Dataset]] = {
    BurgersData: BurgersTrajectories,
    PeriodicData: UnitCells,
    DivergenceData: KolmogorovFlow,
    CountData: Galaxies,
    FluxData: BlackHoles,
}
STEPS: dict[str, Step] = {"crank-nicolson": crank_nicolson, "euler": euler}
NOISES: dict[str, type[UniformNoise] | type[FixedNoise]] = {"uniform": UniformNoise, "fixed": FixedNoise}
REGULARISERS: dict[str, Regulariser] = {"gradient": gradient_regulariser, "identity": identity_regulariser}
PREDICTIONS: dict[str, Prediction] = {"epsilon": Epsilon(), "v": Velocity()}
SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "euler-maruyama": EulerMaruyama,
    "ancestral": Ancestral,
    "ddim": DDIM,
    "dpm-solver": DPMSolver,
    "sde-dpm-solver": partial(DPMSolver, stochastic=True),
    "unipc": UniPC,
}

COUNTER = "counter.safetensors"
"""In the stage `data`: the network that counts, where the run has trained its own."""


def device() -> torch.device:
    """Where models run. Under torchrun the first call is for all processes together: they meet in it."""
    found: torch.device = PartialState(cpu=not torch.cuda.is_available()).device
    return found


def dataset(data: Data) -> Dataset:
    """The recipe that draws the images."""
    if isinstance(data, OwnData):
        return own.images(data)
    if type(data) not in DATASETS:
        known = ", ".join(_short(kind) for kind in DATASETS)
        raise UsageError(f"this version cannot draw the data of {_short(type(data))!r} yet; it can draw {known}.")
    return DATASETS[type(data)](**data.recipe)


def rule_of(data: Data, folder: Callable[[str], Path], where: torch.device | str | None = None) -> Constraint:
    """ℓ of a run: the rule that `data` obey, frozen, where models run.

    Args:
        data: Settings of the run's data.
        folder: Gives the folder of a stage by its name; asked for `data` alone, and only by a rule that lies there.
        where: Another device.
    """
    rule = data.rule
    if isinstance(rule, CountRule) and not rule.counter:
        rule = replace(rule, counter=str(folder("data") / COUNTER))
    return placed(constraint(rule), where)


def placed(rule: Constraint, where: torch.device | str | None = None) -> Constraint:
    """The rule itself, in evaluation mode and without gradients of its weights, where models run or elsewhere."""
    return rule.eval().requires_grad_(False).to(device() if where is None else where)


def constraint(rule: Rule) -> Constraint:
    """ℓ by itself, where it was made; the rule of a run is `rule_of`."""
    match rule:
        case FluxRule():
            return TotalFlux(rule.total)
        case DivergenceRule():
            return DivergenceFree(**plain(rule))
        case PeriodicRule():
            return Periodic((rule.tiles, rule.across or rule.tiles))
        case CountRule():
            return Count(_counter(rule), rule.count)
        case BurgersRule():
            return Burgers(**plain(rule) | {"step": STEPS[rule.step]})
        case OwnRule():
            return own.known_rule(rule)
    raise UsageError(
        f"this version does not have the rule of {_short(type(rule))!r} yet; "
        "it has flux, burgers, divergence, periodic, count."
    )


def _counter(rule: CountRule) -> Counter:
    if not rule.counter:
        raise UsageError(
            "the rule 'count' needs a network that counts: `namm run count` trains one and keeps it as "
            f"data/{COUNTER} in its folder, `namm train counter -o {COUNTER}` trains one alone. Pass the file as "
            "--counter FILE (to `namm run` and `namm sweep`, --data.counter FILE)."
        )
    return Counter.load(rule.counter)


def mirror(settings: MapSettings, channels: int) -> MirrorMap:
    """g and f with their first weights, which depend on the training's seed alone."""
    with _seeded(settings.train.seed):
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


def diffusion(
    network: NetworkSettings, process: DiffusionSettings, shape: tuple[int, int, int], seed: int
) -> Diffusion:
    """The score model of images of `shape`, with its first weights."""
    with _seeded(seed):
        return Diffusion(
            NCSNpp(shape[0], shape[1], **plain(network)),
            shape,
            prediction=PREDICTIONS[process.prediction],
            t_min=process.t_min,
            sde=VPSDE(process.beta_min, process.beta_max),
        )


def vae(settings: VAESettings, shape: tuple[int, int, int]) -> VAE:
    """The autoencoder of images of `shape`, with its first weights."""
    with _seeded(settings.train.seed):
        return VAE(shape, settings.latent, settings.features, settings.beta)


def sampler(settings: SamplerSettings) -> Sampler:
    """How a diffusion model is run backwards."""
    return SAMPLERS[settings.method](settings.steps)


def sampling(settings: SamplerSettings) -> dict[str, Any]:
    """The options of `write_samples` that say so."""
    return {"sampler": sampler(settings), "compile": settings.compile}


def check(settings: Settings) -> None:
    """Refuse settings that do not fit together, by sending one empty image through everything they describe.

    All of it on the CPU: the main process does this alone, and to ask for the `device` is for all together.
    """
    images, data = dataset(settings.data), settings.data
    rule = placed(_rule_to_try(data), "cpu")
    maps = mirror(settings.map, images.shape[0])
    model = diffusion(settings.mdm.network, settings.mdm.diffusion, images.shape, settings.mdm.train.seed)
    with torch.no_grad():
        y = maps.to_mirror(torch.zeros(1, *images.shape))
        x = maps.to_data(y)
        with own.blamed_on(data.constraint) if isinstance(data, OwnData) else nullcontext():
            rule(x)
        model.loss(y)


def _rule_to_try(data: Data) -> Constraint:
    """ℓ before the run has begun: a counter that is yet to be trained has its first weights.

    Refused where the images to train it on cannot be drawn.
    """
    if not isinstance(data, CountData) or data.counter:
        return constraint(data.rule)
    for label in data.labels:
        dataset(replace(data, count=label))
    return Count(Counter(data.size), data.count)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's own generator set for the weights of a training, and put back after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "init"))
        yield


def _short(kind: type[Any]) -> str:
    """The experiment that a class of settings is of."""
    return kind.__name__.removesuffix("Data").removesuffix("Rule").lower()
