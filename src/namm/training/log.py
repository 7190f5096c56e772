"""What a training reports: averaged losses on a progress bar, as JSON lines and to trackers that are installed."""

import json
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from accelerate import Accelerator

from namm.errors import CheckpointError
from namm.files import refuse_link, write_atomically
from namm.progress import ProgressBar
from namm.reading import REASON, damage_as, read_text
from namm.training.objectives import Losses
from namm.training.settings import METRICS, Budget, TrainSettings
from namm.training.state import TrainingState


class LossAverages:
    """Means of the loss terms between two lines of the log, and the first step whose loss was not finite.

    Sums are kept on the device, so that adding never waits for it, and all terms are added at once: a step of a small
    batch is over before many small additions could be launched.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._weight, self._sums, self._first_not_finite = 0, torch.zeros(0), torch.tensor(math.inf)

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed training writes the line that an uninterrupted one would."""
        sums = dict(zip(self._names, self._sums.tolist(), strict=True)) if self._names else {}
        return {"weight": self._weight, "sums": sums}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], device: torch.device) -> Self:
        """Averages that go on from what `as_json` returned, where the losses of all steps were finite."""
        averages = cls()
        if values.get("sums"):
            averages._names, averages._weight = tuple(values["sums"]), int(values["weight"])
            averages._sums = torch.tensor(list(values["sums"].values()), dtype=torch.float64, device=device)
            averages._first_not_finite = torch.tensor(math.inf, device=device)
        return averages

    @torch.no_grad()
    def add(self, losses: Losses, *, step: int = 0, weight: int = 1) -> None:
        """Add the terms of one step, `weight` times."""
        terms = torch.stack([value.detach() for value in losses.values()]).double()
        bad = torch.where(torch.isfinite(losses["loss"].detach()), math.inf, float(step))
        if not self._names:
            self._names, self._sums, self._first_not_finite = tuple(losses), torch.zeros_like(terms), bad
        self._sums = torch.add(self._sums, terms, alpha=weight)
        self._first_not_finite = torch.minimum(self._first_not_finite, bad)
        self._weight += weight

    def means(self) -> Losses:
        """Mean of every term."""
        return dict(zip(self._names, self._sums / self._weight, strict=True))

    def first_not_finite(self) -> int | None:
        """The first step added whose loss was not finite, if any. Waits for the device."""
        step = float(self._first_not_finite)
        return None if step == math.inf else int(step)


class Log:
    """Takes the values of a step to the progress bar, the metrics file and the trackers, on the main process only."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path | None,
        state: TrainingState,
        settings: TrainSettings,
        *,
        title: str,
        visible: bool,
    ) -> None:
        main = accelerator.is_main_process
        self.accelerator, self.state, self.batch_size = accelerator, state, settings.batch_size
        self.seconds_asked = Budget.parse(settings.budget).seconds
        self.file = open_metrics(folder / METRICS, after_step=state.step) if folder and main else None
        self._last = (state.step, state.compute_seconds)
        if accelerator.log_with:
            accelerator.init_trackers("namm")
        self.bar = ProgressBar(title, state.total, start=state.step, visible=visible and main)
        self.bar.start()

    def write(self, values: dict[str, float]) -> None:
        """Record `values` for the state's current step; for a budget in minutes also what was asked and is planned."""
        step, seconds = self.state.step, self.state.compute_seconds
        images = (step - self._last[0]) * self.batch_size
        values = values | {"images_per_second": images / max(seconds - self._last[1], 1e-9)}
        self._last = (step, seconds)
        self.bar.extend(self.state.total - self.bar.total)
        self.bar.update(step, values)
        if self.seconds_asked is not None:
            values |= {"asked_seconds": self.seconds_asked, "planned_steps": self.state.total}
        self.accelerator.log(values, step=step)
        if self.file:
            self.file.write(json.dumps({"step": step, "seconds": seconds} | values) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())  # a checkpoint that follows stands for the lines before it

    def close(self) -> None:
        """Stop the bar, close the file and the trackers."""
        self.bar.stop()
        if self.file:
            self.file.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()


LARGEST = 2**28
"""Bytes of a metrics file: a line for each of a million steps."""


def open_metrics(path: Path, *, after_step: int) -> TextIO:
    """A metrics file to append to, one JSON object a line, without the lines past `after_step`."""
    if path.exists():  # those will be written again
        kept = [line for line in _lines(path) if _step(line) <= after_step]
        write_atomically(path, "".join(f"{line}\n" for line in kept))
    refuse_link(path)
    return path.open("a")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file; a last line cut short by a crash is left out."""
    return [json.loads(line) for line in _lines(path) if _step(line) < math.inf]


def _lines(path: Path) -> list[str]:
    with damage_as(CheckpointError, f"{path} cannot be read ({REASON}): move it away."):
        return read_text(path, LARGEST).splitlines()


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf


def installed_trackers() -> list[str]:
    """TensorBoard where it is installed; Weights & Biases where it is installed and the user has set it up."""
    trackers = ["tensorboard"] if find_spec("tensorboard") else []
    if find_spec("wandb") and {"WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"} & os.environ.keys():
        trackers.append("wandb")
    return trackers
