"""The folder of a run: whose it is, where each stage of which key is, and how far it has come.

run.json              the experiment's name; a folder without it is not ours
settings.yaml         the settings of the last call; earlier ones are kept as settings.<hash>.yaml
data/  map/  …        one folder per stage, each with stage.json
map.<key>/            a stage set aside because settings changed; it comes back when they do
failure.json          of a cell of a study: why its last attempt failed, and with which settings

Nothing is deleted or overwritten, and `kill -9` between any two operations leaves a folder that the next call
understands (`namm.files`): a stage's folder appears by one rename, with the key it belongs to already in its
stage.json; setting aside and bringing back are one rename each; every file is written whole or not at all.

Imports no torch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from namm._version import __version__
from namm.digests import digests_of, require_signed, require_unchanged, sha256, signed
from namm.errors import RunFolderError, UsageError
from namm.experiments.engine.settings_file import digest, read_yaml
from namm.experiments.engine.stages import STAGES, stage_keys, summary
from namm.experiments.presets import preset
from namm.files import (
    Claim,
    as_json,
    read_claim,
    read_json,
    rename_durably,
    sweep,
    write_atomically,
    write_json,
)
from namm.reading import LARGEST_RECORD, REASON, damage_as, typed
from namm.training.settings import METRICS

KIND = "namm run"
RUN, SETTINGS, RECORD, FAILURE = "run.json", "settings.yaml", "stage.json", "failure.json"
ELSEWHERE = "another folder with --out"
TRAINING = "training"
"""Folder, in that of a stage, of its training."""
LAST_LINES = 64 * 1024
"""Bytes at the end of a log that surely hold a whole line."""
CHECKPOINTS = "checkpoints"
"""Folder, in that of a training, of what it goes on from."""
DIGESTED = (".json", ".jsonl", ".npz", ".h5", ".safetensors")
"""Suffixes of the files of a stage that programs read."""


@dataclass(frozen=True)
class Record:
    """What stage.json says.

    Attributes:
        stage, key, settings, needs: Which work this is, and the keys of what it was made from.
        status: `running` from the moment the folder exists, `complete` at the very end.
        started, finished: Date and time, in UTC, of the first attempt's start and of the end.
        seconds: Of all attempts that ended by themselves; a killed one cannot tell.
        compute_seconds, results, files, verdict: As the stage returned them.
        digests: What tells the files that it left from others, by name: `identity`.
        attempts: How often it was started.
        version: Of the package.
    """

    stage: str
    key: str
    settings: Any
    needs: Mapping[str, str]
    status: str = "running"
    started: str | None = None
    finished: str | None = None
    seconds: float = 0.0
    compute_seconds: float = 0.0
    results: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    attempts: int = 0
    version: str = __version__
    verdict: Mapping[str, Any] | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    def is_complete(self, folder: Path) -> bool:
        """Whether it came to its end and everything it made is still there."""
        return self.status == "complete" and all(os.path.exists(folder / name) for name in self.files)


def now() -> str:
    """Date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# The run


def find_run(name: str | Path) -> Path:
    """The folder of a run from its path, or from its name in `runs`."""
    for folder in (Path(name), Path("runs") / name):
        if (folder / RUN).exists():
            return folder
    raise UsageError(
        f"there is no run {str(name)!r}, neither as a folder nor in runs; `namm list` shows what there is."
    )


def run_claim(folder: Path, experiment: str) -> Claim:
    """What makes `folder` that of a run of `experiment`."""
    about = {"created": now(), "version": __version__}
    leftovers = (FAILURE, f".{FAILURE}.")
    return Claim(folder, RUN, KIND, {"experiment": experiment}, about, ELSEWHERE, leftovers)


def write_settings(folder: Path, text: str) -> str | None:
    """Write settings.yaml; if it said something else before, that is kept beside it and returned."""
    path, new = folder / SETTINGS, text.encode()
    old = path.read_bytes() if path.exists() else None
    if old == new:
        return None
    before = None if old is None else old.decode(errors="replace")
    if old is not None and before is not None:
        write_atomically(folder / f"settings.{digest(before)[:8]}.yaml", old)
    write_atomically(path, new)
    return before


def write_failure(folder: Path, key: str, message: str) -> None:
    """Remember why the work of that key failed here."""
    write_json(folder / FAILURE, {"key": key, "message": message, "failed": now()})


