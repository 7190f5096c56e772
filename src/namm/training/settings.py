"""How to train, as plain values. Imports no torch, so that the command line can read it at once."""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from namm.errors import UsageError
from namm.precision import Precision

CHOSEN = "tuning.json"
"""File of the numbers that were chosen for a training, in its folder."""
METRICS = "metrics.jsonl"
"""File of a training's log, in its folder."""
Schedule = Literal["constant", "cosine"]
Optimiser = Literal["adam", "adamw", "muon"]
DECAY = 0.01  # of weights, where an optimiser decays them and nothing is said
LATER: dict[str, Any] = {"optimiser": "adam", "weight_decay": DECAY, "averages": ()}
"""Settings that version 0.1 did not have, and what it did: they tell trainings apart only where they differ."""
OBSERVING = {"validations", "log_every", "checkpoint_seconds", "keep"}  # settings that do not touch the weights


@dataclass(frozen=True)
class TrainSettings:
    """One training run.

    The defaults are the paper's for the map: Adam with β₁ = 0.5, batch 16, EMA 0.999, constant rate.
    """

    budget: str = "10000 steps"
    """How long: "N steps", "N epochs" or "N minutes" of compute, which become steps at the speed they are made."""
    batch_size: int = 16
    """Images per step over all processes."""
    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.5, 0.999)
    schedule: Schedule = "constant"
    """Rate after the warm-up: constant, or half a cosine down to zero."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    clip: float | None = None
    """Largest gradient norm, or none."""
    ema_decay: float = 0.999
    """Averaged weights; the decay at step n is min(this, (1 + n)/(10 + n))."""
    seed: int = 0
    precision: Precision = "auto"
    """`bf16` autocast, `tf32`, plain `fp32`, or `auto`: bf16 on GPUs that have it. See `namm.numerics`."""
    compile: bool = False
    """Compile the objective into one graph."""
    optimiser: Optimiser = "adam"
    """Adam; `adamw`, which decays weights besides; `muon`, momentum made orthogonal. See `namm.training.optimisers`."""
    weight_decay: float = DECAY
    """Adamw and muon: weights shrink by this times the rate in every step; biases and gains do not."""
    averages: tuple[float, ...] = ()
    """Further averages of the weights, by decay, beside that of `ema_decay`; each takes as much memory as they do."""
    milestones: int = 0
    """Snapshots of the averaged weights, evenly spaced over the training."""
    validations: int = 10
    """Evaluations on the validation images, evenly spaced over the training."""
    log_every: int = 25
    """Steps between lines of the log."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints."""
    keep: int = 3
    """Checkpoints kept."""

    def __post_init__(self) -> None:
        Budget.parse(self.budget)
        counts, others = ("batch_size", "log_every", "keep"), ("warmup_steps", "milestones", "validations")
        conditions = [
            *((name, getattr(self, name) >= 1, "be at least 1") for name in counts),
            *((name, getattr(self, name) >= 0, "be 0 or more") for name in (*others, "checkpoint_seconds")),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "lie in [0, 1)"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "be positive and finite"),
            ("ema_decay", 0 <= self.ema_decay < 1, "lie in [0, 1)"),
            ("averages", all(0 <= decay < 1 for decay in self.averages), "lie in [0, 1)"),
            (
                "averages",
                len({self.ema_decay, *self.averages}) == 1 + len(self.averages),
                f"differ from each other and from ema_decay {self.ema_decay}",
            ),
            ("optimiser", self.optimiser in get_args(Optimiser), f"be one of {', '.join(get_args(Optimiser))}"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "be 0 or more, and finite"),
            ("clip", self.clip is None or self.clip > 0, "be positive or none"),
            ("schedule", self.schedule in get_args(Schedule), f"be one of {', '.join(get_args(Schedule))}"),
            ("precision", self.precision in get_args(Precision), f"be one of {', '.join(get_args(Precision))}"),
        ]
        for name, holds, rule in conditions:
            if not holds:
                raise UsageError(f"{name} must {rule}, not {getattr(self, name)!r}.")
        if self.optimiser == "adam" and self.weight_decay != DECAY:
            raise UsageError(f"weight_decay {self.weight_decay} is not for adam: choose the optimiser adamw or muon.")

    def same_step(self, other: "TrainSettings") -> bool:
        """Whether a step of one network costs the same under both."""
        mine, theirs = (
            (each.batch_size, each.precision, each.compile, each.optimiser, len(each.averages))
            for each in (self, other)
        )
        return mine == theirs

    def identity(self) -> dict[str, Any]:
        """The settings that decide what is learned; the others may change when a training is resumed."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in OBSERVING and (name not in LATER or value != LATER[name])
        }


@dataclass(frozen=True)
class Budget:
    """An amount of training: a number and its unit."""

    amount: float
    unit: Literal["steps", "epochs", "minutes"]

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read "1000 steps", "30 epochs" or "2.5 minutes"."""
        match = re.fullmatch(r"\s*([0-9.eE+]+)\s*(step|epoch|minute)s?\s*", str(text))
        try:
            amount = float(match[1]) if match else math.nan
        except ValueError:
            amount = math.nan
        if match is None or not amount > 0 or math.isinf(amount):
            raise UsageError(f'the budget {text!r} is not "N steps", "N epochs" or "N minutes" with N > 0.')
        return cls(amount, f"{match[2]}s")  # type: ignore[arg-type]

    @property
    def seconds(self) -> float | None:
        """Seconds of compute, where the unit is minutes."""
        return 60 * self.amount if self.unit == "minutes" else None

    def steps(self, images: int, batch_size: int) -> int | None:
        """The number of steps where it is known in advance: not for minutes."""
        if self.unit == "minutes":
            return None
        amount = self.amount if self.unit == "steps" else self.amount * images / batch_size
        return max(1, math.ceil(amount))


SCORE_SETTINGS = TrainSettings(
    budget="300 epochs",
    batch_size=64,
    learning_rate=2e-4,
    betas=(0.9, 0.999),
    warmup_steps=5000,
    clip=1.0,
    ema_decay=0.9999,
)
"""The paper's for a score model."""


def learning_rate(settings: TrainSettings, step: int, total: int) -> float:
    """Rate at `step` of `total`: linear warm-up, then constant or half a cosine."""
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    if settings.schedule == "constant":
        return settings.learning_rate * warm
    progress = max(0, step - settings.warmup_steps) / max(1, total - settings.warmup_steps)
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def evenly(count: int, total: int) -> frozenset[int]:
    """`count` steps evenly spaced in 1 … `total`, the last one `total`; none for a count of zero."""
    return frozenset(max(1, round(total * k / count)) for k in range(1, count + 1)) if count else frozenset()


CLOSENESS = 0.1
"""λ_reg of maps whose numbers are ours to choose, with Eq. 5. With the paper's 10⁻³ g may stretch mirror space until
σ_max means nothing there: errors of samples, which are relative to y, are then larger than any that f has met."""


# A budget in minutes: how many steps it is

MARKS = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""Shares of the planned steps after which their number is estimated anew; the last ones set right what changed late."""
MEASURED = 8
"""Steps, at least, from which their number is estimated; a training that plans fewer has its mark at the end."""


def replan_steps(total: int) -> frozenset[int]:
    """The steps after which a training for minutes may change `total`, the number it plans; nowhere else."""
    return frozenset(min(total, max(MEASURED, math.ceil(share * total))) for share in MARKS)


def planned_steps(asked: float, step: int, spent: float) -> int:
    """Steps in all that take `asked` seconds, if those to come are as fast as the first `step`, which took `spent`."""
    return max(step, round(asked * step / spent)) if spent > 0 else step
