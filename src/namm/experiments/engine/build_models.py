"""From settings to networks, models and what trains and samples them: each name is turned into the thing it names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from namm.datasets.batches import Images, to_tensor
from namm.experiments.engine.build import dataset, placed
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
from namm.experiments.engine.user_rule import blamed_on
from namm.generative import (
    DDIM,
    VAE,
    VPSDE,
    Ancestral,
    Diffusion,
    DiT,
    DPMSolver,
    Epsilon,
    EulerMaruyama,
    Flow,
    LogitNormalTimes,
    NCSNpp,
    Straight,
    UNet,
    UniformTimes,
    UniPC,
    Velocity,
)
from namm.generative.samplers import Sampler
from namm.generative.schedules import Prediction
from namm.generative.times import Times
from namm.maps import ICNN, MirrorMap, ResNet, RuleNet
from namm.numerics import fold
from namm.training.objectives import (
    FixedModelErrors,
    FixedNoise,
    ModelErrors,
    Noise,
    Regulariser,
    UniformNoise,
    Weights,
    gradient_regulariser,
    identity_regulariser,
)
from namm.training.tune import find_boundary, standardised

NOISES: dict[str, Callable[[float], Noise]] = {
    "uniform": UniformNoise,
    "fixed": FixedNoise,
    "model": ModelErrors,
    "model-fixed": FixedModelErrors,
}
REGULARISERS: dict[str, Regulariser] = {"gradient": gradient_regulariser, "identity": identity_regulariser}
PREDICTIONS: dict[str, Prediction] = {"epsilon": Epsilon(), "v": Velocity(), "flow": Flow()}
TIMES: dict[str, Times] = {"uniform": UniformTimes(), "logit-normal": LogitNormalTimes()}
SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "euler-maruyama": EulerMaruyama,
    "ancestral": Ancestral,
    "ddim": DDIM,
    "dpm-solver": DPMSolver,
    "sde-dpm-solver": partial(DPMSolver, stochastic=True),
    "unipc": UniPC,
}


RESNET = ("normalisation", "dropout", "downsamplings", "residual", "skip", "activation")
RULENET = ("modes", "templates", "hidden")
"""Settings of f that only one of its kinds has."""


def mirror(settings: MapSettings, data: Images) -> MirrorMap:
    """g and f for these images with their first weights, which depend on the training's seed alone."""
    channels, height, width = data.shape[1:]
    options = plain(settings.f)
    is_rulenet = options.pop("kind") == "rulenet"
    for name in RESNET if is_rulenet else RULENET:
        del options[name]
    if options["boundary"] == "auto":
        options["boundary"] = find_boundary(to_tensor(data[:256]))
    with _seeded(settings.train.seed):
        g = ICNN(channels, **plain(settings.g))
        f = RuleNet(channels, height, width, **options) if is_rulenet else ResNet(channels, **options)
    maps = MirrorMap(g, f)
    return standardised(maps, data) if settings.standardise else maps


def noise(kind: str, sigma_max: float) -> Noise:
    """How far from g(x) f is trained."""
    return NOISES[kind](sigma_max)


def weights(settings: WeightSettings, unit: float) -> Weights:
    """Weights of the terms of Eq. 1; `unit` is σ_max over ℓ of errors of σ_max."""
    constraint = settings.constraint * unit if settings.relative else settings.constraint
    return Weights(constraint, settings.cycle, settings.regulariser, settings.squared)


def regulariser(settings: MapSettings) -> Regulariser:
    """What keeps g close to the identity."""
    return REGULARISERS[settings.regulariser]


U_NET = ("multipliers", "blocks", "attention", "unshuffle")
DIT = ("width", "depth", "heads", "patch")
"""Settings of the score network that only some of its kinds have."""


def score_network(settings: NetworkSettings, shape: tuple[int, int, int]) -> NCSNpp | DiT | UNet:
    """The network of a score model of images of `shape`."""
    options = plain(settings)
    kind = options.pop("kind")
    for name in U_NET if kind == "dit" else DIT:
        del options[name]
    if kind == "dit":
        return DiT(shape[0], **options)
    return (UNet if kind == "unet" else NCSNpp)(shape[0], shape[1], **options)


def diffusion(
    network: NetworkSettings, process: DiffusionSettings, shape: tuple[int, int, int], seed: int
) -> Diffusion:
    """The score model of images of `shape`, with its first weights."""
    straight = process.schedule == "straight"
    with _seeded(seed):
        return Diffusion(
            score_network(network, shape),
            shape,
            prediction=PREDICTIONS[process.prediction],
            t_min=process.t_min,
            sde=Straight() if straight else VPSDE(process.beta_min, process.beta_max),
            times=TIMES[process.times],
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
    images, code = dataset(settings.data), settings.data.rule.named_code
    rule = placed(settings.data.rule_to_try(), "cpu")
    maps = mirror(settings.map, torch.zeros(2, *images.shape))
    model = diffusion(settings.mdm.network, settings.mdm.diffusion, images.shape, settings.mdm.train.seed)
    with torch.no_grad():
        y = maps.to_mirror(torch.zeros(1, *images.shape))
        x = maps.to_data(y)
        with blamed_on(code) if code else nullcontext():
            rule(x)
        model.loss(y)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's own generator set for the weights of a training, and put back after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "init"))
        yield
