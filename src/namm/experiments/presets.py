"""The experiments with their numbers: three presets for each of the paper's five rules, and for one of the user's own.

`paper` has the paper's own numbers: Tables 3 and 4, and, where the text and the published results differ, what the
published results used (cycle terms 0.5 each, the gradient regulariser, 64 filters in f).

`gpu` (minutes on one modern GPU) and `demo` (minutes on two CPU cores) are ours. They are first choices, taken from
small trials: λ five times the paper's, f without instance norm, with a skip and without dropout, a cosine rate,
v-prediction. The demos of `periodic` (its map) and `burgers` (the whole run, `benchmarks/against_baseline.py`) and
`gpu` of `burgers` (the whole run, RESULTS.md) have been measured as they stand here, the others have not.

Milestones are as many as have one half-way through the training.

Every preset carries what the paper reports for its experiment. A distance ℓ is comparable with the paper's CD as
100·λ·ℓ with the *paper's* λ, whatever λ a preset trains with.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from namm.errors import UsageError
from namm.experiments.data_settings import (
    BurgersData,
    CountData,
    CounterTraining,
    Data,
    DivergenceData,
    FluxData,
    OwnData,
    PeriodicData,
)
from namm.experiments.engine.settings import (
    BaselineSettings,
    DiffusionSettings,
    EvaluateSettings,
    FinetuneSettings,
    ForwardSettings,
    InverseSettings,
    MapSettings,
    ModelSettings,
    NetworkSettings,
    SamplerSettings,
    SamplesSettings,
    Settings,
    VAESettings,
    WeightSettings,
    score_training,
)
from namm.experiments.reported import REPORTED, UNREPORTED, Reported, Scores
from namm.training.settings import TrainSettings

__all__ = ["EXPERIMENTS", "OWN", "PRESETS", "REPORTED", "Preset", "Reported", "Scores", "preset", "require_name"]

PRESETS = {
    "demo": "minutes on two CPU cores",
    "gpu": "minutes on one modern GPU",
    "paper": "the paper's sizes and epochs",
}


@dataclass(frozen=True)
class Preset:
    """An experiment's name, the name of the preset, its settings, and what the paper reports for it."""

    experiment: str
    name: str
    settings: Settings
    reported: Reported


EXPERIMENTS = tuple(REPORTED)

OWN = "own"
"""The experiment with the user's own images and rule."""


def preset(experiment: str, name: str = "demo") -> Preset:
    """The preset of that name; a misspelt name is answered with the nearest."""
    require_name(experiment, (*EXPERIMENTS, OWN), "experiment")
    require_name(name, PRESETS, "preset")
    settings = _MAKERS[name](experiment)
    return Preset(experiment, name, _own(settings) if experiment == OWN else settings, _reported(experiment))


def _reported(experiment: str) -> Reported:
    return REPORTED.get(experiment, UNREPORTED)


def _own(s: Settings) -> Settings:
    """A rule that nobody has seen may not compile as one graph, and images of any sign and channels are no pictures.

    What the paper's baseline was trained for suits the paper's data: here both sides get the same compute.
    """
    return replace(
        s,
        dm=replace(s.dm, equal_compute=True),
        evaluate=replace(s.evaluate, kid_subsets=0, n_fid=0),
        map=replace(s.map, train=replace(s.map.train, compile=False)),
        finetune=replace(s.finetune, train=replace(s.finetune.train, compile=False)),
    )


def require_name(name: str, known: Any, kind: str) -> str:
    """`name` if it is one of `known`, else a `UsageError` that suggests one."""
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
    raise UsageError(f"there is no {kind} {name!r}. {hint}")


# paper: Tables 3 and 4