def read_failure(folder: Path, key: str) -> str | None:
    """Why the work of that key failed here, if its last attempt did."""
    failure = read_json(folder / FAILURE) if (folder / FAILURE).exists() else None
    return str(failure.get("message")) if isinstance(failure, dict) and failure.get("key") == key else None


# The stages


def read_record(folder: Path) -> Record:
    """What stage.json says."""
    if not (folder / RECORD).exists():
        raise RunFolderError(f"{folder} is not a stage of a run (it has no {RECORD}): move it away.")
    found = read_json(folder / RECORD)
    if not isinstance(found, dict) or not {"stage", "key", "settings", "needs", "status"} <= found.keys():
        raise RunFolderError(f"{folder / RECORD} was not written by namm: move {folder} away.")
    found = require_signed(folder / RECORD, found, _remedy(folder), RunFolderError)
    known = {f.name: found[f.name] for f in fields(Record) if f.name in found}
    with damage_as(RunFolderError, f"{folder / RECORD} cannot be read ({REASON}): move {folder} away."):
        files = tuple(str(Path(name)) for name in found.get("files", ()))
        return typed(Record, known | {"files": files})


def write_record(folder: Path, record: Record) -> None:
    """Write stage.json, whole or not at all."""
    write_json(folder / RECORD, signed(as_json(asdict(record))))


def identity(path: Path) -> str:
    """What tells a file from others: a digest of the digests that it brings, if it does, or of all its bytes."""
    if path.suffix == ".h5":
        from namm.datasets.checksums import all_checksums

        return hashlib.sha256(all_checksums(path).encode()).hexdigest()
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return hashlib.sha256(file.read(min(length, LARGEST_RECORD))).hexdigest()
    return sha256(path)


def stage_digests(folder: Path) -> dict[str, str]:
    """What tells the files that a stage left from others."""
    kept = (path for path in folder.rglob("*") if path.suffix in DIGESTED and path != folder / RECORD)
    files = (path for path in kept if path.parent.name != CHECKPOINTS)  # which nobody reads any more
    return digests_of(folder, files, identity)


def require_intact(folder: Path) -> Path:
    """The folder of a stage itself; refused where a file in it is not the one that the stage left."""
    kept = {name: each for name, each in read_record(folder).digests.items() if (folder / name).exists()}
    require_unchanged(folder, kept, _remedy(folder), RunFolderError, identity)
    return folder


def _remedy(folder: Path) -> str:
    return f"copy it anew, or move {folder} away and give the command of the run again."


def is_done(folder: Path, key: str) -> bool:
    """Whether `folder` holds the complete stage of that key."""
    if not (folder / RECORD).exists():
        return False
    record = read_record(folder)
    return record.key == key and record.is_complete(folder)


def place_stage(run: Path, stage: str, key: str, settings: Any, needs: Mapping[str, str]) -> Record:
    """Make `run/stage` the folder of that key: as it is, brought back, or new; another key's is set aside."""
    folder = run / stage
    shutil.rmtree(_draft(run, stage), ignore_errors=True)
    if folder.exists():
        record = read_record(folder)
        sweep(folder)
        if record.key == key:
            return record
        _set_aside(run, stage)
    for aside in stages_aside(run, stage):
        if read_record(aside).key == key:
            sweep(aside)
            rename_durably(aside, folder)
            return read_record(folder)
    put_stage(run, stage, lambda draft: write_record(draft, Record(stage, key, settings, dict(needs))))
    return read_record(folder)


def put_stage(run: Path, stage: str, make: Callable[[Path], object]) -> None:
    """Let `make` write the folder of a stage, and give it its name once it is whole; what has it is set aside."""
    draft = _draft(run, stage)
    shutil.rmtree(draft, ignore_errors=True)
    make(draft)
    if (run / stage).exists():
        _set_aside(run, stage)
    rename_durably(draft, run / stage)


def _draft(run: Path, stage: str) -> Path:
    return run / f".{stage}.new"


def stages_aside(run: Path, stage: str) -> list[Path]:
    """Folders of that stage that were set aside."""
    return sorted(p for p in run.glob(f"{stage}.*") if (p / RECORD).exists())


