"""One training loop for every objective, `train`; it never loses work.

Every random number of step s (order of the data, noise, dropout) is a function of (seed, s), so the state of a
training is its step, its weights, their average and the optimiser's moments: that is what a checkpoint holds, and a
run that was killed and started again ends with the same bits (on CPU) as one that was not. For the same reason n
processes that share a batch see what one process would see: each draws the whole batch's numbers and takes its slice.

Before the first step one is rehearsed, so that what does not fit into memory is refused within seconds, and a budget in
minutes becomes a number of steps, once, by steps that are timed and undone (`namm.training.step_cost`).
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from namm.datasets.batches import Images, Order, batches, check_held_out, check_images, describe, in_chunks
from namm.errors import Interrupted, TrainingError, UsageError
from namm.files import owned, remove_partials, write_json
from namm.formatting import html_table
from namm.gpu import Recorded, can_record, compile_options, lay_out
from namm.numerics import autocast, backends, fold, generator, seed_torch
from namm.training.checkpoint import CheckpointFolder, claim, write
from namm.training.log import Log, LossAverages, installed_trackers
from namm.training.objectives import Losses, Objective
from namm.training.settings import Budget, TrainSettings, evenly, learning_rate
from namm.training.state import FlatWeights, TrainingState
from namm.training.step_cost import TIMED, clock, rehearse, seconds_per_step, step_memory, warm_up

RESULT = "result.json"  # what a finished training did, in its folder


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
    """

    steps: int
    images: int
    compute_seconds: float
    losses: Mapping[str, float]
    folder: Path | None
    kept_step: int | None = None
    collapsed: bool = False

    def _repr_html_(self) -> str:
        work = {"steps": self.steps, "images": self.images, "compute seconds": self.compute_seconds}
        kept = {} if self.kept_step is None else {"weights of step": self.kept_step}
        title = "training, ended by a collapse" if self.collapsed else "training"
        return html_table(title, {**work, **kept, **self.losses, "folder": self.folder}.items())


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
        title: Name on the progress bar.
        progress: Show it.
    """
    for images in data:
        check_images(images)
    for images, held_out in zip(data, validation or (), strict=False):
        check_held_out(held_out, images)
    place = Path(folder) if folder is not None else None
    trackers = installed_trackers() if place else []
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="no", log_with=trackers or None, project_dir=place
    )
    if place is None or not (place / RESULT).exists():
        rehearse(objective, data, settings, accelerator.device, world=accelerator.num_processes, title=title)
    with ExitStack() as stack:
        if place and accelerator.is_main_process:
            stack.enter_context(owned(place))
            claim(place, {"settings": settings.identity(), **(description or {})})
        accelerator.wait_for_everyone()
        trainer = Trainer(objective, data, settings, validation, place, accelerator, after_step, watch, title)
        return trainer.run(progress)


class StopRequest:
    """Whether, and by which signal, the process was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Remember the first SIGTERM or Ctrl-C inside this context, so that work can be saved; the second is immediate.

    Signals reach the main thread only; elsewhere nothing is caught.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def remember(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, remember)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    """The loop behind `train`, whose arguments it takes."""

    def __init__(
        self,
        objective: Objective,
        data: tuple[Images, ...],
        settings: TrainSettings,
        validation: tuple[Images, ...] | None,
        folder: Path | None,
        accelerator: Accelerator,
        after_step: Callable[[], None] | None,
        watch: Watch | None,
        title: str,
    ) -> None:
        self.objective, self.settings, self.validation, self.watch = objective, settings, validation, watch
        self.folder, self.accelerator, self.title = folder, accelerator, title
        self.device: torch.device = accelerator.device
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.images, self.shape = max(images.shape[0] for images in data), tuple(data[0].shape[1:])
        self.sources = [
            batches(images, self._order(images, fold(settings.seed, "data", k)), self.device, step_memory(objective))
            for k, images in enumerate(data)
        ]
        self._recorded: Recorded | None = None
        self._prepare(after_step)
        self.state = TrainingState(objective, self.flat, self.optimiser, settings.ema_decay)
        self.checkpoints = CheckpointFolder(folder / "checkpoints", settings.keep) if folder else None

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
                    warm_up(self._update)
            if state.step < state.total:
                stop = stack.enter_context(stop_requests())
                where = (self.accelerator, self.folder, state)
                log = Log(*where, title=self.title, batch_size=s.batch_size, visible=progress)
                self._loop(stack.enter_context(log), stop)
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
        )
        if self.folder and self.accelerator.is_main_process:
            write_json(self.folder / RESULT, {**asdict(result), "folder": None})
        return result

    def _release(self) -> None:
        """Give weights memory of their own, and that of a recording back."""
        self._recorded = None
        self.flat.release()

    # Setting up

    def _order(self, images: Images, seed: int) -> Order:
        batch = self.settings.batch_size
        if batch % self.world:
            raise UsageError(f"batch_size {batch} cannot be shared by {self.world} processes: make it a multiple.")
        return Order(images.shape[0], batch, seed, rank=self.rank, world=self.world)

    def _prepare(self, after_step: Callable[[], None] | None) -> None:
        s = self.settings
        self.objective.to(self.device).train()
        weights = [p for p in self.objective.parameters() if p.requires_grad]
        if not weights:
            raise TrainingError("the objective has no parameter that requires a gradient: there is nothing to train.")
        self.dtype = weights[0].dtype
        lay_out(self.objective, self.device)
        if s.compile and self.world == 1 and can_record(self.objective, self.device):
            self._recorded = Recorded(self._gradients)
        elif s.compile:
            torch.compiler.reset()  # so many shapes may be compiled in a process, and others' do not count
            how = compile_options(self.objective, self.device, s.batch_size * math.prod(self.shape), self.world)
            self.objective.compile(fullgraph=True, options=how)
        self.model = self.accelerator.prepare(self.objective)  # which may replace weights
        self.flat = FlatWeights(weights)
        self.optimiser = torch.optim.Adam(self.flat.vectors, lr=s.learning_rate, betas=s.betas, fused=True)
        if after_step is not None:
            self.optimiser.register_step_post_hook(lambda *_: after_step())
        self.autocast = autocast(s.precision, self.device)

    def _resume(self) -> bool:
        """Load the newest good checkpoint, if there is one."""
        if self.checkpoints is None:
            return False
        if self.accelerator.is_main_process:
            remove_partials(self.checkpoints.folder)
        with self.accelerator.main_process_first():
            checkpoint = self.checkpoints.latest()
        self.accelerator.wait_for_everyone()
        if checkpoint is not None:
            self.state.restore(checkpoint)
        return checkpoint is not None

    def _count_steps(self) -> int:
        """Turn the budget into a number of steps, once; compilation, if any, happens here too."""
        budget = Budget.parse(self.settings.budget)
        steps = budget.steps(self.images, self.settings.batch_size)
        if steps is None:
            seconds = 60 * budget.amount
            with self.state.undone():
                each = seconds_per_step(self._update, self.accelerator, seconds)
            return max(1, round(seconds / each))
        if self.settings.compile:
            with self.state.undone():
                warm_up(self._update)
        return steps

    # Training

    def _loop(self, log: Log, stop: StopRequest) -> None:
        s, state = self.settings, self.state
        validations = evenly(s.validations, state.total) if self.validation else frozenset()
        watched = evenly(max(1, s.validations), state.total) if self.watch else frozenset()
        milestones = evenly(s.milestones, state.total) if self.folder else frozenset()
        averages, saved, started = LossAverages(), time.monotonic(), clock(self.device)
        while state.step < state.total:
            averages.add(self._update(state.step), step=state.step)
            state.ema.update(state.step)
            state.step += 1
            last = state.step == state.total
            reporting = last or state.step % s.log_every == 0 or state.step in validations | watched
            saving = last or time.monotonic() - saved >= s.checkpoint_seconds
            stopping = bool(stop) if self.world == 1 else reporting and self._in_any_process(bool(stop))
            if not (reporting or saving or stopping or state.step in milestones):
                continue
            state.compute_seconds += clock(self.device) - started
            self._require_finite(averages)
            if reporting:
                values = self._means(averages) | (self._validate() if state.step in validations else {})
                values |= self._judge() if state.step in watched else {}
                state.losses |= values
                log.write(values | {"learning_rate": learning_rate(s, state.step - 1, state.total)})
                averages = LossAverages()
            if state.step in milestones:
                self._snapshot()
            if saving or stopping or state.step == state.total:
                self._save()
                saved = time.monotonic()
            if stopping and state.step < state.total:
                raise Interrupted(
                    f"{self.title} was asked to stop at step {state.step} of {state.total} and saved its state: "
                    "the same command goes on from there."
                )
            started = clock(self.device)

    def _update(self, step: int) -> Losses:
        """One step of the optimiser."""
        s = self.settings
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(s, step, self.state.total or TIMED)
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
        self.optimiser.step()
        return losses

    def _gradients(self, *tensors: Tensor) -> Losses:
        """The losses of a batch and its draws; their gradients end in the flat weights'."""
        with self.autocast:
            losses: Losses = self.model(*tensors)
        self.accelerator.backward(losses["loss"])
        self.flat.gather()
        return losses

    def _validate(self) -> dict[str, float]:
        """Validation losses of the averaged weights."""
        with self.state.ema.applied(), self.autocast:
            return validate(self.objective, self.validation or (), self.settings, self.device, self.dtype)

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
            measured = [watch.measure()]
        self.objective.train()
        return broadcast_object_list(measured)[0] if self.world > 1 else measured[0]

    # Keeping and judging

    def _save(self) -> None:
        if self.checkpoints and self.accelerator.is_main_process:
            self.checkpoints.save(self.state.step, self.state.checkpoint())

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
