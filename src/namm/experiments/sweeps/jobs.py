"""Cells as jobs of submitit: processes of this machine, or Slurm's.

A job is the same run as any other, so it may be ended at any moment: put into the queue again, it goes on from its last
checkpoint. What became of a cell is read from its folder, whatever became of its job.
"""

import getpass
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from namm.errors import FolderInUseError, Interrupted, NammError, RunFolderError, UsageError
from namm.experiments.engine.folder import read_failure
from namm.experiments.engine.processes import is_main, rank_zero_output
from namm.experiments.engine.run import Logger
from namm.experiments.sweeps.cell import JOBS, Cell, CellOutcome, Jobs, attempt, in_one_line
from namm.files import read_json, write_json

INSTALL = "pip install -c constraints.txt -e '.[slurm]'"
NO_LIMIT = 60 * 24 * 365
"""Minutes that a job of this machine may take."""
REQUEUES = 1000
"""How often Slurm's time limit may cut a job short before it counts as failed."""
DEFAULTS = {"name": "namm", "timeout_min": 720}
"""What Slurm is asked for where nothing else is said; a job that its time limit ends is queued again and goes on."""
GRACE = 120.0
"""Seconds in which Slurm, having asked a job to end, sends the signal upon which submitit queues it again."""
LOOK_SECONDS, LOOKS = 120.0, 3
"""A job that is not in Slurm's queue when that is looked at so many times, so far apart, is gone."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Variable under which Python imports nothing from the current folder."""


@dataclass(frozen=True)
class Job:
    """The work of one job: a cell and its folder."""

    cell: Cell
    folder: Path
    gpu: str | None = None  # where this machine's are given out; all that are visible otherwise
    threads: int | None = None  # of the CPU, unless the environment says how many
    grace: float = 0.0  # seconds to wait, when it was asked to end, for being put in the queue again

    def __call__(self) -> None:
        """Run the cell, on all tasks of the job together, and leave the reason beside its log if it failed."""
        self._prepare()
        if is_main():
            _message_file(self.folder).unlink(missing_ok=True)
        with rank_zero_output():
            try:
                message = attempt(self.cell, self.folder, log=partial(print, flush=True), progress=True)
                if is_main():
                    write_json(_message_file(self.folder), {"message": message})
            except Interrupted:
                time.sleep(self.grace)  # on every task: only that of rank 0 can be queued again, whoever ends first
                raise

    def checkpoint(self) -> Any:
        """What submitit puts in the queue when the job is cut short: the same, since a run goes on by itself."""
        return _submitit().helpers.DelayedSubmission(self)

    def _prepare(self) -> None:
        """Set the environment that torch, not imported yet, will see; and hear being asked to end, on this machine."""
        submitit = _submitit()
        job = submitit.JobEnvironment()
        if job.cluster == "local":  # submitit ignores SIGTERM; see `_deaf` and `_end`
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu
        if self.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(self.threads))
        if job.num_tasks > 1:
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


# This machine


