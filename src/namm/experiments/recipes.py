"""The three presets that experiments start from; each says what differs in its own file.

`paper` has the paper's own numbers: Tables 3 and 4, and, where the text and the published results differ, what the
published results used (cycle terms 0.5 each, the gradient regulariser, 64 filters in f).

`gpu` (minutes on one modern GPU) and `demo` (minutes on two CPU cores) are ours, and one recipe serves every rule:
images standardised, an f for rules of any reach, errors of a tenth of the data's standard deviation and of the kinds
that models make, λ ten times σ_max over ℓ of these errors, a g that stays near the identity, a cosine rate,
v-prediction. Why each is so: docs/choose/settings.md.

Milestones are as many as have one half-way through the training.

`weight` is always the paper's λ, 1 for a rule that it does not know. A distance ℓ is comparable with the paper's CD as
100·λ·ℓ with that λ, whatever λ a preset trains with.
"""

from dataclasses import replace
from typing import Literal

from namm.experiments.engine.experiment import Data
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
from namm.training.settings import CLOSENESS, TrainSettings


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


RULENET = InverseSettings(kind="rulenet", filters=32, blocks=5, boundary="auto")
"""f for rules of any reach."""
SMALL_RULENET = replace(RULENET, filters=24, blocks=4)
"""The same for a CPU."""
WEIGHTS = WeightSettings(constraint=10.0, relative=True, cycle=1.0, regulariser=CLOSENESS)
SIGMA_MAX = 0.1
"""Standard deviations of the data that errors have at most; a quarter of it in finetuning."""


def _map(f: InverseSettings, sigma_max: float, weights: WeightSettings, train: TrainSettings) -> MapSettings:
    return MapSettings(
        g=ForwardSettings(layers=2, filters=16),
        f=f,
        standardise=True,
        sigma_max=sigma_max,
        noise="model",
        weights=weights,
        regulariser="identity",
        train=train,
    )


def gpu(
    data: Data,
    *,
    f: InverseSettings = RULENET,
    sigma_max: float = SIGMA_MAX,
    weights: WeightSettings = WEIGHTS,
    share: int = 1,
) -> Settings:
    """Minutes on one modern GPU; images that are larger than 64×64 are `share` times fewer, in batches and samples."""
    train = TrainSettings(
        budget="4000 steps",
        batch_size=32 // min(share, 2),
        learning_rate=5e-4,
        schedule="cosine",
        warmup_steps=200,
        clip=1.0,
        compile=True,
    )
    score = replace(
        train,
        budget="6000 steps",
        batch_size=128 // share,
        learning_rate=5e-4,
        betas=(0.9, 0.999),
        ema_decay=0.9995,
        warmup_steps=500,
        milestones=10,
    )
    sampler = SamplerSettings("sde-dpm-solver", 25, compile=True)
    tuning = replace(train, budget="2000 steps", learning_rate=2e-4, milestones=4)
    return Settings(
        data=data,
        map=_map(f, sigma_max, weights, train),
        mdm=ModelSettings(NetworkSettings(unshuffle=2), DiffusionSettings(prediction="v"), score),
        samples=SamplesSettings(n=6400 // share, sampler=sampler),
        finetune=FinetuneSettings(sigma_max / 4, weights, tuning),
        dm=BaselineSettings(train=score),
        evaluate=EvaluateSettings(n=2000, n_fid=0, sampler=sampler),
    )


def demo(
    data: Data,
    *,
    f: InverseSettings = SMALL_RULENET,
    sigma_max: float = SIGMA_MAX,
    weights: WeightSettings = WEIGHTS,
    model: str = "800 steps",
) -> Settings:
    """Minutes on two CPU cores; `model` is the budget of the diffusion model, about two minutes there."""
    train = TrainSettings(
        budget="400 steps",
        batch_size=8,
        learning_rate=1e-3,
        schedule="cosine",
        warmup_steps=20,
        clip=1.0,
        ema_decay=0.99,
        validations=4,
        checkpoint_seconds=20.0,
    )
    score = replace(
        train,
        budget=model,
        batch_size=32,
        learning_rate=2e-3,
        betas=(0.9, 0.999),
        schedule="constant",
        ema_decay=0.995,
        warmup_steps=50,
        milestones=4,
    )
    sampler = SamplerSettings("dpm-solver", 25)
    network = NetworkSettings(filters=32, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0, unshuffle=2)
    tuning = replace(train, budget="150 steps", learning_rate=3e-4, milestones=4)
    return Settings(
        data=data,
        map=_map(f, sigma_max, weights, train),
        mdm=ModelSettings(network, DiffusionSettings(prediction="v"), score),
        samples=SamplesSettings(n=512, n_val=128, sampler=sampler),
        finetune=FinetuneSettings(sigma_max / 4, weights, tuning),
        dm=BaselineSettings(train=score, repair=True),
        evaluate=EvaluateSettings(n=1000, n_fid=0, mmd_subsets=5, kid_subsets=0, milestone_samples=64, sampler=sampler),
        vae=VAESettings(latent=32, features=16, beta=3e-2, train=score),
    )
