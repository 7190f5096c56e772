"""Every experiment, and a rule of a user's own with weights and buffers, through every stage and command, in minutes.

    python benchmarks/smoke.py [--only NAME ...] [--until STAGE] [--out DIR]

Images of 16×16 and trainings of a few steps, on a GPU if there is one. It shows that everything runs there, not that
anything is learned. Each run is begun by a child process that is killed (SIGKILL) between two stages or inside of one;
then this process goes on with it, stage by stage, and uses what came of it: samples, an exported pipeline that is
loaded and called, a check of the data, data assimilation. On a GPU the preset `gpu` follows, compiled as it is.

Prints a line with its seconds for whatever was tried; the exit code is 1 where anything failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from namm import NAMMPipeline
from namm.cli import main as namm
from namm.experiments.engine.run_parts import RunParts, device

EXTRA = ["--force"]
"""Arguments of every `namm run` besides: whatever makes it accept maps that have learned nothing."""

STAGES = ("data", "map", "mdm", "samples", "finetune", "dm", "evaluate", "report")
TINY = [
    *("--map.g.layers", "1", "--map.g.filters", "4", "--map.f.filters", "4", "--map.f.blocks", "1"),
    *("--map.f.downsamplings", "1", "--map.train.batch-size", "4", "--map.train.budget", "6 steps"),
    *("--mdm.network.filters", "8", "--mdm.network.multipliers", "1", "--mdm.network.blocks", "1"),
    *("--mdm.train.batch-size", "4", "--mdm.train.budget", "6 steps", "--dm.train.batch-size", "4"),
    *("--samples.n", "8", "--samples.n-val", "4", "--samples.sampler.steps", "3"),
    *("--finetune.train.batch-size", "4", "--finetune.train.budget", "4 steps"),
    *("--evaluate.n", "16", "--evaluate.subset", "8", "--evaluate.mmd-subsets", "1"),
    *("--evaluate.sampler.steps", "3", "--evaluate.milestone-samples", "4"),
]
FEW = ["--data.n-train", "24", "--data.n-val", "8", "--data.n-test", "16", "--data.size", "16"]
COUNTED = [  # many galaxies, so that what a hasty counter misses is a small part of them
    *("--data.count", "20", "--data.separation", "2", "--data.counter-training.n-train", "32"),
    *("--data.counter-training.n-val", "4", "--data.counter-training.budget", "20 steps"),
    *("--data.counter-training.batch-size", "8"),
]
MODULE = '''
import torch
from torch import nn
from namm import Constraint


class Level(Constraint):
    """The mean pixel is what a buffer says, as a layer weighs it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.tensor(0.5))
        self.weigh = nn.Conv2d(1, 1, 1, bias=False)
        nn.init.ones_(self.weigh.weight)

    def distance(self, x):
        return self.residual(x).abs().mean((1, 2, 3))

    def residual(self, x):
        return self.weigh(x).mean((1, 2, 3), keepdim=True) - self.level

    def project(self, x):
        return x - self.residual(x)
