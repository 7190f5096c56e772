"""What a training reports: averaged losses on a progress bar, as JSON lines and to trackers that are installed."""

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from accelerate import Accelerator
from torch import Tensor

from namm.files import refuse_link, write_atomically
from namm.progress import ProgressBar
from namm.training.objectives import Losses
from namm.training.state import TrainingState


class LossAverages:
    """Means of the loss terms between two lines of the log, and the first step whose loss was not finite.

    Sums are kept on the device, so that adding never waits for it, and all terms are added at once: a step of a small
    batch is over before many small additions could be launched.
    """

    def __init__(self) -> None:
        self.weight = 0
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None
        self._first_not_finite: Tensor | None = None

    @torch.no_grad()
    def add(self, losses: Losses, *, step: int = 0, weight: int = 1) -> None:
        """Add the terms of one step, `weight` times."""
        terms = torch.stack([value.detach() for value in losses.values()]).double()
        bad = torch.where(torch.isfinite(losses["loss"].detach()), torch.inf, float(step))
        if self._sums is None or self._first_not_finite is None:
            self._names, self._sums, self._first_not_finite = tuple(losses), weight * terms, bad
        else:
            self._sums = torch.add(self._sums, terms, alpha=weight)
            self._first_not_finite = torch.minimum(self._first_not_finite, bad)
        self.weight += weight

    def means(self) -> Losses:
        """Mean of every term."""
        return {} if self._sums is None else dict(zip(self._names, self._sums / self.weight, strict=True))

    def first_not_finite(self) -> int | None:
        """The first step added whose loss was not finite, if any. Waits for the device."""
        step = float("inf") if self._first_not_finite is None else float(self._first_not_finite)
        return None if step == float("inf") else int(step)


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, each with its step."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        self.path = path
        if path.exists():  # lines past the checkpoint will be written again
            kept = [line for line in path.read_text().splitlines() if _step(line) <= after_step]
            write_atomically(path, "".join(f"{line}\n" for line in kept))
        refuse_link(path)
        self._file = path.open("a")

    def write(self, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._file.write(json.dumps(dict(values)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file; a last line cut short by a crash is left out."""
    return [json.loads(line) for line in path.read_text().splitlines() if _step(line) < float("inf")]


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def installed_trackers() -> list[str]:
    """TensorBoard where it is installed; Weights & Biases where it is installed and the user has set it up."""
    trackers = ["tensorboard"] if find_spec("tensorboard") else []
    if find_spec("wandb") and {"WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"} & os.environ.keys():
        trackers.append("wandb")
    return trackers


class Log:
    """Takes the values of a step to the progress bar, the metrics file and the trackers, on the main process only."""

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path | None,
        state: TrainingState,
        *,
        title: str,
        batch_size: int,
        visible: bool,
    ) -> None:
        main = accelerator.is_main_process
        self.accelerator, self.state, self.batch_size = accelerator, state, batch_size
        self.file = MetricsLog(folder / "metrics.jsonl", after_step=state.step) if folder and main else None
        self.bar = ProgressBar(title, state.total, start=state.step, visible=visible and main)
        self._last = (state.step, state.compute_seconds)

    def write(self, values: dict[str, float]) -> None:
        """Record `values` for the state's current step."""
        step, seconds = self.state.step, self.state.compute_seconds
        images = (step - self._last[0]) * self.batch_size
        speed = {"images_per_second": images / max(seconds - self._last[1], 1e-9)}
        self._last = (step, seconds)
        self.bar.update(step, values | speed)
        self.accelerator.log(values | speed, step=step)
        if self.file:
            self.file.write({"step": step, "seconds": seconds} | values | speed)

    def __enter__(self) -> Self:
        if self.accelerator.log_with:
            self.accelerator.init_trackers("namm")
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        if self.file:
            self.file.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()
