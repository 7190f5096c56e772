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

from namm.experiments.engine.settings import (
    BaselineSettings,
    FinetuneSettings,
    MapSettings,
    ModelSettings,
    Settings,
    VAESettings,
)
from namm.experiments.engine.settings_file import digest, identity, plain
from namm.experiments.presets import require_name
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
    """What a stage returns.

    Attributes:
        results: Its figures, for the record and for people.
        files: What it left behind, relative to its folder; while one of them is missing it is not complete.
        compute_seconds: Time in training or sampling steps, over all resumptions.
        verdict: The judgement on what was made, as `Verdict.as_json` writes it, where the stage makes one.
    """

    results: Mapping[str, Any]
    files: tuple[str, ...]
    compute_seconds: float = 0.0
    verdict: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: Also the name of its folder.
        needs: Stages that must be complete before it.
        part: The part of the settings that it depends on by itself, as plain values.
        function: What it does.
        shown: Names of the results that are shown when it is done.
        version: To be raised when the same settings come to mean other work.
        gate: Whether a run stops here unless the verdict is `works`, or the user goes on all the same.
    """

    name: str
    needs: tuple[str, ...]
    part: Callable[[Settings], Any]
    function: Callable[[Work], Outcome]
    shown: tuple[str, ...] = ()
    version: int = 1
    gate: bool = False


def _lazily(module: str, function: str) -> Callable[[Work], Outcome]:
    """A stage's function, whose module, and torch with it, is imported only when it is called."""

    def call(work: Work) -> Outcome:
        outcome: Outcome = getattr(import_module(f"namm.experiments.engine.stages.{module}"), function)(work)
        return outcome

    return call


def _drawing(settings: Settings) -> dict[str, Any]:
    """Settings of the data as plain values; a counter that is given is known by its content, and none is trained."""
    values: dict[str, Any] = identity(settings.data)
    if not (name := values.get("counter")):
        return values
    known = {"counter": hashlib.sha256(Path(name).read_bytes()).hexdigest()} if Path(name).is_file() else {}
    return {key: value for key, value in values.items() if key != "counter_training"} | known


def _learning(
    part: MapSettings | ModelSettings | FinetuneSettings | BaselineSettings | VAESettings,
) -> dict[str, Any]:
    """Settings of a training as plain values, without those that only watch it."""
    values: dict[str, Any] = plain(part)
    return values | {"train": {name: value for name, value in values["train"].items() if name not in OBSERVING}}


def _baseline(part: BaselineSettings) -> dict[str, Any]:
    """The baseline's settings as plain values; at equal compute its own budget is not used."""
    values = _learning(part)
    return values | ({"train": values["train"] | {"budget": "equal compute"}} if part.equal_compute else {})


LEARNED = ("steps", "loss", "val/loss")
"""What is shown of a model's training."""
MAIN_LINE = "report"
"""Where a run ends that is not asked to end elsewhere."""

STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "data",
            (),
            _drawing,
            _lazily("data", "make_data"),
            ("images", "shape", "counter_error", "distance_mean", "distance_max"),
        ),
        Stage(
            "map",
            ("data",),
            lambda s: {"rule": identity(s.data.rule), **_learning(s.map)},
            _lazily("map", "make_map"),
            ("steps", "distance_noise", "distance_map", "cycle_error", "total_variation", "verdict"),
            gate=True,
        ),
        Stage(
            "mdm",
            ("data", "map"),
            lambda s: _learning(s.mdm),
            _lazily("model", "make_mdm"),
            LEARNED,
        ),
        Stage(
            "samples",
            ("data", "map", "mdm"),
            lambda s: plain(s.samples),
            _lazily("samples", "make_samples"),
            ("samples", "distance_mean"),
        ),
        Stage(
            "finetune",
            ("data", "map", "samples"),
            lambda s: _learning(s.finetune),
            _lazily("samples", "make_finetune"),
            ("steps", "distance_samples_before", "distance_samples", "kept"),
        ),
        Stage(
            "dm",
            ("data", "map", "mdm", "samples", "finetune"),
            lambda s: {**_baseline(s.dm), "network": plain(s.mdm.network), "diffusion": plain(s.mdm.diffusion)},
            _lazily("model", "make_dm"),
            LEARNED,
        ),
        Stage(
            "evaluate",
            ("data", "map", "mdm", "samples", "finetune", "dm"),
            lambda s: plain(s.evaluate),
            _lazily("evaluate", "make_evaluation"),
            (
                "distance_ours",
                "distance_baseline",
                "distance_baseline_half_way",
                "mmd_ours",
                "mmd_baseline",
                "compute",
                "verdict",
            ),
        ),
        Stage("report", ("evaluate",), lambda s: {}, _lazily("report", "make_report")),
        Stage(
            "mvae",
            ("data", "map"),
            lambda s: _learning(s.vae),
            _lazily("model", "make_mvae"),
            LEARNED,
        ),
        Stage(
            "vae",
            ("data", "map", "mvae"),
            lambda s: _learning(s.vae),
            _lazily("model", "make_vae"),
            LEARNED,
        ),
    )
}


def needs(stage: Stage, settings: Settings) -> tuple[str, ...]:
    """What `stage` needs under these settings: a baseline with a budget of its own waits for the data alone."""
    return ("data",) if stage.name == "dm" and not settings.dm.equal_compute else stage.needs


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
    wanted = {require_name(last or MAIN_LINE, STAGES, "stage")}
    for stage in reversed(STAGES.values()):
        wanted |= set(needs(stage, settings)) if stage.name in wanted else set()
    return [stage for stage in STAGES.values() if stage.name in wanted]


def summary(stage: Stage, results: Mapping[str, Any]) -> str:
    """The results of a stage that people look at first."""
    shown = ((name.replace("_", " "), results[name]) for name in stage.shown if name in results)
    return ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown)
