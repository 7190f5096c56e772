"""What an experiment is made of, as plain values: one frozen dataclass per part, one field per number.

Nothing here imports torch, so that the command line reads, checks and prints settings at once. Names stand for
objects (`regulariser="gradient"`); `namm.experiments.engine.build_models` turns them into objects, and nothing after it
sees a name.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from namm.errors import UsageError
from namm.experiments.engine.experiment import MOST_IMAGES, Data
from namm.training.settings import SCORE_SETTINGS, TrainSettings

# The map


@dataclass(frozen=True)
class ForwardSettings:
    """The forward map g, the gradient of an input-convex network."""

    layers: int = 3
    """Hidden layers."""
    filters: int = 32
    """Channels of every hidden state."""
    kernel_size: int = 3
    """Odd width of every kernel."""
    strong_convexity: float = 0.9
    """α in g(x) = (1 − α) ∇P(x) + α x."""
    negative_slope: float = 0.2
    """Slope of the leaky ReLU below zero."""


@dataclass(frozen=True)
class InverseSettings:
    """The inverse map f: the paper's `resnet`, CycleGAN's generator, or a `rulenet`, for rules of any reach."""

    kind: Literal["resnet", "rulenet"] = "resnet"
    filters: int = 64
    """Channels after the head; in a resnet every downsampling doubles them."""
    blocks: int = 6
    """Residual blocks."""
    boundary: Literal["auto", "zeros", "circular", "cylinder"] = "zeros"
    """What is beyond the edge; in a `cylinder` the top meets the bottom, and there is nothing left and right; `auto`
    looks whether the images' opposite edges are neighbours."""
    modes: int = 64
    """Rulenet: frequencies per axis."""
    templates: int = 4
    """Rulenet: directions of ∇ℓ that corrections of the whole image may take."""
    hidden: int = 64
    """Rulenet: width of the network that decides on these corrections."""
    downsamplings: int = 2
    """Resnet, as all below: halvings of the resolution."""
    normalisation: Literal["instance", "none"] = "instance"
    dropout: float = 0.5
    """Inside the residual blocks, in training only."""
    residual: bool = True
    """Add the input to the output."""
    skip: bool = False
    """Add the head's features to the tail's input."""
    activation: Literal["softplus", "sigmoid", "tanh", "none"] = "softplus"
    """The last one."""


@dataclass(frozen=True)
class WeightSettings:
    """Weights of the terms of Eq. 1."""

    constraint: float = 1.0
    """λ_constr; where `relative`, in units of σ_max over ℓ of images with errors of σ_max."""
    relative: bool = False
    """Whether λ_constr is `constraint` times σ_max over ℓ of the errors that the map is trained with."""
    cycle: float = 0.5
    """Weight of either half of the cycle loss."""
    regulariser: float = 1e-3
    """λ_reg."""
    squared: float = 0.0
    """Weight of squared errors beside the absolute ones of the cycle loss."""


@dataclass(frozen=True)
class MapSettings:
    """Learning g and f (Eq. 1)."""

    g: ForwardSettings = field(default_factory=ForwardSettings)
    f: InverseSettings = field(default_factory=InverseSettings)
    standardise: bool = False
    """Whether the networks see images standardised per channel; σ_max is then in standard deviations of the data."""
    sigma_max: float = 0.1
    """How far from g(x) f learns to come back."""
    noise: Literal["uniform", "fixed", "model", "model-fixed"] = "uniform"
    """White noise or, as `model`, errors of the kinds that models make, with σ ~ U(0, σ_max) or σ = σ_max always."""
    tune: bool = False
    """Whether σ_max and λ_constr are chosen by short trials; finetuning keeps its ratio to both."""
    weights: WeightSettings = field(default_factory=WeightSettings)
    regulariser: Literal["gradient", "identity"] = "gradient"
    """mean |∇P(x)| as published, or ‖x − g(x)‖₁ as in Eq. 5."""
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        if not 0 < self.sigma_max < math.inf:
            raise UsageError(f"sigma_max must be positive, not {self.sigma_max}.")
        tunable = self.standardise and self.noise == "model" and self.weights.relative and self.weights.constraint > 0
        if self.tune and not tunable:
            raise UsageError(
                "map.tune needs map.standardise, map.noise model, map.weights.relative and a positive "
                "map.weights.constraint."
            )
        for f in fields(self.weights):
            if not 0 <= getattr(self.weights, f.name) < math.inf:
                raise UsageError(f"weights.{f.name} must be 0 or more, not {getattr(self.weights, f.name)}.")


# The generative models


