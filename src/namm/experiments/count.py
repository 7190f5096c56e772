"""Galaxies: an image shows so many of them, and a network counts.

The rule of a run is a network that the run itself trains, in its stage `data`, unless it is given one.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from namm.errors import UsageError
from namm.experiments import recipes
from namm.experiments.engine.experiment import Data, Experiment, Reported, Rule, RuleFiles
from namm.experiments.engine.settings import InverseSettings, Settings
from namm.report.paper_scores import PaperScores

if TYPE_CHECKING:
    from namm.constraints import Constraint, Counter
    from namm.datasets import Dataset

COUNTER = "counter.safetensors"
"""The network that counts, in the folder of the stage `data`."""


@dataclass(frozen=True)
class CountRule(Rule):
    """A counting network sees `count` objects."""

    count: int = 8
    """Objects in an image."""
    counter: str = ""
    """File of the counting network, as `namm train counter` writes it; that of a run is in its stage `data`."""

    def build(self) -> "Constraint":
        """The network's count; refused where no network is named."""
        from namm.constraints import Count, Counter

        if not self.counter:
            raise UsageError(
                "the rule 'count' needs a network that counts: `namm run count` trains one and keeps it as "
                f"data/{COUNTER} in its folder, `namm train counter -o {COUNTER}` trains one alone. Pass the file as "
                "--counter FILE (to `namm run` and `namm sweep`, --data.counter FILE)."
            )
        return Count(Counter.load(self.counter), self.count)


@dataclass(frozen=True)
class CounterTraining:
    """How a run trains the network that counts, where it is given none: on images of two galaxies fewer to two more."""

    n_train: int = 10_000
    """Images per number of galaxies to train on."""
    n_val: int = 1000
    """Images per number to measure it with."""
    budget: str = "20 epochs"
    """How long: "N steps", "N epochs" or "N minutes"."""
    batch_size: int = 64
    """Images per step."""
    warmup_steps: int = 100
    """Steps in which the rate rises to its largest."""
    seed: int = 0
    """Seed of its images and of its training; runs that differ in other seeds are judged by one rule."""

    def __post_init__(self) -> None:
        if min(self.n_train, self.n_val) < 1:
            raise UsageError(
                f"counter_training: n_train and n_val must be 1 or more, not {self.n_train}, {self.n_val}."
            )


@dataclass(frozen=True)
class CountData(Data):
    """Images of `count` galaxies before a blurred background."""

    size: int = 128
    """Pixels along a side."""
    count: int = CountRule.count
    """Galaxies in an image."""
    background: float = 8.5
    """Standard deviation of the background before it is blurred."""
    blur: float = 4.0
    """Width of that blur in pixels."""
    peak: float = 10.0
    """Largest peak of a galaxy."""
    signal_to_noise: float = 15.0
    """Signal-to-noise ratio of the faintest galaxy, in decibels against the background's variance."""
    separation: float = 5.0
    """Smallest distance between two centres in pixels."""
    radius: float = 2.0
    """Scale of the galaxies' semi-major axes in pixels."""
    counter: str = ""
    """File of the network that counts them, as `namm train counter` writes it; without one a run trains its own."""
    counter_training: CounterTraining = field(default_factory=CounterTraining)
    """How, where no file is given."""

    @property
    def recipe(self) -> dict[str, Any]:
        """What shapes an image besides the seed: not the network that looks at it."""
        return {name: value for name, value in super().recipe.items() if not name.startswith("counter")}

    @property
    def labels(self) -> tuple[int, ...]:
        """Numbers of galaxies that the run's own counter learns to tell apart."""
        return tuple(range(max(1, self.count - 2), self.count + 3))

    def build(self) -> "Dataset":
        """Galaxies."""
        from namm.datasets import Galaxies

        return Galaxies(**self.recipe)

    @property
    def rule(self) -> CountRule:
        """The same count."""
        return CountRule(count=self.count, counter=self.counter)

    def prepare_rule(self, folder: Path, *, progress: bool) -> RuleFiles:
        """Train the network that counts, where none is given.

        What that takes is compute of neither side: the rule is given to both.
        """
        if self.counter:
            return RuleFiles()
        counter = make_counter(self, folder / COUNTER, progress=progress)
        return RuleFiles((COUNTER,), {"counter_error": counter.facts["error"]})

    def rule_in(self, folder: Callable[[], Path]) -> CountRule:
        """The same count, by the run's own network where none is given."""
        return self.rule if self.counter else replace(self.rule, counter=str(folder() / COUNTER))

    def rule_to_try(self) -> "Constraint":
        """A network with its first weights, where one is yet to be trained.

        Refused where the images to train it on cannot be drawn.
        """
        if self.counter:
            return self.rule.build()
        from namm.constraints import Count, Counter

        for label in self.labels:
            replace(self, count=label).build()
        return Count(Counter(self.size), self.count)

    def with_absolute_paths(self) -> Self:
        """The same with the network's file."""
        return replace(self, counter=str(Path(self.counter).resolve())) if self.counter else self


def make_counter(data: CountData, path: Path, *, progress: bool = True) -> "Counter":
    """The counter that `data` describe, trained, trained further or read back; every process calls this."""
    from namm.training.counter import COUNTER_SETTINGS, train_counter

    training = asdict(data.counter_training)
    n_train, n_val = training.pop("n_train"), training.pop("n_val")
    return train_counter(
        path,
        size=data.size,
        labels=data.labels,
        n_train=n_train,
        n_val=n_val,
        settings=replace(COUNTER_SETTINGS, **training),
        like={name: value for name, value in data.recipe.items() if name not in ("size", "count")},
        progress=progress,
    )


REPORTED = Reported(
    0.01,
    without_finetuning=PaperScores(0.71, 0.1716, 0.0367, 24.18),
    with_finetuning=PaperScores(0.35, 0.1978, 0.0570, 37.65),
    baseline=PaperScores(0.56, 0.1276, 0.1084, 69.76),
)
QUICK = CounterTraining(4000, 200, "2500 steps", 64, 50)
"""A minute or two on two CPU cores."""


def _finetuned_longer(settings: Settings) -> Settings:
    """Samples show a wrong number of galaxies, of which errors of σ_max say nothing: f learns it in finetuning.

    Squared errors in the cycle loss keep it from doing so by dimming every galaxy.
    """
    finetune = settings.finetune
    weights = replace(finetune.weights, constraint=30.0, squared=20.0)
    train = replace(finetune.train, budget="700 steps", learning_rate=8e-4)
    return replace(settings, finetune=replace(finetune, weights=weights, train=train))


EXPERIMENT = Experiment(
    "count",
    CountData,
    CountRule,
    presets={
        "demo": _finetuned_longer(
            recipes.demo(CountData(2048, 256, 1024, size=32, radius=0.5, counter_training=QUICK))
        ),
        "gpu": recipes.gpu(CountData(10_000, 500, 5000), share=4),
        "paper": recipes.paper(
            CountData(10_000, 1000, 50_000),
            REPORTED.weight,
            epochs=(50, 300, 700, 1500),
            layers=2,
            f=InverseSettings(residual=False),
        ),
    },
    reported=REPORTED,
    dataset="galaxies",
)
