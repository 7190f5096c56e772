"""The three presets that experiments start from; each says what differs in its own file.

`paper` has the paper's own numbers: Tables 3 and 4, and, where the text and the published results differ, what the
published results used (cycle terms 0.5 each, the gradient regulariser, 64 filters in f).

`gpu` (minutes on one modern GPU) and `demo` (minutes on two CPU cores) are ours. They are first choices, taken from
small trials: λ five times the paper's, f without instance norm, with a skip and without dropout, a cosine rate,
v-prediction. The demos of `periodic` (its map) and `burgers` (the whole run, `benchmarks/against_baseline.py`) and
`gpu` of `burgers` (the whole run, RESULTS.md) have been measured as they stand, the others have not.

Milestones are as many as have one half-way through the training.

`weight` is always the paper's λ, 1 for a rule that it does not know. A distance ℓ is comparable with the paper's CD as
100·λ·ℓ with that λ, whatever λ a preset trains with.
"""

from dataclasses import replace
from typing import Literal

from namm.experiments.engine.data_settings import Data
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
from namm.training.settings import TrainSettings


def paper(
    data: Data,
    weight: float,
    epochs: tuple[int, int, int, int],
    *,
    layers: int = 3,
    f: InverseSettings | None = None,
    sigma_max: float = 0.1,
    rate: float = 2e-4,
    reference: Literal["test", "train"] = "test",
) -> Settings:
    """The paper's numbers; `epochs` are those of the map, the model, the finetuning and the baseline."""
    weights = WeightSettings(constraint=weight)
    budgets = [f"{n} epochs" for n in epochs]
    train = TrainSettings(budget=budgets[0], learning_rate=rate)
    return Settings(
        data=data,
        map=MapSettings(
            g=ForwardSettings(layers=layers),
            f=f or InverseSettings(),
            sigma_max=sigma_max,
            weights=weights,
            train=train,
        ),
        mdm=ModelSettings(train=score_training(budgets[1])),
        finetune=FinetuneSettings(
            sigma_max=sigma_max, weights=weights, train=replace(train, budget=budgets[2], milestones=10)
        ),
        dm=BaselineSettings(equal_compute=False, train=score_training(budgets[3])),
        evaluate=EvaluateSettings(reference=reference),
        vae=VAESettings(train=TrainSettings(budget="600 epochs", betas=(0.9, 0.999))),
    )


INVERSE = InverseSettings(normalisation="none", dropout=0.0, skip=True, activation="none")
"""f as the small trials liked it."""
SMALL_INVERSE = replace(INVERSE, filters=16, blocks=3)
"""The same for a CPU."""


def gpu(
    data: Data,
    weight: float,
    *,
    f: InverseSettings = INVERSE,
    sigma_max: float = 0.1,
    regulariser: float = 1e-3,
    batch_size: int = 128,
) -> Settings:
    """Minutes on one modern GPU."""
    weights = WeightSettings(constraint=5 * weight, cycle=1.0, regulariser=regulariser)
    train = TrainSettings(
        budget="5 minutes",
        batch_size=batch_size,
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
    return Settings(
        data=data,
        map=MapSettings(
            g=ForwardSettings(layers=3), f=f, sigma_max=sigma_max, weights=weights, regulariser="identity", train=train
        ),
        mdm=ModelSettings(NetworkSettings(unshuffle=2), DiffusionSettings(prediction="v"), score),
        samples=SamplesSettings(sampler=sampler),
        finetune=FinetuneSettings(sigma_max, weights, replace(train, budget="2 minutes", milestones=4)),
        dm=BaselineSettings(train=score),
        evaluate=EvaluateSettings(n=2000, n_fid=0, sampler=sampler),
    )


def demo(
    data: Data,
    weight: float,
    *,
    f: InverseSettings = SMALL_INVERSE,
    sigma_max: float = 0.1,
    regulariser: float = 1e-3,
) -> Settings:
    """Minutes on two CPU cores."""
    weights = WeightSettings(constraint=5 * weight, cycle=1.0, regulariser=regulariser)
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
    sampler = SamplerSettings("dpm-solver", 25)
    network = NetworkSettings(filters=32, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0, unshuffle=2)
    tuning = replace(train, budget="200 steps", learning_rate=3e-4, milestones=4)
    return Settings(
        data=data,
        map=MapSettings(
            g=ForwardSettings(layers=2, filters=16),
            f=f,
            sigma_max=sigma_max,
            weights=weights,
            regulariser="identity",
            train=train,
        ),
        mdm=ModelSettings(network, DiffusionSettings(prediction="v"), score),
        samples=SamplesSettings(n=512, n_val=128, sampler=sampler),
        finetune=FinetuneSettings(sigma_max, weights, tuning),
        dm=BaselineSettings(train=score),
        evaluate=EvaluateSettings(n=1000, n_fid=0, mmd_subsets=5, kid_subsets=0, milestone_samples=64, sampler=sampler),
        vae=VAESettings(latent=32, features=16, beta=3e-2, train=score),
    )
