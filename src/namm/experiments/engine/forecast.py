"""What `namm run --dry-run` says: which stages would run, for how long, and what memory they take; nothing is written.

Times come, in this order, from

- the record of a stage of the same key (the same settings, the same everything before it) in another run beside this
  one, or from the log of this one where it was cut short;
- a budget in minutes, or one that is derived from other stages (equal compute);
- a rehearsal of seconds: a few steps of each training, one evaluation of each network, a few images of the data.

A rehearsal does not know how busy the machine will be, nor what compilation, input and output take: its times are
rough, and too long where many images at once cost less than the few that were tried. Memory is counted: weights and
what an optimiser keeps of them, and the tensors that one step keeps for its gradients, in proportion to the batch.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from namm.clock import clock
from namm.constraints import Constraint
from namm.datasets.base import BLOCK
from namm.errors import NammError
from namm.evaluation import mmd
from namm.experiments.engine import build, build_models
from namm.experiments.engine.folder import (
    RECORD,
    TRAINING,
    Record,
    read_record,
    run_claim,
    stages_aside,
    steps_made,
)
from namm.experiments.engine.run import check_settings
from namm.experiments.engine.run_parts import AUTOENCODERS, untrained
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.stages import stage_keys, stages_until
from namm.experiments.engine.stages.model import EQUAL_COMPUTE
from namm.experiments.presets import Preset
from namm.formatting import ABSENT, format_duration, print_table
from namm.maps import MirrorMap
from namm.memory import step_on_copies
from namm.numerics import autocast, generator
from namm.reading import in_words
from namm.training.log import read_metrics
from namm.training.objectives import FinetuneObjective, MapObjective, Objective
from namm.training.settings import METRICS, Budget, TrainSettings
from namm.training.train_model import ModelObjective

REHEARSAL = 10.0
"""Seconds of compute that all rehearsals together may take, about: none begins after them."""
SLOW, QUICK = 2.0, 1.0
"""Seconds of a first try, with one image, from which it is the only one, and of a batch up to which that is tried."""
KEPT = 5
"""Tensors of the size of every weight: itself, its gradient, two moments and the average."""
BUSY = 2.0
"""Seconds over seconds of compute from which on a machine is called busy."""
TIMED = "rehearsed"


@dataclass(frozen=True)
class Expected:
    """A stage: whether it is done, how many seconds it would take, if that is known, and where that is known from.

    `whole` is what all of it costs in seconds of compute, also where a part is done: what equal compute goes by.
    """

    stage: str
    state: str
    seconds: float | None
    basis: str
    whole: float | None


@dataclass(frozen=True)
class Forecast:
    """All stages, and bytes of memory of the largest training; None where none could be rehearsed."""

    stages: tuple[Expected, ...]
    memory: int | None
    device: str
    slower: float = 1.0

    def show(self) -> None:
        """Print it."""
        rows = (
            (each.stage, each.state, ABSENT if each.seconds is None else format_duration(each.seconds), each.basis)
            for each in self.stages
        )
        print_table(["stage", "state", "would take", "from"], rows)
        to_do = [each for each in self.stages if each.state != "done"]
        seconds = [each.seconds for each in to_do if each.seconds is not None]
        if not to_do:
            print("everything is done: `namm run` would only say so")
            return
        more = " and what is not known" if len(seconds) < len(to_do) else ""
        print(f"about {format_duration(sum(seconds))}{more} on {self.device}")
        if any(each.basis.startswith(TIMED) for each in to_do):
            print("what was rehearsed is rough, and meant for a machine that does nothing else")
        if self.slower > BUSY:
            print(f"other programs use this one now: as it is, all takes about {self.slower:.0f} times as long")
        if self.memory is not None:
            print(f"memory: about {in_words(self.memory)} for the largest training, besides PyTorch's own")


def forecast(chosen: Preset, folder: Path, until: str | None = None) -> Forecast:
    """What a run of `chosen` in `folder` would do now; refuses what the run would refuse at once."""
    settings, stages = chosen.settings, stages_until(until, chosen.settings)
    run_claim(folder, chosen.experiment).check()
    check_settings(settings, stages)
    keys, rehearsal = stage_keys(settings), Rehearsal(settings)
    known: dict[str, Expected] = {}
    for stage in stages:
        expected = _on_record(stage.name, keys[stage.name], folder) or _by_settings(stage.name, rehearsal, known)
        known[stage.name] = expected
    return Forecast(tuple(known.values()), rehearsal.memory, _device_name(), rehearsal.slower)


def _device_name() -> str:
    device = build.device()
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads of a CPU"
    )


# From records


def _on_record(stage: str, key: str, run: Path) -> Expected | None:
    """What the stage's folder here, or one of the same key in a run beside this one, tells."""
    for folder in (run / stage, *stages_aside(run, stage)):
        record = _record(folder, key)
        if record is None:
            continue
        if record.is_complete(folder):
            return Expected(stage, "done", _cost(record), "its record", _cost(record))
        if (steps := steps_made(folder)) is not None and (pace := _logged_pace(folder)) is not None:
            made, planned = steps
            left, whole = pace * (planned - made), pace * planned
            return Expected(stage, f"goes on at step {made} of {planned}", left, "its log", whole)
    for folder in sorted(run.parent.glob(f"*/{stage}")):
        record = _record(folder, key) if folder.parent != run else None
        if record is not None and record.is_complete(folder):
            return Expected(stage, "to do", record.seconds, f"the same in {folder.parent}", _cost(record))
    return None


