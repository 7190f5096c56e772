"""Jobs: being asked to end on many tasks, on this machine and in Slurm's queue, with stand-ins for Slurm's commands."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from namm.errors import FolderInUseError, Interrupted
from namm.experiments.engine import processes
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.settings_file import to_yaml
from namm.experiments.presets import preset
from namm.experiments.sweeps import jobs
from namm.experiments.sweeps.cell import Cell, Jobs
from namm.experiments.sweeps.jobs import Job, run_locally, run_on_slurm
from namm.files import owned


def cell(name="a", until="data"):
    return Cell(name, preset("periodic"), until)


@pytest.mark.parametrize("first", [True, False])
def test_every_task_waits_to_be_queued_again_whichever_fails_first(tmp_path, monkeypatch, first):
    def interrupted(*_, **__):
        raise Interrupted("saved")

    slept = []
    monkeypatch.setattr(jobs, "attempt", interrupted)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(Job, "_prepare", lambda self: None)
    monkeypatch.setattr(processes, "world", lambda: 2)
    monkeypatch.setattr(processes, "first_to_fail", lambda: first)
    monkeypatch.setattr(processes, "wait_for_the_reason", lambda: None)
    with pytest.raises(Interrupted if first else SystemExit):
        Job(cell(), tmp_path, grace=7.0)()
    assert slept == [7.0]


# This machine


def unpickle():
    """What a job returned lies in the folder as a pickle, which could run anything of whoever left it there."""
    pytest.fail("a pickle was opened")


class Executor:
    """Takes jobs and has them done at once."""

    def __init__(self, folder, cluster):
        self.paths = SimpleNamespace(stdout=folder, stderr=folder)
        self.jobs, self.safe_paths = [], []

    def update_parameters(self, **_):
        pass

    def submit(self, job):
        self.jobs.append(job)
        self.safe_paths.append(os.environ.get("PYTHONSAFEPATH"))
        return SimpleNamespace(paths=self.paths, job_id="1", done=lambda: True, results=unpickle)


@pytest.mark.parametrize(("n", "asked", "threads"), [(1, None, 8), (2, None, 4), (9, None, 2), (2, 4, 4), (9, 1, 8)])
def test_few_cells_have_all_cores(tmp_path, monkeypatch, n, asked, threads):
    executors = []

    def make(**options):
        executors.append(Executor(**options))
        return executors[0]

    monkeypatch.setattr(jobs, "_submitit", lambda: SimpleNamespace(AutoExecutor=make))
    monkeypatch.setattr(jobs, "_gpus", list)
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=lambda _: None))
    run_locally([cell(str(k)) for k in range(n)], tmp_path, Jobs(asked), lambda _: None)
    assert [job.threads for job in executors[0].jobs] == [threads] * n


@pytest.mark.parametrize("before", [None, ""])
def test_only_jobs_are_kept_from_importing_what_lies_in_the_current_folder(tmp_path, monkeypatch, before):
    executor = Executor(tmp_path, "local")
    monkeypatch.setattr(jobs, "_submitit", lambda: SimpleNamespace(AutoExecutor=lambda **_: executor))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    run_locally([cell()], tmp_path, Jobs(), lambda _: None)
    assert executor.safe_paths == ["1"]
    assert os.environ.get("PYTHONSAFEPATH") == before  # a script that this process starts finds what lies beside it


@pytest.fixture
def heard():
    """Children hear Ctrl-C, also where these tests run in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_waits_until_jobs_have_saved(tiny_preset, tmp_path):
    """The signal goes, as from a terminal, to all processes at once."""
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny_preset))
    train = ["--map.train.budget", "1000000 steps", "--map.train.checkpoint-seconds", "100000"]
    command = ["sweep", "--config", "tiny.yaml", "--seeds", "0", "--until", "map", "--on", "local", "--out", "out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "namm", *command, *train],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run, deadline = tmp_path / "out" / "seed=0", time.monotonic() + 120
    try:
        while not (run / "map" / "training" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert "waiting for the jobs to save" in said
    assert "goes on where this one stopped" in errors
    assert "Traceback" not in errors
    with owned(run):  # which nobody holds any more
        assert read_record(run / "map").status == "running"
    (log,) = (tmp_path / "out" / "jobs").glob("*_log.err")
    assert "map was asked to stop at step" in log.read_text()


# Slurm


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for Slurm's commands: jobs are never run, and were preempted; the queue is what `queue` says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {
        "sbatch": "echo Submitted batch job 77",
        "srun": "",
        "sacct": "printf 'JobID|State|NodeList\\n77|PREEMPTED|here\\n'",
        "squeue": f"cat {tmp_path / 'queue'}",
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(jobs, "LOOK_SECONDS", 0.0)
    (tmp_path / "queue").write_text("")
    return tmp_path / "queue"


def test_a_job_that_is_in_the_queue_no_more_is_not_waited_for(slurm, tmp_path):
    found = run_on_slurm([cell()], tmp_path / "out", Jobs(), lambda _: None)
    assert "its job ended before its work" in found["a"].error
    assert not (tmp_path / "out" / "jobs" / "a.json").exists()


def test_a_job_that_is_in_the_queue_is_waited_for(slurm, monkeypatch):
    queue = jobs._Queue()
    listed = {"77": "76\n77\n", "78_1": "78_0\n78_1\n"}
    for number, text in listed.items():
        job = SimpleNamespace(job_id=number)
        for content, lost in (("", False), (text, False), ("", False), ("", False), ("", True), (text, False)):
            slurm.write_text(content)
            queue.look()
            assert queue.has_lost(job) is lost, (number, content)
        queue = jobs._Queue()
    slurm.unlink()  # Slurm does not answer: nothing is known
    for _ in range(2 * jobs.LOOKS):
        queue.look()
    assert not queue.has_lost(SimpleNamespace(job_id="77"))


def test_a_job_with_other_settings_is_not_taken_for_this_one(slurm, tmp_path, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    slurm.write_text("77\n")
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "time", SimpleNamespace(sleep=stop, monotonic=time.monotonic))
        with pytest.raises(KeyboardInterrupt):
            run_on_slurm([cell()], tmp_path, Jobs(), lambda _: None)
        told = []
        with pytest.raises(KeyboardInterrupt):  # the same settings: the job is waited for
            run_on_slurm([cell()], tmp_path, Jobs(), told.append)
    assert told[0].startswith("a: job 77")
    assert json.loads((tmp_path / "jobs" / "a.json").read_text()) == {"job": "77", "key": cell().key}
    with pytest.raises(FolderInUseError, match=r"job 77 .* a, with other settings.*scancel 77"):
        run_on_slurm([cell(until="map")], tmp_path, Jobs(), told.append)


def test_a_job_leaves_its_reason_as_text(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    stale = tmp_path / "jobs" / "a.message.json"
    monkeypatch.setattr(Job, "_prepare", lambda self: None)
    for message in ("the disk is full", None):
        stale.write_text('{"message": "from an earlier attempt"}')
        monkeypatch.setattr(jobs, "attempt", lambda *_, message=message, **__: message)
        assert Job(cell(), tmp_path / "a")() is None
        assert jobs._message(tmp_path / "a") == message
    stale.write_bytes(b"\x80\x04K\x01.")  # a pickle
    assert jobs._message(tmp_path / "a") is None