@dataclass(frozen=True)
class NetworkSettings:
    """The score network: the paper's `ncsnpp`, a transformer of patches, `dit`, or a small `unet`."""

    kind: Literal["ncsnpp", "dit", "unet"] = "ncsnpp"
    filters: int = 64
    """Channels at the full resolution."""
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    """Ncsnpp and unet, as down to `attention`: multiples of `filters`, one per resolution."""
    blocks: int = 4
    """Residual blocks per resolution."""
    attention: tuple[int, ...] = (16,)
    """Resolutions with attention."""
    dropout: float = 0.1
    unshuffle: int = 1
    """Ncsnpp and unet: pixels a side that become channels before the first layer; 2 halves the resolution."""
    width: int = 256
    """Dit, as all below: length of a token."""
    depth: int = 8
    """Blocks of attention and MLP."""
    heads: int = 4
    """Heads of attention; `width` is divisible by 4 of them."""
    patch: int = 4
    """Pixels a side of a patch."""


@dataclass(frozen=True)
class DiffusionSettings:
    """How images turn into noise: the paper's variance-preserving `vp`, or on `straight` paths (flow matching)."""

    schedule: Literal["vp", "straight"] = "vp"
    beta_min: float = 0.1
    """Vp: β(t) at t = 0."""
    beta_max: float = 20.0
    """Vp: β(t) at t = 1."""
    t_min: float = 1e-3
    """Smallest time, in training and in sampling."""
    prediction: Literal["epsilon", "v", "flow"] = "epsilon"
    """What the network predicts: the noise, with `vp` also v, with `straight` also the flow."""
    times: Literal["uniform", "logit-normal"] = "uniform"
    """How times are drawn in training: all alike, or mostly those between image and noise."""

    def __post_init__(self) -> None:
        needed = {"v": "vp", "flow": "straight"}.get(self.prediction, self.schedule)
        if needed != self.schedule:
            other = {"vp": "v", "straight": "flow"}[self.schedule]
            raise UsageError(
                f"prediction {self.prediction} needs schedule {needed}; with schedule {self.schedule} take prediction "
                f"{other} or epsilon."
            )


def score_training(budget: str) -> TrainSettings:
    """The paper's way to train a score model, for `budget`, with snapshots along the way."""
    return replace(SCORE_SETTINGS, budget=budget, milestones=10)


@dataclass(frozen=True)
class ModelSettings:
    """The diffusion model in mirror space."""

    network: NetworkSettings = field(default_factory=NetworkSettings)
    diffusion: DiffusionSettings = field(default_factory=DiffusionSettings)
    train: TrainSettings = field(default_factory=lambda: score_training("300 epochs"))


SamplingMethod = Literal["euler-maruyama", "ancestral", "ddim", "dpm-solver", "sde-dpm-solver", "unipc"]


@dataclass(frozen=True)
class SamplerSettings:
    """How a diffusion model is sampled."""

    method: SamplingMethod = "euler-maruyama"
    steps: int = 1000
    """Evaluations of the network."""
    compile: bool = False
    """Compile the network first: a minute, which thousands of samples on a GPU repay."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise UsageError(f"a sampler needs at least 2 steps, not {self.steps}.")


@dataclass(frozen=True)
class SamplesSettings:
    """Samples in mirror space to finetune f with."""

    n: int = 12_800
    """To train on."""
    n_val: int = 512
    """Held out."""
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    seed: int = 1

    def __post_init__(self) -> None:
        if self.n < 1 or self.n_val < 0:
            raise UsageError(f"samples: n must be 1 or more and n_val 0 or more, not {self.n} and {self.n_val}.")
        if max(self.n, self.n_val) > MOST_IMAGES:
            raise UsageError(f"samples: n and n_val must be at most {MOST_IMAGES}, not {self.n} and {self.n_val}.")


@dataclass(frozen=True)
class FinetuneSettings:
    """Learning f further on samples (Eq. 7)."""

    sigma_max: float = 0.1
    weights: WeightSettings = field(default_factory=WeightSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


@dataclass(frozen=True)
class BaselineSettings:
    """The same diffusion model on the data themselves."""

    equal_compute: bool = True
    """Train for the compute seconds that map, model, samples and finetuning took together, and not for a budget."""
    train: TrainSettings = field(default_factory=lambda: score_training("1500 epochs"))
    repair: bool = False
    """Also repair, at equal compute, the samples of a shorter training: where that is a part of this one, at a constant
    rate and with steps like the counterpart's."""


@dataclass(frozen=True)
class VAESettings:
    """The variational autoencoder, in mirror space (stage `mvae`) and in data space (stage `vae`)."""

    latent: int = 128
    """Length of the latent vector."""
    features: int = 64
    """Channels of the first layer."""
    beta: float = 1e-3
    """Weight of the divergence from the prior."""
    train: TrainSettings = field(default_factory=lambda: TrainSettings(budget="200 epochs", betas=(0.9, 0.999)))
    """How the one in mirror space is trained; the other gets, as compute, what the map and this one took."""


