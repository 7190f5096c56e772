"""Runs that are killed, at every place where they write, at random moments and as two processes, and then gone on with.

    python benchmarks/kill.py                                # once at every place
    python benchmarks/kill.py --random 100 --torchrun 20     # these kills as well

A place is a durable call (a write, a flush, a rename, a new or a removed file or folder) with the lines of namm that
lead to it, and the stage. An uninterrupted run from data to report, at a tiny size and with budgets in steps, tells
which there are. Then a run like it is killed at the first call of each (a write with half of its bytes written), goes
on to the end of that stage, and must leave what the uninterrupted one left, but for recorded times, and nothing else.
At random moments kills come in chains, and each chain goes on to the report; two processes go on to `repair`. Prints
a table, and exits with 1 where anything differs. What was tried before with the same folder is not tried again.
"""

import builtins
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import safetensors.torch
import torch
import torch.utils.tensorboard
import tyro
from safetensors import safe_open

import namm
import namm.experiments.engine.stages.report  # all that children need: importing is what costs seconds
import namm.experiments.engine.stages.samples
from namm.errors import NammError
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import ForwardSettings, NetworkSettings, SamplerSettings
from namm.experiments.engine.stages import MAIN_LINE, model, stages_until
from namm.experiments.presets import Preset, preset
from namm.formatting import print_table

SOURCE = Path(namm.__file__).parent
TIMES = {
    *("seconds", "compute_seconds", *(f"compute_seconds_{side}" for side in ("ours", "baseline", "repair"))),
    *("model_seconds", "compute", "images_per_second"),
    *("started", "finished", "created", "attempts", "sha256", "digests"),
}
"""What may differ between two runs: recorded times, how often a stage was begun, and digests of files with these."""
UNCOMPARED = re.compile(r"events\.out\.tfevents")
"""TensorBoard's own files, which have times for names."""
CHAIN = 5
"""Kills, at random moments, between two comparisons."""
NUMBERS = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+|[-−+]?\d[\d.,·⁰¹²³⁴⁵⁶⁷⁸⁹⁻:]*")
"""Pictures and numbers of a report, some of which are times."""


@dataclass(frozen=True)
class Options:
    """How many kills of each kind."""

    places: int | None = None
    """Places, evenly spread over all there are; all of them by default."""
    random: int = 0
    """Kills at random moments, five in a row."""
    full: int = 0
    """Places, evenly spread over those that need room, at which the disk is full, and stays so until the run ends."""
    torchrun: int = 0
    """Kills of one of two processes under torchrun, or of both, five in a row."""
    until: str = MAIN_LINE
    """The last stage of all these runs."""
    seed: int = 0
    out: Path = Path("runs/kill")
    """Folder of the runs and of what was found; what is done is not done again."""


# The run


def tiny() -> Preset:
    """Burgers' equation with every stage, polished samples and milestones, in seconds."""
    base = preset("burgers")
    s, sampler = base.settings, SamplerSettings("dpm-solver", 3)

    def short(part: Any, steps: int = 5) -> Any:
        train = replace(part.train, budget=f"{steps} steps", batch_size=4, checkpoint_seconds=0.0, log_every=2)
        return replace(part, train=replace(train, milestones=2, validations=2))

    network = NetworkSettings(filters=4, multipliers=(1,), blocks=1, attention=(), dropout=0.1, unshuffle=2)
    f = replace(s.map.f, filters=4, blocks=1, downsamplings=1)
    data: Any = s.data
    settings = replace(
        s,
        data=replace(data, size=8, n_train=72, n_val=8, n_test=16),
        map=short(replace(s.map, g=ForwardSettings(1, 4), f=f)),
        mdm=short(replace(s.mdm, network=network)),
        samples=replace(s.samples, n=8, n_val=4, sampler=sampler),
        finetune=short(s.finetune, 3),
        dm=short(s.dm),
        evaluate=replace(s.evaluate, n=16, subset=8, mmd_subsets=2, milestone_samples=4, sampler=sampler, polish=True),
    )
    return replace(base, settings=settings)


def go(folder: Path, until: str) -> None:
    """The run, or the rest of it; the baseline's steps are fixed, for those at equal compute depend on the clock."""
    torch.set_num_threads(1)
    with patch.object(model, "equal_compute", lambda settings, *_: replace(settings, budget="7 steps")):
        run(tiny(), folder, until=until, log=lambda line: None, progress=False, force=True)


def forked(work: Callable[[], object]) -> int:
    """Begin `work` in a process of its own, which need not import torch again, and return its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with Path(os.devnull).open("w") as quiet:
            os.dup2(quiet.fileno(), 1)
        work()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def exit_code(pid: int) -> int:
    """How that process ended; −9 for a kill."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Where it writes

