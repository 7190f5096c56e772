"""What several benchmarks share: the machine, memory, and runs of other lengths."""

import platform
import resource
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from namm.experiments.engine.settings import Settings
from namm.training.settings import Budget, TrainSettings

TIMES = 1.0
"""Multiple of the preset's budgets; less ends sooner and learns less."""


def facts(device: torch.device) -> dict[str, str]:
    """The machine, the version of torch and the date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {"machine": name, "torch": torch.__version__, "date": date.today().isoformat()}


def stamp(known: Mapping[str, Any]) -> str:
    """Those facts in a line."""
    return "{machine}, torch {torch}, {date}".format(**known)


def peak_bytes() -> int:
    """The most memory this process has held. What `getrusage` says may be its parent's, so Linux is asked directly."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def lengthened(s: Settings, times: float, *, compile: bool = False) -> Settings:
    """`s` with every training of the method that many times as long; the baseline equals them."""

    def own(train: TrainSettings) -> TrainSettings:
        budget = Budget.parse(train.budget)
        return replace(train, budget=f"{times * budget.amount:g} {budget.unit}", compile=compile or train.compile)

    parts: dict[str, Any] = {
        name: replace(part, train=own(part.train))
        for name, part in (("map", s.map), ("mdm", s.mdm), ("finetune", s.finetune))
    }
    return replace(s, **parts, dm=replace(s.dm, train=replace(s.dm.train, compile=compile or s.dm.train.compile)))


def folder_name(experiment: str, preset: str, times: float, seed: int) -> str:
    """Name of the folder of one seed's run."""
    return f"{experiment}-{preset}-{times:g}-{seed}"
