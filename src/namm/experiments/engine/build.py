"""From settings to data and to the rule that they obey, and where both are put.

Data and rules are built by their own settings, in the experiment's file. The rule of a run is put where models run
(`rule_of`): its weights and buffers are where trainings and samples are. Networks and all that trains and samples them
are built by `build_models`, which takes seconds to import; what only measures images does without it.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from namm.constraints import Constraint
from namm.datasets import Dataset
from namm.distributed import process_state
from namm.experiments.engine.experiment import Data, Rule


def device() -> torch.device:
    """Where models run. Under torchrun the first call is for all processes together: they meet in it."""
    found: torch.device = process_state().device
    return found


def dataset(data: Data) -> Dataset:
    """The recipe that draws the images."""
    return data.build()


def constraint(rule: Rule) -> Constraint:
    """ℓ by itself, where it was made; the rule of a run is `rule_of`."""
    return rule.build()


def rule_of(data: Data, folder: Callable[[str], Path], where: torch.device | str | None = None) -> Constraint:
    """ℓ of a run: the rule that `data` obey, frozen, where models run.

    Args:
        data: Settings of the run's data.
        folder: Gives the folder of a stage by its name; asked for `data` alone, and only by a rule that lies there.
        where: Another device.
    """
    return placed(constraint(data.rule_in(lambda: folder("data"))), where)


def placed(rule: Constraint, where: torch.device | str | None = None) -> Constraint:
    """The rule itself, in evaluation mode and without gradients of its weights, where models run or elsewhere."""
    return rule.eval().requires_grad_(False).to(device() if where is None else where)