def run_locally(cells: Sequence[Cell], out: Path, jobs: Jobs, log: Logger) -> dict[str, CellOutcome]:
    """Run cells as processes, some at a time; where this one is interrupted, they save what they have and end first."""
    gpus = _gpus()
    cores = len(os.sched_getaffinity(0))
    at_once = max(1, min(len(cells), jobs.at_once or len(gpus) or cores // 2))
    executor = _submitit().AutoExecutor(folder=out / JOBS, cluster="local")
    executor.update_parameters(timeout_min=NO_LIMIT)
    outcomes: dict[str, CellOutcome] = {}
    queue, slots = list(cells), list(range(at_once))
    running: dict[int, tuple[Cell, Any]] = {}
    with _ending(running, log):
        while queue or running:
            while queue and slots:
                slot, cell = slots.pop(0), queue.pop(0)
                gpu = gpus[slot % len(gpus)] if gpus else None
                with _deaf(), _safe_path():
                    job = executor.submit(Job(cell, out / cell.name, gpu, max(1, cores // at_once)))
                    running[slot] = cell, job
                log(f"{cell.name}: running, log in {job.paths.stdout}")
            for slot, (cell, job) in list(running.items()):
                if job.done():
                    outcomes[cell.name] = _outcome(cell, out / cell.name, job, _message(out / cell.name), log)
                    del running[slot]
                    slots.append(slot)
            time.sleep(0.1)
    return outcomes


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started in this context do not hear Ctrl-C, upon which submitit would kill within a second.

    Neither do they hear SIGTERM, until a job is ready for it: it then comes, once, from `_end`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ending(running: dict[int, tuple[Cell, Any]], log: Logger) -> Iterator[None]:
    """End the jobs that are running where this context is left by an exception, and wait until they have saved."""
    try:
        yield
    except BaseException:
        jobs = [job for _, job in running.values() if not job.done()]
        if jobs:
            with suppress(OSError):  # stdout was closed
                log("waiting for the jobs to save what they have; a second Ctrl-C ends them at once")
        try:
            _end(jobs, signal.SIGTERM)
        except KeyboardInterrupt:
            _end(jobs, signal.SIGKILL)
        raise


def _end(jobs: Sequence[Any], number: signal.Signals) -> None:
    """Send a signal to the processes of these jobs, also to those that are only starting, and wait for their end."""
    import psutil

    signalled: set[int] = set()
    while left := [job for job in jobs if not job.done()]:
        for job in left:
            with suppress(psutil.NoSuchProcess):
                for task in psutil.Process(int(job.job_id)).children():
                    if task.pid not in signalled:
                        task.send_signal(number)
                        signalled.add(task.pid)
        time.sleep(0.1)


def _gpus() -> list[str]:
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    if not (count := torch.cuda.device_count()):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[:count] if visible else [str(k) for k in range(count)]


# Slurm


def run_on_slurm(cells: Sequence[Cell], out: Path, jobs: Jobs, log: Logger) -> dict[str, CellOutcome]:
    """Put cells into Slurm's queue and wait for them. They survive this process: a second call waits for them."""
    submitted = {cell.name: job for cell in cells if (job := _recorded(out, cell)) is not None}
    executor = _slurm_executor(out / JOBS, jobs)
    if new := [cell for cell in cells if cell.name not in submitted]:
        with _safe_path(), executor.batch():
            submitted |= {cell.name: executor.submit(Job(cell, out / cell.name, grace=GRACE)) for cell in new}
    for cell in cells:
        job = submitted[cell.name]
        write_json(_job_file(out, cell), {"job": job.job_id, "key": cell.key})
        log(f"{cell.name}: job {job.job_id}, log in {job.paths.stdout}")
    outcomes: dict[str, CellOutcome] = {}
    queue = _Queue()
    try:
        while len(outcomes) < len(cells):
            queue.look()
            for cell in (cell for cell in cells if cell.name not in outcomes):
                job, folder = submitted[cell.name], out / cell.name
                if job.done():
                    outcomes[cell.name] = _outcome(cell, folder, job, _message(folder), log)
                elif queue.has_lost(job):
                    _job_file(out, cell).unlink(missing_ok=True)
                    outcomes[cell.name] = _outcome(cell, folder, job, None, log)
            time.sleep(1.0)
    except KeyboardInterrupt:
        log("Slurm's jobs go on without this process: the same command waits for them again")
        raise
    return outcomes


class _Queue:
    """Slurm's queue, looked at now and then: submitit waits for ever for a job that was preempted or forgotten."""

    def __init__(self) -> None:
        self._looks: list[set[str]] = []
        self._last = -LOOK_SECONDS

    def look(self) -> None:
        """See which jobs are there, unless that was done a moment ago, or Slurm does not answer."""
        if time.monotonic() - self._last < LOOK_SECONDS:
            return
        self._last = time.monotonic()
        command = ["squeue", "--noheader", "--array", "--format=%i", f"--user={getpass.getuser()}"]
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
            self._looks = [*self._looks, set(listed.split())][-LOOKS:]

    def has_lost(self, job: Any) -> bool:
        """Whether it was there at none of the last looks."""
        return len(self._looks) == LOOKS and not any(job.job_id in look for look in self._looks)


def _slurm_executor(folder: Path, jobs: Jobs) -> Any:
    submitit = _submitit()
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=REQUEUES)
    except RuntimeError as error:
        raise UsageError(f"there is no Slurm here ({error}): --on local runs the cells on this machine.") from error
    shared = submitit.AutoExecutor._typed_parameters()
    parameters = {key if key in shared else f"slurm_{key}": value for key, value in jobs.slurm.items()}
    if jobs.at_once is not None:
        parameters["slurm_array_parallelism"] = jobs.at_once
    try:
        executor.update_parameters(**DEFAULTS | parameters)
    except (NameError, ValueError, AssertionError) as error:
        raise UsageError(f"submitit refuses these parameters of Slurm: {' '.join(str(error).split())}") from error
    return executor


def _job_file(out: Path, cell: Cell) -> Path:
    """Where the number of a cell's job is kept, and the settings that it runs with, as a key."""
    return out / JOBS / f"{cell.name}.json"


def _recorded(out: Path, cell: Cell) -> Any:
    """The job of a cell that an earlier process submitted, if it is not done yet."""
    if not _job_file(out, cell).exists():
        return None
    record = read_json(_job_file(out, cell))
    if not isinstance(record, dict) or not isinstance(record.get("job"), str):
        raise RunFolderError(f"{_job_file(out, cell)} names no job of Slurm: remove it.")
    job = _submitit().SlurmJob(folder=out / JOBS, job_id=record["job"])
    if job.done(force_check=True):
        return None
    if record.get("key") != cell.key:
        raise FolderInUseError(
            f"job {job.job_id} of Slurm is still at work on {cell.name}, with other settings: wait for it, or end it "
            f"with `scancel {job.job_id}`."
        )
    return job


# Both


@contextmanager
def _safe_path() -> Iterator[None]:
    """Jobs submitted in this context do not import what lies in the current folder, as `python -m` would."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise UsageError(f"cells run as jobs through submitit, which is not installed: {INSTALL}") from error
    return submitit


def _message_file(folder: Path) -> Path:
    return folder.parent / JOBS / f"{folder.name}.message.json"


def _message(folder: Path) -> str | None:
    """Why the cell in `folder` failed, as its job left it; None where it did not, or the job ended before.

    It is JSON: a pickle that lies there could run anything.
    """
    try:
        message = read_json(_message_file(folder))["message"]
    except (NammError, LookupError, TypeError):  # whatever ended the job, the cell's folder knows more
        return None
    return message if isinstance(message, str) else None


def _outcome(cell: Cell, folder: Path, job: Any, message: str | None, log: Logger) -> CellOutcome:
    """What became of a cell whose job has ended and left a message, or none."""
    try:
        error = None
        if not cell.is_complete(folder):
            error = read_failure(folder, cell.key) or message
            error = error or f"its job ended before its work: see {job.paths.stderr}"
    except NammError as unreadable:
        error = in_one_line(unreadable)
    log(f"{cell.name}: {'done' if error is None else f'failed: {error}'}")
    return CellOutcome(cell, folder, error)