def _cost(record: Record) -> float:
    """Seconds of compute of a stage; of one that counts none, all its seconds."""
    return record.compute_seconds or record.seconds


def _record(folder: Path, key: str) -> Record | None:
    """The record of a stage of that key; None for any other, and for what cannot be read."""
    if not (folder / RECORD).exists():
        return None
    try:
        record = read_record(folder)
    except NammError:
        return None
    return record if record.key == key else None


def _logged_pace(folder: Path) -> float | None:
    """Seconds of compute per step, by the log of a training that was cut short."""
    log = folder / TRAINING / METRICS
    lines = read_metrics(log) if log.exists() else []
    return lines[-1]["seconds"] / lines[-1]["step"] if lines and lines[-1]["step"] else None


# From settings and a rehearsal


def _by_settings(stage: str, rehearsal: "Rehearsal", known: Mapping[str, Expected]) -> Expected:
    settings = rehearsal.settings
    parts: Mapping[str, Any] = {"mvae": settings.vae, "vae": settings.vae}
    train: TrainSettings | None = getattr(parts.get(stage, getattr(settings, stage, None)), "train", None)
    equal = {"dm": EQUAL_COMPUTE if settings.dm.equal_compute else (), "vae": ("map", "mvae")}.get(stage, ())
    if equal:
        costs = [known[name].whole for name in equal]
        total = None if None in costs else sum(cost for cost in costs if cost is not None)
        return Expected(stage, "to do", total, f"equal compute: {', '.join(equal)}", total)
    if train is not None and (seconds := Budget.parse(train.budget).seconds) is not None:
        rehearsal.step(stage, train)  # for its memory
        return Expected(stage, "to do", seconds, f"its budget, {train.budget}", seconds)
    seconds, basis = rehearsal.seconds(stage, train)
    return Expected(stage, "to do", seconds, basis, seconds)


