"""An experiment in one file: checkerboards of any two greys, whose rule is that the greys add up to one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from namm.constraints import Constraint, constraint
from namm.datasets import Dataset
from namm.experiments import recipes
from namm.experiments.engine.experiment import Data, Experiment, Rule, RuleFiles
from namm.experiments.engine.settings import (
    ForwardSettings,
    InverseSettings,
    NetworkSettings,
    SamplerSettings,
    Settings,
)

NOTE = "note.txt"


@dataclass(frozen=True)
class Boards(Dataset):
    """Checkerboards of `size` × `size` squares: a where i + j is even, `total` − a where it is odd."""

    name: ClassVar[str] = "boards"
    sizes: ClassVar[dict[str, int]] = {"train": 64, "val": 16, "test": 64}
    size: int = 8
    total: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, self.size, self.size

    def draw(self, n: int, rng: torch.Generator) -> Tensor:
        a = torch.rand(n, 1, 1, 1, generator=rng)
        even = (torch.arange(self.size)[:, None] + torch.arange(self.size)) % 2 == 0
        return torch.where(even, a, self.total - a)


@dataclass(frozen=True)
class ToyRule(Rule):
    """Neighbours in a row add up to `total`."""

    total: float = 1.0
    """Sum of two neighbours."""

    def build(self) -> Constraint:
        def neighbours(x: Tensor) -> Tensor:
            return (x[..., 1:] + x[..., :-1] - self.total).abs().mean((1, 2, 3))

        return constraint(neighbours)


@dataclass(frozen=True)
class ToyData(Data):
    """Checkerboards."""

    n_train: int = 64
    n_val: int = 16
    n_test: int = 64
    size: int = 8
    """Squares along a side."""
    total: float = ToyRule.total
    """Sum of the two greys."""

    def build(self) -> Dataset:
        return Boards(**self.recipe)

    @property
    def rule(self) -> ToyRule:
        return ToyRule(self.total)

    def prepare_rule(self, folder: Path, *, progress: bool) -> RuleFiles:
        (folder / NOTE).write_text(f"{self.total}\n")
        return RuleFiles((NOTE,), {"noted": self.total})


def _tiny() -> Settings:
    s = recipes.demo(ToyData())
    score = replace(s.mdm.train, budget="6 steps", batch_size=8, milestones=0)
    train = replace(s.map.train, budget="6 steps", batch_size=8)
    sampler = SamplerSettings("ddim", 3)
    return replace(
        s,
        map=replace(
            s.map,
            g=ForwardSettings(layers=1, filters=4),
            f=InverseSettings(filters=4, blocks=1, downsamplings=1),
            train=train,
        ),
        mdm=replace(s.mdm, network=NetworkSettings("ncsnpp", 8, (1,), 1, (), 0.0), train=score),
        samples=replace(s.samples, n=16, n_val=8, sampler=sampler),
        finetune=replace(s.finetune, train=replace(train, budget="4 steps")),
        dm=replace(s.dm, train=score),
        evaluate=replace(s.evaluate, n=16, subset=8, mmd_subsets=2, milestone_samples=0, sampler=sampler),
    )


EXPERIMENT = Experiment("toy", ToyData, ToyRule, presets={"demo": _tiny()}, dataset="boards")