Place = tuple[str, ...]
"""Stage, call, and the lines of namm that lead to it, the innermost last."""


def place_of(call: str) -> Place | None:
    """Where this process is, if code of namm's brought it here."""
    lines, stage = [], ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            lines.append(f"{path.relative_to(SOURCE).as_posix()}:{frame.f_lineno}")
        if frame.f_code.co_name == "_run_stage":
            stage = frame.f_locals["stage"].name
        frame = frame.f_back
    return (stage, call, *reversed(lines)) if lines else None


def is_pipe(file: Any) -> bool:
    """Whether an open file's number is that of a pipe, such as one to a process: nothing of it lasts."""
    return isinstance(file, int) and not stat.S_ISREG(os.fstat(file).st_mode)


NEED_ROOM = {"write", "create", "mkdir", "__setitem__", "create_dataset", "flush", "save_file"}
"""Calls that a full disk refuses."""


class Watched:
    """An open file whose writes are watched."""

    def __init__(self, file: Any, watch: "Watch") -> None:
        self._file, self._watch = file, watch

    def write(self, content: Any) -> Any:
        """Write, or write half of it and be killed."""

        def half() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._watch("write", half)
        return self._file.write(content)

    def __enter__(self) -> "Watched":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Watch:
    """Is called before every durable call; knows all places, kills this process at one, or fills the disk there.

    For a process that ends soon: what it wraps stays wrapped.
    """

    def __init__(self, kill_at: Place | None = None, full_at: Place | None = None) -> None:
        self.kill_at, self.full_at, self.calls = kill_at, full_at, Counter[Place]()
        self.is_full = False
        for name in ("replace", "rename", "link", "fsync", "rmdir", "chmod"):
            self._wrap(os, name)
        for name in ("unlink", "remove"):
            self._wrap(os, name, lambda path, *_, dir_fd=None: dir_fd is not None or os.path.lexists(path))
        self._wrap(os, "mkdir", lambda path, *_: not os.path.lexists(path))
        for owner, name in ((h5py.Dataset, "__setitem__"), (h5py.AttributeManager, "__setitem__")):
            self._wrap(owner, name)
        for owner, name in ((h5py.Group, "create_dataset"), (h5py.File, "flush"), (h5py.File, "close")):
            self._wrap(owner, name)
        self._wrap(safetensors.torch, "save_file")
        for owner, name in ((builtins, "open"), (io, "open"), (os, "fdopen")):
            self._wrap_open(owner, name)
        self._wrap_creation()

    def __call__(self, call: str, half: Callable[[], object] = lambda: None) -> None:
        """A durable call is about to be made; `half` makes half of it."""
        if (place := place_of(call)) is None:
            return
        self.calls[place] += 1
        if place == self.kill_at:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.is_full |= place == self.full_at
        if self.is_full and call in NEED_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _wrap(self, owner: Any, name: str, does_something: Callable[..., bool] = lambda *_, **__: True) -> None:
        operation = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if does_something(*arguments, **options):
                self(name)
            return operation(*arguments, **options)

        setattr(owner, name, watched)

    def _wrap_open(self, owner: Any, name: str) -> None:
        operation = getattr(owner, name)

        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+") or is_pipe(file) or place_of(name) is None:
                return operation(file, mode, *arguments, **options)
            if not isinstance(file, int):
                self("create")
            return Watched(operation(file, mode, *arguments, **options), self)

        setattr(owner, name, opened)

    def _wrap_creation(self) -> None:
        operation = os.open

        def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                self("create")
            return operation(path, flags, *arguments, **options)

        setattr(os, "open", opened)  # noqa: B010


def all_places(folder: Path, until: str) -> list[Place]:
    """Every place of a run up to a stage, which `folder` then holds, in the order of their stages."""
    notes = folder.with_name("places.json")

    def count() -> None:
        watch = Watch()
        go(folder, until)
        places = list(watch.calls)
        with Path(notes).open("w") as file:
            json.dump(places, file)

    if not notes.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if exit_code(forked(count)):
            raise SystemExit("the uninterrupted run failed")
    return [tuple(place) for place in json.loads(notes.read_text())]


# What they leave


def differences(one: Path, other: Path, last: str) -> list[str]:
    """What differs between two runs up to a stage, but for times; the names of files that only one of them has."""
    a, b = (_files(folder, last) for folder in (one, other))
    found = [f"only in {one.name}: {name}" for name in sorted(a - b)]
    found += [f"only in {other.name}: {name}" for name in sorted(b - a)]
    return found + [name for name in sorted(a & b) if _content(one / name) != _content(other / name)]