@dataclass(frozen=True)
class FewSettings:
    """The few-step model, distilled from the diffusion model in mirror space."""

    steps: int = 0
    """Evaluations of the network per sample, 1 to 4 as a rule; 0 leaves the model out."""
    grid: int = 32
    """Steps of its teacher from noise to image, of which it learns each."""
    train: TrainSettings = field(
        default_factory=lambda: replace(SCORE_SETTINGS, budget="50 epochs", warmup_steps=200, ema_decay=0.999)
    )

    def __post_init__(self) -> None:
        if self.steps < 0 or self.grid < 2:
            raise UsageError(f"few: steps must be 0 or more and grid 2 or more, not {self.steps} and {self.grid}.")


# The comparison


@dataclass(frozen=True)
class EvaluateSettings:
    """What is measured on how many samples."""

    n: int = 10_000
    """Samples for the distance, √MMD² and KID."""
    n_fid: int = 50_000
    """Samples for FID; 0 leaves it out."""
    reference: Literal["test", "train"] = "test"
    """The split that samples are compared with."""
    subset: int = 1000
    """Images per random subset of √MMD² and KID."""
    mmd_subsets: int = 50
    kid_subsets: int = 100
    """0 leaves KID out."""
    milestone_samples: int = 128
    """Samples for the distance at every milestone of the trainings, of those above; 0 leaves it out."""
    polish: bool = False
    """Whether rows of polished samples stand beside the others, for a rule that has a residual or a nearest image."""
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    seed: int = 2

    def __post_init__(self) -> None:
        if self.n < 1 or self.subset < 2 or self.mmd_subsets < 1:
            raise UsageError(
                f"evaluate: n and mmd_subsets must be 1 or more and subset 2 or more, not {self.n}, {self.mmd_subsets} "
                f"and {self.subset}."
            )
        for name in ("kid_subsets", "n_fid", "milestone_samples"):
            if getattr(self, name) < 0:
                raise UsageError(f"evaluate: {name} must be 0 or more, not {getattr(self, name)}.")
        if self.drawn > MOST_IMAGES:
            raise UsageError(f"evaluate: n and n_fid must be at most {MOST_IMAGES}, not {self.n} and {self.n_fid}.")

    @property
    def drawn(self) -> int:
        """Samples of each model."""
        return max(self.n, self.n_fid)


@dataclass(frozen=True)
class Settings:
    """Everything, stage by stage."""

    data: Data
    map: MapSettings = field(default_factory=MapSettings)
    mdm: ModelSettings = field(default_factory=ModelSettings)
    samples: SamplesSettings = field(default_factory=SamplesSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)
    dm: BaselineSettings = field(default_factory=BaselineSettings)
    few: FewSettings = field(default_factory=FewSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    vae: VAESettings = field(default_factory=VAESettings)

    def __post_init__(self) -> None:
        if self.data.is_counted and (self.data.n_train < 1 or self.data.n_val < 1):
            raise UsageError(
                f"data.n_train and data.n_val must be 1 or more in a run, not {self.data.n_train} and "
                f"{self.data.n_val}: a map is trained on the first and measured on the second."
            )
        if self.finetune.weights.relative and not self.map.weights.relative:
            raise UsageError(
                "finetune.weights.relative is relative to what the map measures: it needs map.weights.relative."
            )
        if self.samples.seed == self.evaluate.seed:
            raise UsageError(
                f"samples.seed and evaluate.seed are both {self.samples.seed}: what f was finetuned on must not be "
                "what it is judged by. Choose another one."
            )

    @property
    def repairs(self) -> bool:
        """Whether the samples of a shorter plain model are repaired, too: the beginning of the baseline's training."""
        dm, train = self.dm, self.dm.train
        prefix = train.schedule == "constant" and train.same_step(self.mdm.train)
        return dm.repair and dm.equal_compute and prefix


LARGEST_SEED = 2**61
"""From here on what is derived from a seed has more bits than a file of settings keeps."""


def with_seed(settings: Settings, seed: int) -> Settings:
    """The same settings with other seeds everywhere: for data, trainings, finetuning samples and evaluation."""
    if not 0 <= seed < LARGEST_SEED:
        raise UsageError(f"a seed lies between 0 and {LARGEST_SEED - 1}, not {seed}.")
    trained = {
        name: replace(part, train=replace(part.train, seed=seed))
        for name in ("map", "mdm", "finetune", "dm", "few", "vae")
        for part in (getattr(settings, name),)
    }
    return replace(
        settings,
        data=replace(settings.data, seed=seed),
        samples=replace(settings.samples, seed=2 * seed + 1),
        evaluate=replace(settings.evaluate, seed=2 * seed + 2),
        **trained,
    )