'''

Moment = Callable[[Path], bool]


def status(stage: str, expected: str) -> Moment:
    """When that stage of a run is `running`, or `complete`."""

    def reached(run: Path) -> bool:
        with suppress(OSError, ValueError):
            return bool(json.loads((run / stage / "stage.json").read_text())["status"] == expected)
        return False

    return reached


@dataclass(frozen=True)
class Experiment:
    """What to run, and when to kill it first; `check` is what `namm check` is given."""

    arguments: list[str]
    kill: tuple[str, Moment] | None = None
    check: list[str] = field(default_factory=list)
    until: str = STAGES[-1]


EXPERIMENTS = {
    "flux": Experiment(["flux", *FEW], ("after map", status("map", "complete"))),
    "burgers": Experiment(["burgers", *FEW], ("in mdm", status("mdm", "running"))),
    "divergence": Experiment(
        ["divergence", *FEW, "--data.inner-steps", "2", "--data.start", "0.1"],
        ("after samples", status("samples", "complete")),
    ),
    "periodic": Experiment(["periodic", *FEW], ("in finetune", status("finetune", "running"))),
    "count": Experiment(
        ["count", *FEW, *COUNTED],
        ("in the counter's training", lambda run: (run / "data" / "counter.training").exists()),
        ["--counter", "run/data/counter.safetensors"],
    ),
    "own": Experiment(
        ["--data", "images.npy", "--data.layout", "NCHW", "--constraint", "levels:Level"],
        ("in dm", status("dm", "running")),
    ),
    "compiled": Experiment(["count", "--preset", "gpu", *FEW, *COUNTED], until="samples"),
}
"""By name; the last one only on a GPU, or when it is asked for."""


class Failed(Exception):
    """A step did not do what it should."""


class Logger:
    """Steps with their seconds, as they come; whatever a step prints is kept in a file, and shown if it fails."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def step(self, experiment: str, name: str, action: Callable[[], object]) -> bool:
        """Do it and say how it went."""
        begin, file = time.monotonic(), Path(f"{name.replace(' ', '-')}.log")
        try:
            with file.open("w") as printed, redirect_stdout(printed), redirect_stderr(printed):
                action()
            problem = ""
        except Exception as error:
            last = file.read_text().strip().splitlines()[-5:]
            whole = [] if isinstance(error, Failed) else traceback.format_exc().strip().splitlines()[-12:]
            problem = "\n    ".join([f"{type(error).__name__}: {error}", *whole, *last])
        self.passed, self.failed = self.passed + (not problem), self.failed + bool(problem)
        verdict = f"FAILED  {problem}" if problem else "passed"
        print(f"{experiment:<11}{name:<34}{time.monotonic() - begin:7.1f} s  {verdict}", flush=True)
        return not problem


def call(*arguments: str) -> None:
    """The command `namm` in this process; anything but success is a failure."""
    if code := namm(list(arguments)):
        raise Failed(f"namm {arguments[0]} ended with exit code {code}")


def run_arguments(experiment: Experiment) -> list[str]:
    return ["run", *experiment.arguments, *TINY, *EXTRA, "--out", "run"]


def killed(experiment: Experiment, moment: Moment, patience: float = 120.0) -> None:
    """Begin the run in a process of its own, which is killed as soon as `moment` is reached."""
    command = [sys.executable, "-m", "namm", *run_arguments(experiment)]
    with Path("killed.log").open("w") as printed:
        child = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment())
        deadline = time.monotonic() + patience
        while not (reached := moment(Path("run"))) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        code = child.wait()
    if not reached or code != -signal.SIGKILL:
        last = Path("killed.log").read_text().strip().splitlines()[-5:]
        raise Failed("\n    ".join([f"the child ended with {code} before it could be killed", *last]))


def environment() -> dict[str, str]:
    """Ours, with the package that this process uses."""
    import namm as package

    folders = [str(Path(package.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def records() -> dict[str, bytes]:
    """The records of the stages that are complete, by name."""
    done = [name for name in STAGES if status(name, "complete")(Path("run"))]
    return {name: (Path("run") / name / "stage.json").read_bytes() for name in done}


def kept(before: dict[str, bytes]) -> None:
    """Refuse a resumption that did again what was complete."""
    if again := [name for name, record in before.items() if records().get(name) != record]:
        raise Failed(f"done again, although complete before the kill: {', '.join(again)}")


def pipeline(steps: int = 3) -> None:
    """Load what was exported, on the device, with the run's rule, and draw from it."""
    rule = RunParts.load(Path("run")).rule().cpu()
    pipe = NAMMPipeline.from_pretrained("pipeline", constraint=rule).to(device())
    found = pipe(batch_size=2, num_inference_steps=steps, generator=0)
    if not (torch.isfinite(found.images).all() and found.distances.device.type == device().type):
        raise Failed(f"the pipeline made {found.images} with distances on {found.distances.device}")


def commands(name: str, experiment: Experiment) -> dict[str, Callable[[], object]]:
    """What is done with a finished run."""
    check = ["levels:Level", "images.npy", "--layout", "NCHW"] if name == "own" else [name, "run/data/images.h5"]
    observe = ["--observe", "mask:0.5", "--truths", "1", "-n", "2", "--steps", "3", "--zeta", "1e-3"]
    return {
        "sample": lambda: call("sample", "run", "-n", "4", "-o", "samples.h5"),
        "export": lambda: call("export", "run", "-o", "pipeline"),
        "pipeline, loaded and called": pipeline,
        "check": lambda: call("check", *check, *experiment.check),
        "assimilate": lambda: call("assimilate", "run", *observe),
    }


def try_out(log: Logger, name: str, until: str | None) -> None:
    """One experiment in the current folder, as far as it goes: what follows a failure is not tried."""
    experiment = EXPERIMENTS[name]
    before: dict[str, bytes] = {}
    if name == "own":
        write_own()
    if experiment.kill is not None and until is None:
        moment, reached = experiment.kill
        if not log.step(name, f"killed {moment}", lambda: killed(experiment, reached)):
            return
        before = records()
    last = until or experiment.until
    for stage in STAGES[: STAGES.index(last) + 1]:
        if not log.step(name, stage, lambda stage=stage: call(*run_arguments(experiment), "--until", stage)):  # type: ignore[misc]
            return
    if before:
        log.step(name, "nothing done again", lambda: kept(before))
    if last == STAGES[-1]:
        for what, action in commands(name, experiment).items():
            log.step(name, what, action)


def write_own() -> None:
    """A user's folder: images whose mean is a half, and a module with the rule."""
    x = np.random.default_rng(0).normal(size=(80, 1, 16, 16)).astype(np.float32)
    np.save("images.npy", x - x.mean((1, 2, 3), keepdims=True) + 0.5)
    Path("levels.py").write_text(MODULE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), help="these alone")
    parser.add_argument("--until", choices=STAGES, help="stop there: no kill before, no commands after")
    parser.add_argument("--out", type=Path, help="folder to keep everything in; it must not be there (default: none)")
    options = parser.parse_args(arguments)
    usual = [name for name in EXPERIMENTS if name != "compiled" or torch.cuda.is_available()]
    begin, log, here, path = time.monotonic(), Logger(), Path.cwd(), list(sys.path)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) if options.out is None else options.out.resolve()
        try:
            for name in options.only or usual:
                (out / name).mkdir(parents=True)
                os.chdir(out / name)
                try_out(log, name, options.until)
        finally:
            os.chdir(here)
            sys.path[:] = path
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{time.monotonic() - begin:.0f} s on {where}, torch {torch.__version__}")
    print(f"{log.passed} passed, {log.failed} failed")
    return 1 if log.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
