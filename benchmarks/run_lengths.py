"""Runs of a preset with other budgets of time, where benchmarks keep them."""

from dataclasses import replace
from typing import Any

from namm.experiments.engine.settings import Settings
from namm.training.settings import Budget, TrainSettings

TIMES = 1.0
"""Multiple of the preset's minutes; less ends sooner and learns less."""


def lengthened(s: Settings, times: float, *, compile: bool = False) -> Settings:
    """`s` with every training of the method that many times as long, where it has minutes; the baseline equals them."""

    def own(train: TrainSettings) -> TrainSettings:
        budget = Budget.parse(train.budget)
        amount = times * budget.amount if budget.unit == "minutes" else budget.amount
        return replace(train, budget=f"{amount:g} {budget.unit}", compile=compile or train.compile)

    parts: dict[str, Any] = {
        name: replace(part, train=own(part.train))
        for name, part in (("map", s.map), ("mdm", s.mdm), ("finetune", s.finetune))
    }
    return replace(s, **parts, dm=replace(s.dm, train=replace(s.dm.train, compile=compile or s.dm.train.compile)))


def folder_name(experiment: str, preset: str, times: float, seed: int) -> str:
    """Name of the folder of one seed's run."""
    return f"{experiment}-{preset}-{times:g}-{seed}"
