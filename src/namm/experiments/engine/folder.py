"""The folder of a run: whose it is, and where each stage of which key is.

run.json              the experiment's name; a folder without it is not ours
settings.yaml         the settings of the last call; earlier ones are kept as settings.<hash>.yaml
data/  map/  …        one folder per stage, each with stage.json
map.<key>/            a stage set aside because settings changed; it comes back when they do
failure.json          of a cell of a study: why its last attempt failed, and with which settings

Nothing is deleted or overwritten, and `kill -9` between any two operations leaves a folder that the next call
understands: a stage's folder appears by one rename, with the key it belongs to already in its stage.json; setting
aside and bringing back are one rename each; every file is written whole or not at all.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from namm._version import __version__
from namm.errors import RunFolderError, UsageError
from namm.experiments.engine.settings_file import digest
from namm.files import remove_partials, rename_durably, write_atomically, write_json

KIND = "namm run"
RUN, SETTINGS, RECORD = "run.json", "settings.yaml", "stage.json"
FAILURE = "failure.json"
DRAFT = ".new"  # suffix of a stage's folder before it has its record


@dataclass(frozen=True)
class Record:
    """What stage.json says.

    Attributes:
        stage, key, settings, needs: Which work this is, and the keys of what it was made from.
        status: `running` from the moment the folder exists, `complete` at the very end.
        started, finished: Date and time, in UTC, of the first attempt's start and of the end.
        seconds: Of all attempts that ended by themselves; a killed one cannot tell.
        compute_seconds, results, files, verdict: As the stage returned them.
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

    def is_complete(self, folder: Path) -> bool:
        """Whether it came to its end and everything it made is still there."""
        return self.status == "complete" and all((folder / name).exists() for name in self.files)


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


def claim_run(folder: Path, experiment: str) -> None:
    """Make sure that `folder` is free or a run of `experiment`, and say in it what it is. Needs the lock."""
    require_run(folder, experiment)
    remove_partials(folder)
    if not (folder / RUN).exists():
        write_json(folder / RUN, {"kind": KIND, "experiment": experiment, "created": now(), "version": __version__})


def require_run(folder: Path, experiment: str) -> None:
    """Refuse a folder of another experiment or of something else; changes nothing."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, and a run needs a folder: choose another one with --out.")
    if (folder / RUN).exists():
        if (found := read_run(folder)["experiment"]) != experiment:
            raise RunFolderError(
                f"{folder} holds a run of the experiment {found!r}, not {experiment!r}: "
                "choose another folder with --out."
            )
        return
    ours = (".lock", f".{RUN}.", FAILURE, f".{FAILURE}.")
    if foreign := sorted(p.name for p in folder.iterdir() if not p.name.startswith(ours)):
        raise RunFolderError(
            f"{folder} is not empty and not a run of namm (it holds {', '.join(foreign[:3])}): "
            "choose another folder with --out."
        )


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says."""
    found = _read_json(folder / RUN)
    if not isinstance(found, dict) or found.get("kind") != KIND or "experiment" not in found:
        raise RunFolderError(f"{folder / RUN} was not written by namm: choose another folder with --out.")
    return found


def write_settings(folder: Path, text: str) -> str | None:
    """Write settings.yaml; if it said something else before, that is kept beside it and returned."""
    path = folder / SETTINGS
    old = path.read_bytes() if path.exists() else text.encode()
    said = old.decode(errors="replace")
    if old != text.encode():
        write_atomically(folder / f"settings.{digest(said)[:8]}.yaml", old)
    if old != text.encode() or not path.exists():
        write_atomically(path, text)
    return said if old != text.encode() else None


def write_failure(folder: Path, key: str, message: str) -> None:
    """Remember why the work of that key failed here."""
    write_json(folder / FAILURE, {"key": key, "message": message, "failed": now()})


def read_failure(folder: Path, key: str) -> str | None:
    """Why the work of that key failed here, if its last attempt did."""
    if not (folder / FAILURE).exists():
        return None
    found = _read_json(folder / FAILURE)
    return str(found.get("message")) if isinstance(found, dict) and found.get("key") == key else None


def forget_failure(folder: Path) -> None:
    """What failed here is tried again, or is done."""
    if folder.is_dir():
        (folder / FAILURE).unlink(missing_ok=True)


# The stages


def place_stage(run: Path, stage: str, key: str, settings: Any, needs: Mapping[str, str]) -> Record:
    """Make `run/stage` the folder of that key: as it is, brought back, or new; another key's is set aside."""
    folder, draft = run / stage, run / f".{stage}{DRAFT}"
    shutil.rmtree(draft, ignore_errors=True)
    if folder.exists():
        record = read_record(folder)
        remove_partials(folder)
        if record.key == key:
            return record
        set_aside(run, stage)
    for aside in stages_aside(run, stage):
        if read_record(aside).key == key:
            rename_durably(aside, folder)
            return read_record(folder)
    write_record(draft, Record(stage, key, settings, dict(needs)))
    rename_durably(draft, folder)
    return read_record(folder)


def set_aside(run: Path, stage: str) -> None:
    """Make room in `run` for a stage of another key."""
    rename_durably(run / stage, _free_name(run, stage, read_record(run / stage).key))


def is_done(folder: Path, key: str) -> bool:
    """Whether `folder` holds the complete stage of that key."""
    if not (folder / RECORD).exists():
        return False
    record = read_record(folder)
    return record.key == key and record.is_complete(folder)


def stages_aside(run: Path, stage: str) -> list[Path]:
    """Folders of that stage that were set aside."""
    return sorted(p for p in run.glob(f"{stage}.*") if (p / RECORD).exists())


def _free_name(run: Path, stage: str, key: str) -> Path:
    """`stage.<key>`, cut short, or with a number where that is taken."""
    path = run / f"{stage}.{key[:8]}"
    count = 2
    while path.exists():
        path = run / f"{stage}.{key[:8]}.{count}"
        count += 1
    return path


def read_record(folder: Path) -> Record:
    """What stage.json says."""
    if not (folder / RECORD).exists():
        raise RunFolderError(f"{folder} is not a stage of a run (it has no {RECORD}): move it away.")
    found = _read_json(folder / RECORD)
    names = {f.name for f in fields(Record)}
    if not isinstance(found, dict) or not {"stage", "key", "settings", "needs", "status"} <= found.keys():
        raise RunFolderError(f"{folder / RECORD} was not written by namm: move {folder} away.")
    known = {name: value for name, value in found.items() if name in names}
    return Record(**known | {"files": tuple(found.get("files", ()))})


def write_record(folder: Path, record: Record) -> None:
    """Write stage.json, whole or not at all."""
    write_json(folder / RECORD, asdict(record))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}): move it away, or choose another folder.") from error