def _files(folder: Path, last: str) -> set[str]:
    """All that is in a run but the stages after the last; folders that are empty, too."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())}
    every = [stage.name for stage in stages_until(MAIN_LINE, tiny().settings)]
    later = every[every.index(last) + 1 :]
    return {name.as_posix() for name in found if name.parts[0] not in later and not UNCOMPARED.search(name.name)}


def _content(path: Path) -> Any:
    """What a file says, without times."""
    read = READERS.get(path.suffix, Path.read_bytes)
    return read(path) if path.is_file() and path.name != ".lock" else None


def _timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _timeless(each) for key, each in value.items() if key not in TIMES}
    return [_timeless(each) for each in value] if isinstance(value, list) else repr(value)


def _arrays(path: Path) -> dict[str, Any]:
    """Attributes and bytes of everything in an HDF5 file but what it says of seconds."""
    found: dict[str, Any] = {}

    def note(name: str, item: Any) -> None:
        if not name.endswith("seconds"):
            content = item[()].tobytes() if isinstance(item, h5py.Dataset) else b""
            found[name] = (sorted((key, str(value)) for key, value in item.attrs.items()), content)

    with h5py.File(path) as file:
        note("", file)
        file.visititems(note)
    return found


def _weights(path: Path) -> Any:
    with safe_open(path, "np") as file:
        about = json.loads((file.metadata() or {}).get("namm", "{}"))
        return _timeless(about), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def _pictures(path: Path) -> dict[str, bytes]:
    with np.load(path) as arrays:
        return {name: arrays[name].tobytes() for name in arrays.files}


READERS: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: _timeless(json.loads(path.read_text())),
    ".jsonl": lambda path: [_timeless(json.loads(line)) for line in path.read_text().splitlines()],
    ".h5": _arrays,
    ".safetensors": _weights,
    ".npz": _pictures,
    ".html": lambda path: NUMBERS.sub("#", path.read_text().replace(path.parents[1].name, "RUN")),
}


# Kills


@dataclass(frozen=True)
class Found:
    """What came of one kill, or of a chain of them."""

    kind: str
    name: str
    kills: int
    differences: tuple[str, ...]


class Results:
    """What was found, kept line by line in a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.all = path, []
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            self.all = [Found(**line | {"differences": tuple(line["differences"])}) for line in lines]

    def add(self, found: Found) -> None:
        """Keep it."""
        self.all.append(found)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        for line in found.differences:
            print(f"{found.kind} {found.name}: {line}", flush=True)

    def has(self, kind: str, name: str) -> bool:
        """Whether that was tried before."""
        return any((found.kind, found.name) == (kind, name) for found in self.all)


def kill_at(place: Place, whole: Path, folder: Path) -> list[str]:
    """Kill a run there, let it go on, and compare it."""
    last = _up_to(place, whole, folder)

    def die() -> None:
        Watch(place)
        go(folder, last)

    code = exit_code(forked(die))
    return finished(folder, whole, last) if code == -signal.SIGKILL else [f"was not killed (exit code {code})"]


def full_at(place: Place, whole: Path, folder: Path) -> list[str]:
    """Let a run meet a full disk there, go on when there is room again, and compare it."""
    last = _up_to(place, whole, folder)

    def fail() -> None:
        Watch(full_at=place)
        try:
            go(folder, last)
        except NammError as error:
            os._exit(3 if "No space left" in str(error) else 4)

    code = exit_code(forked(fail))
    return finished(folder, whole, last) if code == 3 else [f"did not end with a sentence (exit code {code})"]


def _up_to(place: Place, whole: Path, folder: Path) -> str:
    """Copy from the whole run what comes before a place's stage, and return the stage, or the first of all."""
    names = [each.name for each in stages_until(MAIN_LINE, tiny().settings)]
    shutil.rmtree(folder, ignore_errors=True)
    if not place[0]:
        return names[0]
    later = names[names.index(place[0]) :]
    shutil.copytree(whole, folder, ignore=lambda at, _: later if Path(at) == whole else [])
    return place[0]


def finished(folder: Path, whole: Path, last: str) -> list[str]:
    """Let a run come to the end of a stage, and compare it with the whole one."""
    if code := exit_code(forked(lambda: go(folder, last))):
        return [f"could not go on (exit code {code})"]
    return differences(folder, whole, last)


def kill_at_random(rng: random.Random, whole: Path, folder: Path, longest: float, until: str) -> tuple[int, list[str]]:
    """Kill a run a few times, each at most `longest` seconds after it was begun; let it end, and compare it."""
    shutil.rmtree(folder, ignore_errors=True)
    done = 0
    for _ in range(CHAIN):
        pid = forked(lambda: go(folder, until))
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        done += exit_code(pid) == -signal.SIGKILL
    return done, finished(folder, whole, until)


# Two processes

TWO_UNTIL = "repair"
"""The last stage in which processes work together, but for drawing samples, as in `samples`."""


