"""One training loop for every objective, `train`; it never loses work.

Every random number of step s (order of the data, noise, dropout) is a function of (seed, s), so the state of a
training is its step, its weights, their average and the optimiser's moments: that is what a checkpoint holds, and a
run that was killed and started again ends with the same bits (on CPU) as one that was not. For the same reason n
processes that share a batch see what one process would see: each draws the whole batch's numbers and takes its slice.

Before the first step one is rehearsed, so that what does not fit into memory is refused within seconds. A budget in
minutes becomes a number of steps by a few steps that are timed and undone. They may have met a busy moment of the
machine, so the number is estimated anew from the steps made, at the marks of `replan_steps` and nowhere else. The state
is saved at each: a resumed training keeps the number.
"""

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from namm.clock import clock
from namm.datasets.batches import Images, Order, batches, check_held_out, check_images, describe, in_chunks, to_tensor
from namm.errors import Interrupted, MemoryShortage, NammWarning, TrainingError, UsageError
from namm.files import Claim, owned, sweep, write_json
from namm.formatting import format_number, html_table
from namm.gpu import Recorded, can_record, compile_options, use_channels_last
from namm.memory import peak, reset_peak, shortage, step_on_copies
from namm.numerics import autocast, backends, fold, generator, seed_torch
from namm.training.checkpoint import Checkpoint, CheckpointFolder, write
from namm.training.log import Log, LossAverages, installed_trackers
from namm.training.objectives import Losses, Objective
from namm.training.optimisers import build, kinds
from namm.training.settings import (
    CHOSEN,
    MEASURED,
    Budget,
    TrainSettings,
    evenly,
    learning_rate,
    planned_steps,
    replan_steps,
)
from namm.training.state import FlatWeights, TrainingState

RESULT = "result.json"  # what a finished training did, in its folder
WARM_UP = 3  # steps not timed, in which code is compiled and recorded
GROUP = 8  # steps timed together on a GPU, where waiting for each would be counted too
SLOW = 2.0  # seconds over compute seconds of a step from which on a user who asked for minutes is warned