def _paper(experiment: str) -> Settings:
    data, layers, sigma_max, rate, epochs, f = {
        "flux": (FluxData(100_000, 100, 10_000), 3, 0.1, 2e-4, (30, 200, 1000, 450), InverseSettings()),
        "burgers": (BurgersData(10_000, 1000, 50_000), 3, 0.1, 2e-4, (100, 300, 700, 1500), InverseSettings()),
        "divergence": (
            DivergenceData(10_000, 1000, 50_000),
            2,
            0.5,
            1e-3,
            (100, 700, 500, 2000),
            InverseSettings(residual=False, activation="none"),
        ),
        "periodic": (PeriodicData(30_000, 300, 50_000), 3, 0.1, 2e-4, (50, 300, 1000, 1000), InverseSettings()),
        "count": (CountData(10_000, 1000, 50_000), 2, 0.1, 2e-4, (50, 300, 700, 1500), InverseSettings(residual=False)),
        OWN: (OwnData(), 3, 0.1, 2e-4, (100, 300, 700, 1500), InverseSettings(activation="none")),
    }[experiment]
    weights = WeightSettings(constraint=_reported(experiment).weight)
    budgets = [f"{n} epochs" for n in epochs]
    train = TrainSettings(budget=budgets[0], learning_rate=rate)
    return Settings(
        data=data,
        map=MapSettings(g=ForwardSettings(layers=layers), f=f, sigma_max=sigma_max, weights=weights, train=train),
        mdm=ModelSettings(train=score_training(budgets[1])),
        finetune=FinetuneSettings(
            sigma_max=sigma_max, weights=weights, train=replace(train, budget=budgets[2], milestones=10)
        ),
        dm=BaselineSettings(equal_compute=False, train=score_training(budgets[3])),
        evaluate=EvaluateSettings(reference="train" if experiment == "flux" else "test"),
        vae=VAESettings(train=TrainSettings(budget="600 epochs", betas=(0.9, 0.999))),
    )


# gpu and demo: ours


def _inverse(experiment: str, filters: int, blocks: int) -> InverseSettings:
    """f as the small trials liked it; as in the paper, that of velocities adds no input.

    What is binary ends in a sigmoid, which reaches zeros and ones.
    """
    return InverseSettings(
        filters=filters,
        blocks=blocks,
        normalisation="none",
        dropout=0.0,
        residual=experiment != "divergence",
        skip=True,
        activation="sigmoid" if experiment == "periodic" else "none",
    )


def _weights(experiment: str) -> WeightSettings:
    return WeightSettings(
        constraint=5 * _reported(experiment).weight, cycle=1.0, regulariser=0.3 if experiment == "periodic" else 1e-3
    )


def _gpu(experiment: str) -> Settings:
    data: Data = {
        "flux": FluxData(20_000, 500, 10_000),
        "burgers": BurgersData(10_000, 500, 10_000),
        "divergence": DivergenceData(4000, 200, 2000),
        "periodic": PeriodicData(20_000, 500, 10_000),
        "count": CountData(10_000, 500, 5000),
        OWN: OwnData(),
    }[experiment]
    sigma_max, batch = (0.5, 32) if experiment == "divergence" else (0.1, 128)
    train = TrainSettings(
        budget="5 minutes",
        batch_size=batch,
        learning_rate=2e-4,  # at twice that, f without a norm diverged
        schedule="cosine",
        warmup_steps=200,
        clip=1.0,
        compile=True,
    )
    score = replace(
        train,
        budget="10 minutes",
        learning_rate=5e-4,
        betas=(0.9, 0.999),
        ema_decay=0.9995,
        warmup_steps=500,
        milestones=10,
    )
    sampler = SamplerSettings("sde-dpm-solver", 25, compile=True)
    settings = Settings(
        data=data,
        map=MapSettings(
            g=ForwardSettings(layers=3),
            f=_inverse(experiment, 64, 6),
            sigma_max=sigma_max,
            weights=_weights(experiment),
            regulariser="identity",
            train=train,
        ),
        mdm=ModelSettings(NetworkSettings(unshuffle=2), DiffusionSettings(prediction="v"), score),
        samples=SamplesSettings(sampler=sampler),
        finetune=FinetuneSettings(sigma_max, _weights(experiment), replace(train, budget="2 minutes", milestones=4)),
        dm=BaselineSettings(train=score),
        evaluate=EvaluateSettings(n=2000, n_fid=0, sampler=sampler),
    )
    return _gpu_burgers(settings) if experiment == "burgers" else settings