def torchrun(folder: Path) -> subprocess.Popen[str]:
    """Begin the run on two processes; each writes its number beside the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, __file__, "worker", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def worker(folder: Path) -> None:
    """What each of the two processes does."""
    from namm.experiments.engine.processes import rank_zero_output

    folder.with_name(f"{folder.name}.rank{os.environ['RANK']}").write_text(str(os.getpid()))
    with rank_zero_output():
        go(folder, TWO_UNTIL)


def kill_two(rng: random.Random, whole: Path, folder: Path, longest: float) -> tuple[int, list[str]]:
    """Kill one of two processes, or both, a few times; let the run end, and compare it."""
    shutil.rmtree(folder, ignore_errors=True)
    ranks = [folder.with_name(f"{folder.name}.rank{rank}") for rank in (0, 1)]
    done = 0
    for _ in range(CHAIN):
        for path in ranks:
            path.unlink(missing_ok=True)
        process = torchrun(folder)
        while not all(path.exists() and path.read_text() for path in ranks) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, longest))
        victims = rng.choice([[0], [1], [0, 1]])
        if process.poll() is None:
            for rank in victims:
                with suppress(ProcessLookupError):
                    os.kill(int(ranks[rank].read_text()), signal.SIGKILL)
            done += 1
        process.communicate()
    process = torchrun(folder)
    _, said = process.communicate()
    if process.returncode:
        return done, [f"could not go on: {said[-500:]}"]
    return done, differences(folder, whole, TWO_UNTIL)


# All of it


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]))
        return 0
    options = tyro.cli(Options, description=__doc__)
    options.out.mkdir(parents=True, exist_ok=True)
    whole, results, rng = options.out / "the-whole", Results(options.out / "found.jsonl"), random.Random(options.seed)
    places = all_places(whole, options.until)
    try_places(places, options, whole, results)
    if options.random:
        try_at_random(options, whole, results, rng)
    if options.torchrun:
        try_two(options, results, rng)
    return report(places, results)


def try_places(places: Sequence[Place], options: Options, whole: Path, results: Results) -> None:
    """A kill at each place, or at some of them; a full disk at some of those that need room."""
    need_room = [place for place in places if place[1] in NEED_ROOM]
    count = len(places) if options.places is None else options.places
    for kind, attempt, among, asked in (
        ("place", kill_at, places, count),
        ("full", full_at, need_room, options.full),
    ):
        for place in spread(among, asked):
            if not results.has(kind, name := " ".join(place)):
                results.add(Found(kind, name, 1, tuple(attempt(place, whole, options.out / "the-killed"))))


def spread(places: Sequence[Place], count: int) -> list[Place]:
    """So many of the places, evenly spread."""
    count = min(count, len(places))
    return [places[k * len(places) // count] for k in range(count)]


def try_at_random(options: Options, whole: Path, results: Results, rng: random.Random) -> None:
    """Chains of kills at random moments."""
    began = time.monotonic()
    exit_code(forked(lambda: go(options.out / "timed", options.until)))
    longest = time.monotonic() - began
    shutil.rmtree(options.out / "timed")
    for k in range(-(-options.random // CHAIN)):
        if not results.has("random", str(k)):
            kills, found = kill_at_random(rng, whole, options.out / "the-killed", 0.5 * longest, options.until)
            results.add(Found("random", str(k), kills, tuple(found)))


def try_two(options: Options, results: Results, rng: random.Random) -> None:
    """Chains of kills of two processes."""
    whole, began = options.out / "the-two", time.monotonic()
    shutil.rmtree(whole, ignore_errors=True)
    process = torchrun(whole)
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"the uninterrupted run on two processes failed: {said[-2000:]}")
    longest = time.monotonic() - began
    for k in range(-(-options.torchrun // CHAIN)):
        if not results.has("torchrun", str(k)):
            kills, found = kill_two(rng, whole, options.out / "the-killed-two", 0.5 * longest)
            results.add(Found("torchrun", str(k), kills, tuple(found)))


def report(places: Sequence[Place], results: Results) -> int:
    """The table; 1 where anything differs."""
    rows = []
    for kind in ("place", "full", "random", "torchrun"):
        found = [each for each in results.all if each.kind == kind]
        wrong = sum(bool(each.differences) for each in found)
        there = {"place": len(places), "full": sum(place[1] in NEED_ROOM for place in places)}
        sites = str(there.get(kind, "–"))
        rows.append((kind, sites, str(sum(each.kills for each in found)), str(len(found)), str(wrong)))
    print_table(["kind", "places there are", "kills or failures", "comparisons", "with differences"], rows)
    return int(any(found.differences for found in results.all))


if __name__ == "__main__":
    sys.exit(main())