def _set_aside(run: Path, stage: str) -> None:
    """Rename a stage's folder to `stage.<key>`, cut short, or with a number where that is taken."""
    name = f"{stage}.{read_record(run / stage).key[:8]}"
    names = (name if k == 1 else f"{name}.{k}" for k in count(1))
    rename_durably(run / stage, next(path for each in names if not (path := run / each).exists()))


# How far it has come

State = Literal["complete", "partial", "stale", "aside", "not there yet"]


@dataclass(frozen=True)
class StageState:
    """One folder of a stage, or the lack of one."""

    folder: str
    state: State
    seconds: float | None = None
    results: str = ""


@dataclass(frozen=True)
class RunState:
    """A run at a glance; `changed` says whether its settings differ from its preset's."""

    experiment: str
    preset: str
    changed: bool
    done: tuple[str, ...]
    date: str


def steps_made(folder: Path) -> tuple[int, int] | None:
    """How many steps the training in a stage's folder has made, and of how many; None where nothing tells.

    The newest checkpoint knows both, and the log may have come further since. What is damaged, or being written at this
    moment, tells nothing.
    """
    training = folder / TRAINING
    newest = max((training / CHECKPOINTS).glob("step-*.safetensors"), default=None)
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        facts = {} if newest is None else _checkpoint_facts(newest)
        made, planned = max(int(facts["step"]), _last_step(training / METRICS)), int(facts["total"])
        return (min(made, planned), planned) if planned > 0 else None
    return None


def _checkpoint_facts(path: Path) -> Mapping[str, Any]:
    """What a checkpoint says beside its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, LARGEST_RECORD)))
    facts: Mapping[str, Any] = json.loads(header["__metadata__"]["namm"])["facts"]
    return facts


def _last_step(log: Path) -> int:
    """The step of the last whole line of a log; 0 where there is none."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_LINES))
        whole = file.read().split(b"\n")[:-1]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def stage_states(run: Path) -> list[StageState]:
    """Every stage in order, each followed by its folders that were set aside."""
    read_claim(run / RUN, KIND, ELSEWHERE)
    rows = []
    for name, key in stage_keys(read_yaml(run / SETTINGS).settings).items():
        if not (run / name / RECORD).exists():
            rows.append(StageState(name, "not there yet"))
        for folder in (run / name, *stages_aside(run, name)):
            if (folder / RECORD).exists():
                record = read_record(folder)
                state: State = "complete" if record.is_complete(folder) else "partial"
                if folder.name != name:
                    state = "aside"
                elif record.key != key:
                    state = "stale"
                found = summary(STAGES[name], record.results)
                if state == "partial" and (steps := steps_made(folder)) is not None:
                    made, planned = steps
                    found = f"{made} of {planned} steps, {100 * made // planned} %"
                rows.append(StageState(folder.name, state, record.seconds, found))
    return rows


def describe_run(run: Path) -> RunState:
    """Experiment, preset, stages done and date of the last change."""
    about, chosen = read_claim(run / RUN, KIND, ELSEWHERE), read_yaml(run / SETTINGS)
    done = tuple(row.folder for row in stage_states(run) if row.state == "complete")
    records = [read_record(run / name) for name in STAGES if (run / name / RECORD).exists()]
    dates = [date for record in records for date in (record.started, record.finished) if date]
    changed = chosen.settings != preset(chosen.experiment, chosen.name).settings
    date = max(dates, default=about.get("created", ""))
    return RunState(about.get("experiment", chosen.experiment), chosen.name, changed, done, date)


def is_complete(run: Path, stage: str) -> bool:
    """Whether that stage is complete for the run's own settings."""
    return any(row.folder == stage and row.state == "complete" for row in stage_states(run))


def complete_stage(run: Path, stage: str) -> Path:
    """The folder of a stage that is complete for the run's own settings; refused where it is not."""
    state = next(row.state for row in stage_states(run) if row.folder == stage)
    if state != "complete":
        reason = {"partial": "was cut short", "stale": "was made with other settings"}.get(state, "has not been run")
        raise RunFolderError(
            f"the stage {stage!r} of {run} {reason}: "
            f"`namm run --config {quote(str(run / SETTINGS))} --out {quote(str(run))} --until {stage}` completes it."
        )
    return require_intact(run / stage)
