"""What there is in a run folder, for people to look at; changes nothing and imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from namm.experiments.engine.folder import RECORD, SETTINGS, read_record, read_run, stages_aside
from namm.experiments.engine.settings_file import read_yaml
from namm.experiments.engine.stages import STAGES, stage_keys, summary
from namm.experiments.presets import Preset, preset

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


def stage_states(run: Path) -> list[StageState]:
    """Every stage in order, each followed by its folders that were set aside."""
    keys = stage_keys(_settings(run).settings)
    rows = []
    for name in STAGES:
        rows.append(_state(run, name, keys[name]))
        for folder in stages_aside(run, name):
            record = read_record(folder)
            rows.append(StageState(folder.name, "aside", record.seconds, summary(STAGES[name], record.results)))
    return rows


def describe_run(run: Path) -> RunState:
    """Experiment, preset, stages done and date of the last change."""
    chosen, experiment = _settings(run), read_run(run)["experiment"]
    states = {row.folder: row.state for row in stage_states(run)}
    done = tuple(name for name in STAGES if states[name] == "complete")
    records = [read_record(run / name) for name in STAGES if (run / name / RECORD).exists()]
    dates = [date for record in records for date in (record.started, record.finished) if date]
    changed = chosen.settings != preset(chosen.experiment, chosen.name).settings
    return RunState(experiment, chosen.name, changed, done, max(dates, default=read_run(run).get("created", "")))


def _state(run: Path, name: str, key: str) -> StageState:
    folder = run / name
    if not (folder / RECORD).exists():
        return StageState(name, "not there yet")
    record = read_record(folder)
    state: State = "complete" if record.is_complete(folder) else "partial"
    if record.key != key:
        state = "stale"
    return StageState(name, state, record.seconds, summary(STAGES[name], record.results))


def _settings(run: Path) -> Preset:
    read_run(run)
    return read_yaml(run / SETTINGS)