def _gpu_burgers(s: Settings) -> Settings:
    """About three minutes of an H200's compute for either side, most of them the model's; a map of many small steps.

    Half the filters of f learn as much in the same time, and bear a larger rate. Space is periodic, time is not: an f
    that wraps both is wrong in the first and last columns. Samples this good need little mending, so there is little
    noise, a small g does, and f is finetuned long and near them, with more weight on the rule. Budgets are steps, so
    that a busy machine, or another, learns as much. Why each is so: docs/choices.md.
    """
    f = replace(s.map.f, filters=32, boundary="cylinder")
    maps = replace(s.map.train, budget="6000 steps", batch_size=32, learning_rate=3e-4)
    tuning = replace(maps, budget="10000 steps", learning_rate=2e-4, milestones=s.finetune.train.milestones)
    weights = replace(s.finetune.weights, constraint=20 * _reported("burgers").weight)
    return replace(
        s,
        map=replace(s.map, g=ForwardSettings(layers=2, filters=16), f=f, sigma_max=0.02, train=maps),
        mdm=replace(s.mdm, train=replace(s.mdm.train, budget="6500 steps")),
        samples=replace(s.samples, n=6400),
        finetune=FinetuneSettings(0.005, weights, tuning),
        evaluate=replace(s.evaluate, n=10_000, n_fid=10_000, sampler=replace(s.evaluate.sampler, steps=50)),
    )


def _demo(experiment: str) -> Settings:
    data: Data = {
        "flux": FluxData(2048, 256, 1024, size=32),
        "burgers": BurgersData(2000, 256, 1024, size=32, dt=0.05),
        "divergence": DivergenceData(1000, 64, 1024, size=32, rows=1, columns=2),
        "periodic": PeriodicData(2048, 256, 1024, size=32),
        "count": CountData(1000, 128, 1024, size=64, counter_training=CounterTraining(500, 100, "150 steps", 32, 50)),
        OWN: OwnData(),
    }[experiment]
    sigma_max = 0.5 if experiment == "divergence" else 0.1
    train = TrainSettings(
        budget="1000 steps",
        learning_rate=1e-3,
        schedule="cosine",
        warmup_steps=20,
        ema_decay=0.99,
        validations=4,
        checkpoint_seconds=20.0,
    )
    score = replace(
        train,
        budget="1.75 minutes",
        batch_size=32,
        learning_rate=2e-3,
        betas=(0.9, 0.999),
        clip=1.0,
        ema_decay=0.995,
        warmup_steps=50,
        milestones=4,
    )
    filters, blocks = (8, 2) if experiment == "periodic" else (16, 3)
    sampler = SamplerSettings("dpm-solver", 25)
    settings = Settings(
        data=data,
        map=MapSettings(
            g=ForwardSettings(layers=2, filters=16),
            f=_inverse(experiment, filters, blocks),
            sigma_max=sigma_max,
            weights=_weights(experiment),
            regulariser="identity",
            train=train,
        ),
        mdm=ModelSettings(
            NetworkSettings(filters=32, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0, unshuffle=2),
            DiffusionSettings(prediction="v"),
            score,
        ),
        samples=SamplesSettings(n=512, n_val=128, sampler=sampler),
        finetune=FinetuneSettings(
            sigma_max, _weights(experiment), replace(train, budget="200 steps", learning_rate=3e-4, milestones=4)
        ),
        dm=BaselineSettings(train=score),
        evaluate=EvaluateSettings(n=1000, n_fid=0, mmd_subsets=5, kid_subsets=0, milestone_samples=64, sampler=sampler),
        vae=VAESettings(latent=32, features=16, beta=3e-2, train=score),
    )
    return _demo_burgers(settings) if experiment == "burgers" else settings


def _demo_burgers(s: Settings) -> Settings:
    """Budgets as time, so that the whole run takes minutes anywhere; many small steps, which need clipping."""
    small = replace(s.map.train, batch_size=8, learning_rate=1.5e-3, clip=1.0)
    return replace(
        s,
        map=replace(s.map, f=replace(s.map.f, boundary="circular"), train=replace(small, budget="0.75 minutes")),
        finetune=replace(s.finetune, train=replace(s.finetune.train, budget="0.2 minutes", clip=1.0)),
    )


_MAKERS: dict[str, Callable[[str], Settings]] = {"demo": _demo, "gpu": _gpu, "paper": _paper}