@dataclass(frozen=True)
class TrainResult:
    """What a training did.

    Attributes:
        steps: Updates made, over all resumptions.
        images: Images seen, over all processes and resumptions.
        compute_seconds: Time spent in training steps alone: no validation, input/output or compilation.
        losses: The last averages of the loss terms, and of the validation terms as `val/…`.
        folder: Where everything is kept, if anywhere.
        kept_step: The step whose weights were kept, where a watch chose them; 0 are those it began with.
        collapsed: Whether a watch ended the training early.
        budget: What was asked for, such as "2 minutes"; `steps` and `compute_seconds` are what was used.
        averages: Further averages of the weights (`TrainSettings.averages`) at the last step: by decay, the trained
            tensors and buffers by name, as `load_state_dict(…, strict=False)` takes them. Their validation losses are
            among `losses`, as `val@DECAY/…`.
    """

    steps: int
    images: int
    compute_seconds: float
    losses: Mapping[str, float]
    folder: Path | None
    kept_step: int | None = None
    collapsed: bool = False
    budget: str = ""
    averages: Mapping[float, Mapping[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def averages_of(self, part: str) -> dict[float, dict[str, Tensor]]:
        """The averages of the objective's child `part`, with the names that it uses itself."""
        start = f"{part}."
        return {
            decay: {name.removeprefix(start): value for name, value in average.items() if name.startswith(start)}
            for decay, average in self.averages.items()
        }

    def _repr_html_(self) -> str:
        asked = {"asked for": self.budget} if self.budget else {}
        work = {"steps": self.steps, "images": self.images, "compute seconds": self.compute_seconds}
        kept = {} if self.kept_step is None else {"weights of step": self.kept_step}
        title = "training, ended by a collapse" if self.collapsed else "training"
        return html_table(title, {**asked, **work, **kept, **self.losses, "folder": self.folder}.items())


class Watch(Protocol):
    """Judges weights at every validation: the best are kept in the end, and a collapse ends the training."""

    def measure(self) -> dict[str, float]:
        """The figures of the weights that the objective now holds."""

    def improves(self, figures: Mapping[str, float], best: Mapping[str, float], start: Mapping[str, float]) -> bool:
        """Whether weights with these figures are to be kept instead of the best; `start` is before the first step."""

    def has_collapsed(self, figures: Mapping[str, float], start: Mapping[str, float]) -> bool:
        """Whether training has destroyed what it began with."""


def train(
    objective: Objective,
    data: tuple[Images, ...],
    settings: TrainSettings,
    *,
    validation: tuple[Images, ...] | None = None,
    folder: str | Path | None = None,
    description: Mapping[str, Any] | None = None,
    after_step: Callable[[], None] | None = None,
    watch: Watch | None = None,
    snapshots: Collection[int] = (),
    title: str = "training",
    progress: bool = True,
) -> TrainResult:
    """Minimise `objective` over its parameters that require gradients; they end as their moving average.

    Args:
        objective: The loss. Trained in place.
        data: One set of images (N, C, H, W) per tensor of a batch, shuffled independently; an epoch is a pass over the
            largest.
        settings: How.
        validation: Images for the validation losses, as `data`.
        folder: Where to keep checkpoints and logs. Called again with the same arguments, an unfinished training goes on
            and a finished one is read back; a folder that holds anything else is refused.
        description: What else tells this training from others, as JSON values; compared on resumption.
        after_step: Called after every update of the weights; may change them in place.
        watch: Judges the averaged weights at every validation and at the end; the best of them are kept.
        snapshots: Steps, besides the milestones, after which the averaged weights are kept in the folder.
        title: Name on the progress bar.
        progress: Show it.
    """
    for images in data:
        check_images(images)
    for images, held_out in zip(data, validation or (), strict=False):
        check_held_out(held_out, images)
    kinds(settings, objective, trainable(objective))  # an optimiser that has nothing to work on says so
    place = Path(folder) if folder is not None else None
    log_with = (installed_trackers() or None) if place else None
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=cpu, mixed_precision="no", log_with=log_with, project_dir=place)
    if place is None or not (place / RESULT).exists():
        rehearse(objective, data, settings, accelerator.device, world=accelerator.num_processes, title=title)
    with ExitStack() as stack:
        if place and accelerator.is_main_process:
            asked = {"settings": settings.identity(), **(description or {})}
            claim = Claim(place, "settings.json", "namm training", asked, leftovers=(CHOSEN,))
            claim.check()
            stack.enter_context(owned(place))
            claim.take()
            sweep(place)
        accelerator.wait_for_everyone()
        trainer = Trainer(
            objective, data, settings, validation, place, accelerator, after_step, watch, frozenset(snapshots), title
        )
        return trainer.run(progress)


def trainable(objective: Objective) -> list[nn.Parameter]:
    """What a training changes."""
    return [p for p in objective.parameters() if p.requires_grad]


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Note the first SIGTERM or Ctrl-C inside this context, so that work can be saved; the second is immediate.

    Signals reach the main thread only; elsewhere nothing is caught.
    """
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        request.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class Trainer:
    """The loop behind `train`, whose arguments it takes."""

    objective: Objective
    data: tuple[Images, ...]
    settings: TrainSettings
    validation: tuple[Images, ...] | None
    folder: Path | None
    accelerator: Accelerator
    after_step: Callable[[], None] | None
    watch: Watch | None
    snapshots: frozenset[int]
    title: str

    def __post_init__(self) -> None:
        s, objective = self.settings, self.objective
        self.device: torch.device = self.accelerator.device
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        if s.batch_size % self.world:
            raise UsageError(
                f"batch_size {s.batch_size} cannot be shared by {self.world} processes: make it a multiple."
            )
        self.seconds_asked = Budget.parse(s.budget).seconds
        self.sources = []
        for k, images in enumerate(self.data):
            seed = fold(s.seed, "data", k)
            order = Order(images.shape[0], s.batch_size, seed, rank=self.rank, world=self.world)
            self.sources.append(batches(images, order, self.device, step_memory(objective)))
        objective.to(self.device).train()
        weights = trainable(objective)
        if not weights:
            raise TrainingError("the objective has no parameter that requires a gradient: there is nothing to train.")
        self.dtype = weights[0].dtype
        use_channels_last(objective, self.device)
        self._recorded: Recorded | None = None
        if s.compile and self.world == 1 and can_record(objective, self.device):
            self._recorded = Recorded(self._gradients)
        elif s.compile:
            torch.compiler.reset()  # so many shapes may be compiled in a process, and others' do not count
            numbers = s.batch_size * math.prod(self.data[0].shape[1:])
            objective.compile(fullgraph=True, options=compile_options(objective, self.device, numbers, self.world))
        self.model = self.accelerator.prepare(objective)  # which may replace weights
        self.flat = FlatWeights(weights, kinds(s, objective, weights))
        self.optimisers = build(s, self.flat, self.device)
        self.autocast = autocast(s.precision, self.device)
        self.state = TrainingState(objective, self.flat, self.optimisers, s.ema_decay, s.averages)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", s.keep) if self.folder else None

    def run(self, progress: bool) -> TrainResult:
        """Resume or start, train to the end, leave the averaged weights in the objective."""
        state, s = self.state, self.settings
        with ExitStack() as stack:
            stack.callback(self._release)
            stack.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
            stack.enter_context(backends(s.precision, self.device))
            self._start_watch()
            if not self._resume():
                state.total = self._count_steps()
                self._save()
            elif s.compile and state.step < state.total:
                with state.undone():
                    self._warm_up()
            if state.step < state.total:
                stop = stack.enter_context(stop_requests())
                log = Log(self.accelerator, self.folder, state, s, title=self.title, visible=progress)
                self._loop(stack.enter_context(closing(log)), stop)
        state.copy_result_to_live()
        self.objective.eval()
        result = TrainResult(
            state.step,
            state.step * s.batch_size,
            state.compute_seconds,
            state.losses,
            self.folder,
            state.watched.get("kept_step"),
            state.watched.get("collapsed", False),
            s.budget,
            {decay: ema.average for decay, ema in state.averages.items()},
        )
        if self.folder and self.accelerator.is_main_process:
            facts = {name: value for name, value in vars(result).items() if name != "averages"}
            write_json(self.folder / RESULT, {**facts, "folder": None})
        return result

    def _release(self) -> None:
        """Give weights memory of their own, and that of a recording back."""
        self._recorded = None
        self.flat.release()

    def _resume(self) -> bool:
        """Load the newest good checkpoint, if there is one."""
        if self.checkpoints is None:
            return False
        with self.accelerator.main_process_first():
            checkpoint = self.checkpoints.latest()
        self.accelerator.wait_for_everyone()
        if checkpoint is not None:
            self.state.restore(checkpoint)
            if self.accelerator.is_main_process:
                self.checkpoints.prune()
            began = checkpoint.facts.get("processes", self.world)  # version 0.1 kept none
            if began != self.world and self.accelerator.is_main_process:
                warnings.warn(
                    f"{self.title} goes on with {self.world} processes and was saved by {began}: it sees the same "
                    "images and noise, but rounding and dropout differ, so it will not end with the same bits.",
                    NammWarning,
                    stacklevel=2,
                )
        return checkpoint is not None

    # How many steps

    def _count_steps(self) -> int:
        """Turn the budget into a number of steps; compilation, if any, happens here too."""
        steps = Budget.parse(self.settings.budget).steps(
            max(images.shape[0] for images in self.data), self.settings.batch_size
        )
        if steps is None or self.settings.compile:
            with self.state.undone():
                self._warm_up()
                return steps or self._first_estimate()
        return steps

    def _warm_up(self) -> None:
        """Make the first steps, which take longer than others."""
        for step in range(WARM_UP):
            self._update(step)

    def _first_estimate(self) -> int:
        """Steps that a budget in minutes allows, from the lower quartile of a few: the machine may be busy now."""
        group = GROUP if self.device.type == "cuda" else 1
        times, began = [], time.perf_counter()
        for k in range(MEASURED):
            start, first = clock(self.device), WARM_UP + group * k
            for step in range(first, first + group):
                self._update(step)
            times.append((clock(self.device) - start) / group)
        slower = (time.perf_counter() - began) / max(group * sum(times), 1e-9)
        if slower > SLOW and self.accelerator.is_main_process:
            warnings.warn(
                f"{self.title}: {self.settings.budget} of compute will take about {format_number(slower, '.2g')} times "
                f"as long here: other programs use the processors, or PyTorch's {torch.get_num_threads()} threads are "
                "too many for them (set OMP_NUM_THREADS).",
                NammWarning,
                stacklevel=2,
            )
        each = self._mean_over_processes(float(torch.tensor(times).quantile(0.25)))
        return planned_steps(self.seconds_asked or 0.0, 1, each)

    def _replan(self) -> None:
        """Set the number of steps to what the steps made so far say that a budget in minutes allows."""
        spent = self._mean_over_processes(self.state.compute_seconds)
        self.state.total = planned_steps(self.seconds_asked or 0.0, self.state.step, spent)

    def _mean_over_processes(self, value: float) -> float:
        return float(self.accelerator.reduce(torch.tensor(value, device=self.device), reduction="mean"))

    # Training

    def _marks(self) -> dict[str, frozenset[int]]:
        """The steps after which there is something to do besides training, for the number of steps planned now."""
        s, total, none = self.settings, self.state.total, frozenset[int]()
        return {
            "validate": evenly(s.validations, total) if self.validation else none,
            "judge": evenly(max(1, s.validations), total) if self.watch else none,
            "snapshot": evenly(s.milestones, total) | self.snapshots if self.folder else none,
            "replan": replan_steps(total) if self.seconds_asked else none,
        }

    def _loop(self, log: Log, stop: threading.Event) -> None:
        s, state, marks = self.settings, self.state, self._marks()
        averages = LossAverages.from_json(state.running, self.device)
        saved, started = time.monotonic(), clock(self.device)
        while state.step < state.total:
            averages.add(self._update(state.step), step=state.step)
            state.average(state.step)
            state.step += 1
            due = {name for name, steps in marks.items() if state.step in steps}
            last = state.step == state.total
            reporting = last or state.step % s.log_every == 0 or bool(due - {"snapshot"})
            # Processes that share a batch have each a part of the running sums, and keep none: they save with a line.
            is_time = (self.world == 1 or reporting) and time.monotonic() - saved >= s.checkpoint_seconds
            saving = last or "replan" in due or is_time
            stopping = stop.is_set() if self.world == 1 else reporting and self._in_any_process(stop.is_set())
            if not (reporting or saving or stopping or due):
                continue
            state.compute_seconds += clock(self.device) - started
            self._require_finite(averages)
            if "replan" in due:
                self._replan()
                marks = self._marks()
                due = {name for name, steps in marks.items() if state.step in steps}
            if reporting:
                values = self._means(averages) | (self._validate() if "validate" in due else {})
                values |= self._judge() if "judge" in due else {}
                state.losses |= values
                log.write(values | {"learning_rate": self.optimisers[0].param_groups[0]["lr"]})
                averages = LossAverages()
            if "snapshot" in due:
                self._snapshot()
            if saving or stopping or state.step == state.total:
                state.running = averages.as_json()
                self._save()
                saved = time.monotonic()
            if stopping and state.step < state.total:
                raise Interrupted(
                    f"{self.title} was asked to stop at step {state.step} of {state.total} and saved its state: "
                    "the same command goes on from there."
                )
            started = clock(self.device)

    def _update(self, step: int) -> Losses:
        """One step of the optimisers."""
        s = self.settings
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(s, step, self.state.total or MEASURED)
        seed_torch(fold(s.seed, "dropout", step, self.rank), self.device)
        batch = tuple(source.batch(step).to(self.dtype) for source in self.sources)
        rng = generator(s.seed, "noise", step, device=self.device)
        draws = self.objective.draw_whole(batch, s.batch_size, rng)
        share = s.batch_size // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        gradients = self._gradients if self._recorded is None else self._recorded
        losses = gradients(*batch, *(draw[mine] for draw in draws))
        if s.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.flat.vectors, s.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        if self.after_step is not None:
            self.after_step()
        return losses

    def _gradients(self, *tensors: Tensor) -> Losses:
        """The losses of a batch and its draws; their gradients end in the flat weights'."""
        with self.autocast:
            losses: Losses = self.model(*tensors)
        self.accelerator.backward(losses["loss"])
        self.flat.gather()
        return losses

    def _validate(self) -> dict[str, float]:
        """Validation losses of the averaged weights, as `val/…`; those of further averages as `val@DECAY/…`."""
        averages = {"val": self.state.ema} | {f"val@{decay}": ema for decay, ema in self.state.averages.items()}
        found: dict[str, float] = {}
        for place, ema in averages.items():
            with ema.applied(), self.autocast:
                losses = validate(self.objective, self.validation or (), self.settings, self.device, self.dtype)
            found |= {name.replace("val", place, 1): value for name, value in losses.items()}
        return found

    def _start_watch(self) -> None:
        """Measure what training begins with; a checkpoint that knows it better replaces this."""
        if self.watch is not None:
            figures = self._figures(self.watch)
            self.state.watched = {"start": figures}
            self.state.keep(figures)

    def _judge(self) -> dict[str, float]:
        """The watch's figures as `val/…`; the best weights are kept, and a collapse makes this step the last."""
        assert self.watch is not None
        state, figures = self.state, self._figures(self.watch)
        start, best = state.watched["start"], state.watched["best"]
        if self.watch.improves(figures, best, start):
            state.keep(figures)
        if self.watch.has_collapsed(figures, start):
            state.watched["collapsed"] = True
            state.total = state.step
        return {f"val/{name}": value for name, value in figures.items()}

    def _figures(self, watch: Watch) -> dict[str, float]:
        """What `watch` measures of the averaged weights, the same in all processes so that all decide alike."""
        self.objective.eval()
        with self.state.ema.applied():
            figures = [watch.measure()]
        self.objective.train()
        return broadcast_object_list(figures)[0] if self.world > 1 else figures[0]

    # Keeping and judging

    def _save(self) -> None:
        if self.checkpoints and self.accelerator.is_main_process:
            kept = self.state.checkpoint()
            facts = {**kept.facts, "processes": self.world}
            self.checkpoints.save(self.state.step, Checkpoint(kept.tensors, facts))

    def _snapshot(self) -> None:
        if self.folder and self.accelerator.is_main_process:
            write(self.folder / "milestones" / f"step-{self.state.step:09d}.safetensors", self.state.snapshot())

    def _means(self, averages: LossAverages) -> dict[str, float]:
        """Mean of every term over the steps since the last line of the log and over all processes."""
        return {name: float(self.accelerator.reduce(mean, reduction="mean")) for name, mean in averages.means().items()}

    def _in_any_process(self, here: bool) -> bool:
        """Whether `here` is true in any process; all of them ask at the same step."""
        flag = torch.tensor(float(here), device=self.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def _require_finite(self, averages: LossAverages) -> None:
        """Stop, keeping the last good checkpoint, if a loss or a weight is not a finite number."""
        self.flat.require_in_place()
        bad = averages.first_not_finite()
        if bad is None and all(bool(vector.isfinite().all()) for vector in self.flat.vectors):
            return
        bad = self.state.step - 1 if bad is None else bad
        kept = self.checkpoints.paths()[-1:] if self.checkpoints else []
        raise TrainingError(
            f"{self.title} met a loss or weight that is not a finite number at step {bad}. "
            f"Its batch: {'; '.join(describe(source.batch(bad)) for source in self.sources)}. "
            + (f"The last good checkpoint, {kept[0]}, is kept. " if kept else "")
            + "Try a smaller learning_rate, clip 1.0, or precision fp32, in another folder."
        )


@torch.no_grad()
def validate(
    objective: Objective,
    images: tuple[Images, ...],
    settings: TrainSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Mean of every term on held-out images, as `val/…`, in evaluation mode and with the same draws every time."""
    averages = LossAverages()
    objective.eval()
    streams = [in_chunks(each, settings.batch_size) for each in images]
    for k, rows in enumerate(zip(*streams, strict=False)):
        n = min(len(row) for row in rows)
        batch = tuple(row[:n].to(device, dtype) for row in rows)
        draws = objective.draw(batch, generator(settings.seed, "validation", k, device=device))
        averages.add(objective.forward(*batch, *draws), weight=n)
    objective.train()
    return {f"val/{name}": float(mean) for name, mean in averages.means().items()}


# Memory


_rehearsed: WeakKeyDictionary[Objective, tuple[TrainSettings, int]] = WeakKeyDictionary()


def rehearse(
    objective: Objective,
    data: tuple[Images, ...],
    settings: TrainSettings,
    device: torch.device,
    *,
    world: int = 1,
    title: str = "training",
) -> None:
    """Refuse a training whose steps do not fit into memory, before anything is spent on it; once for each.

    The step is the training's own, forward and backward at the full batch, with as much set aside as the optimiser and
    the average will take. It works on copies of the weights and on random numbers of its own, so that a training ends
    with the same bits with it and without it. A compiled step may need less memory than the plain one that is tried
    here, so half a batch is tried for it; the whole one follows in the warm-up that compiles it. `data` give the shapes
    of the batches, which `world` processes share: images serve for mirror images as well.
    """
    if objective in _rehearsed and _rehearsed[objective][0] == settings:
        return
    objective.to(device).train()
    dtype = next((p.dtype for p in objective.parameters() if p.requires_grad), torch.float32)
    copies = 3 if world == 1 else 4  # two moments, all gradients together, and what the processes exchange
    copies += len(settings.averages)
    share = settings.batch_size // world
    tried = -(-share // 2) if settings.compile else share

    def inputs(size: int) -> tuple[Tensor, ...]:
        some = (to_tensor(images[: min(size, images.shape[0])]) for images in data)
        batch = tuple(rows[torch.arange(size) % len(rows)].to(device, dtype) for rows in some)
        return (*batch, *objective.draw(batch, generator(settings.seed, "dry step", device=device)))

    def attempt(size: int) -> None:
        step_on_copies(objective, lambda: inputs(size), autocast(settings.precision, device), copies)

    reset_peak(device)
    if (failure := shortage(attempt, tried, device)) is not None:
        problem, fitting = failure[0], failure[1] * world
        where = f"the memory of {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "memory"
        smaller = f"a batch_size of {fitting} fits" if fitting else "not even a single image fits"
        narrower = settings.precision == "fp32" and device.type == "cuda"
        others = "smaller networks or images" + (", or precision bf16 (auto)" if narrower else "")
        raise MemoryShortage(
            f"{title}: a step with batch_size {settings.batch_size} does not fit into {where} ({problem}); {smaller}. "
            f"Take {'that, ' if fitting else ''}{others}, or free what other programs hold."
        )
    _rehearsed[objective] = settings, peak(device) * share // tried


def step_memory(objective: Objective) -> int:
    """Bytes of the GPU that a step of `objective` took when it was rehearsed; 0 on a CPU, which does not count them."""
    return _rehearsed[objective][1] if objective in _rehearsed else 0