class Rehearsal:
    """A few seconds of everything that a run does, on random images of the right shape."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory: int | None = None
        self.shape: tuple[int, int, int] = build.dataset(settings.data).shape
        self.device = build.device()
        self._compute = self._waited = 0.0

    def seconds(self, stage: str, train: TrainSettings | None) -> tuple[float | None, str]:
        """What a stage takes, and how that is known."""
        s = self.settings
        if stage == "data":
            found = _times(sum(s.data.sizes.values()), self._image()), "a few images"
        elif stage == "samples":
            found = self._sampling(s.samples.n + s.samples.n_val, s.samples.sampler.steps), "one evaluation"
        elif stage == "evaluate":
            found = self._evaluation(), "samples and √MMD², without KID and FID"
        elif stage == "repair":
            drawn, trained = self.seconds("samples", None)[0], self.seconds("finetune", s.finetune.train)[0]
            found = (None if drawn is None or trained is None else drawn + trained), "as samples and finetune"
        elif train is not None:
            found = self._training(stage, train)
        else:
            return None, "seconds, as a rule"
        return (None, "not rehearsed: too slow here") if found[0] is None else (found[0], f"{TIMED}: {found[1]}")

    def _training(self, stage: str, train: TrainSettings) -> tuple[float | None, str]:
        s = self.settings
        images = max(s.data.n_train, s.samples.n if stage == "finetune" else 0)
        steps, each = Budget.parse(train.budget).steps(images, train.batch_size) or 0, self.step(stage, train)
        validation = train.validations * s.data.n_val / train.batch_size / 3  # without gradients a step is a third
        trials = ", without the trials that choose σ_max and λ" if stage == "map" and s.map.tune else ""
        return _times(steps + validation, each), f"{steps} steps{trials}"

    def step(self, stage: str, train: TrainSettings) -> float | None:
        """Seconds of a training's step; its memory is counted."""
        objective = self._objective(stage)
        if objective is None:
            return None
        objective.to(self.device).train()
        saved: dict[int, int] = {}

        def attempt(size: int) -> None:
            images = tuple(self._images(size, k) for k in range(2 if stage == "finetune" else 1))
            draws = objective.draw(images, generator(0, "rehearsal", device=self.device))
            with _counting_saved() as storages:
                step_on_copies(objective, lambda: (*images, *draws), autocast(train.precision, self.device), 3)
            saved[size] = sum(storages.values())

        seconds = self._timed(attempt, train.batch_size)
        if seconds is not None:
            weights = sum(p.numel() for p in objective.parameters() if p.requires_grad)
            each = saved.get(2, 2 * saved[1]) - saved[1]  # without what does not grow with the batch, such as weights
            self.memory = max(4 * KEPT * weights + each * train.batch_size, self.memory or 0)
        return seconds

    def _timed(self, attempt: Callable[[int], None], size: int) -> float | None:
        """Seconds of `attempt(size)`, in proportion to those of fewer where it takes long; None where time is up."""
        if self._compute >= REHEARSAL:
            return None
        first = self._clocked(attempt, 1)  # which also warms up
        if first > SLOW:
            return first * size
        each = self._clocked(attempt, 2) / 2
        if each * size > min(QUICK, REHEARSAL - self._compute):
            return each * size
        return self._clocked(attempt, size)

    def _clocked(self, attempt: Callable[[int], object], size: int) -> float:
        """Seconds of compute of `attempt(size)`: those of an idle machine, however busy this one is now."""
        began, start = time.monotonic(), clock(self.device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            attempt(size)
        seconds = clock(self.device) - start
        self._compute += seconds
        self._waited += time.monotonic() - began
        return seconds

    @property
    def slower(self) -> float:
        """How many times as long as on an idle machine things took."""
        return self._waited / max(self._compute, 1e-9)

    def _images(self, size: int, k: int = 0) -> Tensor:
        return torch.rand((size, *self.shape), generator=generator(k, "rehearsal")).to(self.device)

    @cached_property
    def _rule(self) -> Constraint:
        return build.placed(self.settings.data.rule_to_try())

    @cached_property
    def _mirror(self) -> MirrorMap:
        return build_models.mirror(self.settings.map, self._images(2)).to(self.device)

    def _objective(self, stage: str) -> Objective | None:
        """What a stage trains, with its first weights."""
        s = self.settings
        if stage in ("map", "finetune"):
            asked = getattr(s, stage)
            kind = s.map.noise if stage == "map" else "uniform"
            how: Any = {
                "noise": build_models.noise(kind, asked.sigma_max),
                "weights": build_models.weights(asked.weights, 1.0),
            }
            if stage == "map":
                return MapObjective(self._mirror, self._rule, regulariser=build_models.regulariser(s.map), **how)
            mirror = build_models.mirror(s.map, self._images(2)).to(self.device)  # of its own: g is frozen in it
            return FinetuneObjective(mirror, self._rule, **how)
        if stage in ("mdm", "dm", "few", *AUTOENCODERS):
            return ModelObjective(untrained(stage, s, self.shape))
        return None

    def _image(self) -> float | None:
        """Seconds of drawing an image."""
        data = self.settings.data
        recipe = build.dataset(data)

        def draw(size: int) -> None:
            if hasattr(recipe, "ingredients"):
                recipe.draw(size, recipe.stream(data.seed, "train", 0))
            else:
                recipe.images(data.seed, "train", 0, size)

        return _times(1 / BLOCK, self._timed(draw, BLOCK))

    @cached_property
    def _evaluated(self) -> float | None:
        """Seconds of one evaluation of the score network, for an image."""
        s = self.settings
        model = build_models.diffusion(s.mdm.network, s.mdm.diffusion, self.shape, 0).to(self.device).eval()

        @torch.no_grad()
        def attempt(size: int) -> None:
            noise = self._images(size)
            with autocast(s.mdm.train.precision, self.device):
                model.denoise(noise, noise.new_ones(size))

        return _times(1 / BLOCK, self._timed(attempt, BLOCK))

    def _sampling(self, n: int, steps: int) -> float | None:
        return _times(n * steps, self._evaluated)

    def _evaluation(self) -> float | None:
        """Samples of all models, their milestones, and √MMD² of every row."""
        asked, s = self.settings.evaluate, self.settings
        models = 2 + s.repairs
        watched = sum(each.train.milestones for each in (s.mdm, s.dm)) * asked.milestone_samples
        drawn = self._sampling(models * asked.n + watched, asked.sampler.steps)
        size = min(asked.subset, 1000)
        x = self._images(2 * size).cpu()
        if drawn is None or self._compute >= REHEARSAL:
            return None
        subset = self._clocked(lambda n: mmd(x[:n], x[n:], subsets=1, size=n, device=self.device), size)
        rows = 4 + self._rule.has_project + s.repairs
        return drawn + rows * asked.mmd_subsets * subset


def _times(n: float, each: float | None) -> float | None:
    return None if each is None else n * each


@contextmanager
def _counting_saved() -> Iterator[dict[int, int]]:
    """Bytes of every storage that is kept for gradients inside this context, by address."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages
