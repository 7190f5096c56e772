"""The stages of a run, in order: what each needs, which settings it depends on, and what it does.

A stage's *key* is a hash of its own settings and of the keys of what it needs. Two runs of a stage with the same key do
the same work; when a setting changes, the keys of that stage and of everything after it change, and no others.

Imports no torch: keys are computed, and stages listed, by commands that must answer at once.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from namm.experiments.engine.settings import Settings
from namm.experiments.engine.settings_file import digest, identity, plain, without_new_defaults
from namm.experiments.presets import require_name
from namm.formatting import format_number, shown_name
from namm.training.settings import OBSERVING


@dataclass(frozen=True)
class Work:
    """What a stage is given: the run's settings, its own folder, and the folders of what it needs."""

    settings: Settings
    folder: Path
    needs: Mapping[str, Path]
    progress: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a stage returns."""

    results: Mapping[str, Any]
    """Its figures, for the record and for people."""
    files: tuple[str, ...]
    """What it left behind, relative to its folder; while one of them is missing it is not complete."""
    compute_seconds: float = 0.0
    """Time in training or sampling steps, over all resumptions."""
    verdict: Mapping[str, Any] | None = None
    """The judgement on what was made, as `Verdict.as_json` writes it, where the stage makes one."""


@dataclass(frozen=True)
class Stage:
    """One stage; its name is also that of its folder, and `needs` names what must be complete before it."""

    name: str
    needs: tuple[str, ...]
    part: Callable[[Settings], Any]
    """The part of the settings that it depends on by itself, as plain values."""
    function: Callable[[Work], Outcome]
    shown: tuple[str, ...] = ()
    """Names of the results that are shown when it is done."""
    version: int = 1
    """Increase when the same settings give different results."""
    gate: bool = False
    """Whether a run stops here unless the verdict is `works`, or the user goes on all the same."""


def _data(settings: Settings) -> dict[str, Any]:
    """Settings of the data as plain values; a counter that is given is known by its content, and none is trained."""
    values: dict[str, Any] = without_new_defaults(identity(settings.data))
    if not (name := values.get("counter")):
        return values
    known = {"counter": hashlib.sha256(Path(name).read_bytes()).hexdigest()} if Path(name).is_file() else {}
    return {key: value for key, value in values.items() if key != "counter_training"} | known


def _training(part: Any) -> dict[str, Any]:
    """Settings of a training as plain values, without those that only watch it."""
    values: dict[str, Any] = without_new_defaults(plain(part))
    return values | {"train": {name: value for name, value in values["train"].items() if name not in OBSERVING}}


def _map(settings: Settings) -> dict[str, Any]:
    return {"rule": identity(settings.data.rule), **_training(settings.map)}


def _baseline(settings: Settings) -> dict[str, Any]:
    """The baseline's settings as plain values; at equal compute its own budget is not used."""
    values = _training(settings.dm)
    if settings.dm.equal_compute:
        values["train"]["budget"] = "equal compute"
    model = without_new_defaults({"network": plain(settings.mdm.network), "diffusion": plain(settings.mdm.diffusion)})
    return {**values, **model}


def _repair(settings: Settings) -> dict[str, Any]:
    """What f is finetuned on, and how: as in the main line."""
    return {"samples": plain(settings.samples), "finetune": _training(settings.finetune)}


def _few(settings: Settings) -> dict[str, Any]:
    """How the few-step model is trained; how often it is evaluated matters to its samples alone."""
    return {name: value for name, value in _training(settings.few).items() if name != "steps"}


def _evaluate(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = without_new_defaults(plain(settings.evaluate))
    return values | ({"few_steps": settings.few.steps} if settings.few.steps else {})


def _stage(
    name: str, needs: str, part: Callable[[Settings], Any], function: str, shown: str = "", *, gate: bool = False
) -> Stage:
    """A stage whose function, and torch with it, is imported only when it is called."""
    module, _, attribute = function.partition(".")

    def call(work: Work) -> Outcome:
        outcome: Outcome = getattr(import_module(f"{__name__}.{module}"), attribute)(work)
        return outcome

    return Stage(name, tuple(needs.split()), part, call, tuple(shown.split()), gate=gate)


LEARNED = "steps loss val/loss"
LEARNED_MAP = "steps distance_noise distance_map cycle_error total_variation verdict"
FINETUNED = "steps distance_samples_before distance_samples kept"
EVALUATED = "distance_ours distance_baseline distance_baseline_half_way mmd_ours mmd_baseline compute verdict"
"""Results that are shown of trainings and of the evaluation."""
MAIN_LINE = "report"
"""Where a run ends that is not asked to end elsewhere."""

_IN_ORDER = (
    _stage("data", "", _data, "data.make_data", "images shape counter_error distance_mean distance_max"),
    _stage("map", "data", _map, "map.make_map", LEARNED_MAP, gate=True),
    _stage("mdm", "data map", lambda s: _training(s.mdm), "model.make_mdm", LEARNED),
    _stage("samples", "data map mdm", lambda s: plain(s.samples), "samples.make_samples", "samples distance_mean"),
    _stage("finetune", "data map samples", lambda s: _training(s.finetune), "samples.make_finetune", FINETUNED),
    _stage("dm", "data map mdm samples finetune", _baseline, "model.make_dm", LEARNED),
    _stage("repair", "data map mdm dm", _repair, "repair.make_repair", FINETUNED),
    _stage("few", "data map mdm", _few, "model.make_few", LEARNED),
    _stage("evaluate", "data map mdm samples finetune dm repair few", _evaluate, "evaluate.make_evaluation", EVALUATED),
    _stage("report", "evaluate", lambda s: {}, "report.make_report"),
    _stage("mvae", "data map", lambda s: _training(s.vae), "model.make_mvae", LEARNED),
    _stage("vae", "data map mvae", lambda s: _training(s.vae), "model.make_vae", LEARNED),
)
STAGES = {stage.name: stage for stage in _IN_ORDER}


def needs(stage: Stage, settings: Settings) -> tuple[str, ...]:
    """What `stage` needs under these settings: a baseline with a budget of its own waits for the data alone."""
    if stage.name == "dm" and not settings.dm.equal_compute:
        return ("data",)
    left_out = {"repair": not settings.repairs, "few": not settings.few.steps}
    return tuple(name for name in stage.needs if not left_out.get(name))


def stage_keys(settings: Settings) -> dict[str, str]:
    """The key of every stage."""
    keys: dict[str, str] = {}
    for stage in STAGES.values():
        own = {"stage": stage.name, "version": stage.version, "settings": stage.part(settings)}
        keys[stage.name] = digest(own | {"needs": {name: keys[name] for name in needs(stage, settings)}})
    return keys


def stages_until(last: str | None, settings: Settings) -> list[Stage]:
    """What leads to `last`, it included, in order; by default to the end of the main line.

    A stage that `last` does not need is not among them: the autoencoders are for those who ask for them.
    """
    selected = {require_name(last or MAIN_LINE, STAGES, "stage")}
    for stage in reversed(STAGES.values()):
        selected |= set(needs(stage, settings)) if stage.name in selected else set()
    return [stage for stage in STAGES.values() if stage.name in selected]


def summary(stage: Stage, results: Mapping[str, Any]) -> str:
    """The results of a stage that people look at first."""
    found = {shown_name(name): results[name] for name in stage.shown if name in results}
    return ", ".join(
        f"{name} {format_number(value) if isinstance(value, float) else value}" for name, value in found.items()
    )
