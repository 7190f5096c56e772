"""What a file of `namm.experiments` declares: its data, its rule, its presets, and what the paper reports; no torch.

The rule is not a setting of its own. It is derived from the data's (`data.rule`), so that data and rule agree by
construction: whoever changes Δt changes it for the simulator and for ℓ.

Both know how to become what they describe (`build`), and import what that takes only then.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from namm.errors import UsageError
from namm.report.coordinates import PIXELS, Coordinates
from namm.report.paper_scores import PaperScores

if TYPE_CHECKING:
    from namm.constraints import Constraint
    from namm.datasets import Dataset
    from namm.experiments.engine.settings import Settings

MOST_IMAGES = 10**9
"""Images of a split, or samples, that are taken for meant: at 8×8 pixels they fill 256 GB."""
PLACE = {"place": True}
"""Marks a setting that says where a thing is, and not which: the thing may move, and nothing is done again."""


@dataclass(frozen=True)
class Rule:
    """The numbers of a constraint."""

    def build(self) -> "Constraint":
        """ℓ with these numbers."""
        raise NotImplementedError(f"{type(self).__name__} has no method `build` that makes its constraint.")

    @property
    def named_code(self) -> str:
        """`module:name` of the code that it runs, where settings name it and it must be trusted; empty otherwise."""
        return ""


@dataclass(frozen=True)
class RuleFiles:
    """What the stage `data` made for a rule: names of files in its folder, and figures to record."""

    files: tuple[str, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data(ABC):
    """How many images, and what they are drawn from."""

    n_train: int = 10_000
    """Images to train on."""
    n_val: int = 1000
    """Held-out images to watch the training with."""
    n_test: int = 10_000
    """Held-out images to evaluate with."""
    seed: int = 0
    """Image i of a split depends on this seed, the split and i alone."""

    def __post_init__(self) -> None:
        for name, n in self.sizes.items():
            if n < 0:
                raise UsageError(f"n_{name} must be 0 or more, not {n}.")
            if n > MOST_IMAGES:
                raise UsageError(f"n_{name} must be at most {MOST_IMAGES}, not {n}.")
        if not any(self.sizes.values()):
            raise UsageError("n_train, n_val and n_test are all 0: ask for some images.")

    @property
    def sizes(self) -> dict[str, int]:
        """Images per split."""
        return {"train": self.n_train, "val": self.n_val, "test": self.n_test}

    @property
    def is_counted(self) -> bool:
        """Whether the numbers of images are known; those of the user's own file are not before it is opened."""
        return True

    @property
    def recipe(self) -> dict[str, Any]:
        """What shapes an image besides the seed."""
        common = {f.name for f in fields(Data)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}

    @abstractmethod
    def build(self) -> "Dataset":
        """The recipe that draws the images."""

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """The rule that these data obey."""

    @property
    def coordinates(self) -> Coordinates:
        """What the rows and columns of an image stand for."""
        return PIXELS

    # A rule that a run makes for itself, such as a trained network, is made by `prepare_rule` and found by `rule_in`.

    def prepare_rule(self, folder: Path, *, progress: bool) -> RuleFiles:
        """Make in `folder`, that of the stage `data`, what the rule needs; every process of a run calls this.

        Interrupted, it goes on where it stopped at the next call.
        """
        return RuleFiles()

    def rule_in(self, folder: Callable[[], Path]) -> Rule:
        """The rule of a run, given a function that finds the folder of its stage `data`."""
        return self.rule

    def rule_to_try(self) -> "Constraint":
        """ℓ before the run has begun, to see that settings fit together; it need not be trained yet."""
        return self.rule.build()

    def with_absolute_paths(self) -> Self:
        """The same settings with paths that mean the same from every folder."""
        return self


@dataclass(frozen=True)
class Reported:
    """What the paper reports. `weight` is its λ_constr: CD = 100·λ·ℓ."""

    weight: float
    without_finetuning: PaperScores
    with_finetuning: PaperScores
    baseline: PaperScores

    def cd(self, distance: float) -> float:
        """A mean distance ℓ on the paper's scale."""
        return 100 * self.weight * distance


NO_SCORES = PaperScores(math.nan, math.nan, math.nan, math.nan)
UNREPORTED = Reported(1.0, NO_SCORES, NO_SCORES, NO_SCORES)
"""What the paper reports of a rule that it does not know; CD is then 100·ℓ."""


@dataclass(frozen=True)
class Experiment:
    """An experiment as a whole.

    Attributes:
        name: What `namm run` calls it.
        data: Settings of its data; an object of them builds the dataset and names the rule.
        rule: Settings of its rule, for commands that take a rule without data.
        presets: Settings of a whole run by the name of the preset.
        reported: What the paper reports for it.
        dataset: Another name of its data, for `namm data`.
    """

    name: str
    data: type[Data]
    rule: type[Rule]
    presets: Mapping[str, "Settings"]
    reported: Reported = UNREPORTED
    dataset: str = ""
