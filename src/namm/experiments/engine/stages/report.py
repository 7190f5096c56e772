"""The stage `report`: what a run's folder holds, collected and written as one HTML file.

`collect` reads what there is. A stage that is not complete is left out and named; a file that cannot be read becomes a
sentence among the report's problems. So a run can be looked at in any state, and whoever needs it whole asks for both.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from namm._version import __version__
from namm.constraints import Constraint
from namm.datasets import open_store
from namm.errors import NammError, RunFolderError
from namm.evaluation.scores import Milestone
from namm.experiments.engine.experiment import UNREPORTED, Data, Reported
from namm.experiments.engine.folder import SETTINGS, TRAINING, is_done, now, read_record, require_intact, stage_states
from namm.experiments.engine.mirror_space import read_mirror_space
from namm.experiments.engine.rule_facts import FIRST, WORST, facts_of, report_facts, samples_shown
from namm.experiments.engine.run import run as run_stages
from namm.experiments.engine.settings_file import plain, read_yaml
from namm.experiments.engine.stages import MAIN_LINE, Outcome, Work, stage_keys, stages_until
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.evaluate import BASELINE, OURS, POLISHED, judge_rows, read_metrics, run_verdict
from namm.experiments.engine.stages.model import EQUAL_COMPUTE
from namm.experiments.engine.stages.samples import TRAIN
from namm.experiments.presets import Preset, preset
from namm.files import write_atomically
from namm.generative.sample_file import SampleFile
from namm.report.contents import Contents, Cost, Row, StageLine
from namm.report.coordinates import PIXELS, Coordinates
from namm.report.figures import Array, View
from namm.report.figures.samples import Method, MirrorSpace
from namm.report.page import render_page
from namm.training import log
from namm.training.settings import METRICS

FILE = "report.html"
PARTIAL = "partial-report.html"
"""In the run's own folder, since the stage's belongs to the stage."""
GRID = 9
ENDS = {"mdm": "mdm", "finetune": "finetuned", "dm": "dm"}
"""The row that each training with milestones leads to."""
ORDER = ("data", "finetuned", "mdm", "few", "dm", "projected", "repaired", "repair", *POLISHED)
"""Rows as they follow each other on the page."""
UNREADABLE = (NammError, OSError, ValueError, LookupError, TypeError, RuntimeError, ArithmeticError)
RESIDUAL = "the rule's residual"
"""A problem that leaves out pictures and nothing else."""

T = TypeVar("T")
Methods = tuple[tuple[Method, ...], tuple[Method, ...]]


def make_report(work: Work) -> Outcome:
    """Write the report of the run that this stage belongs to."""
    contents = collect(work.folder.parent)
    if lacking := [problem for problem in contents.problems if not problem.startswith(RESIDUAL)]:
        raise RunFolderError(f"the report cannot be made. {' '.join(lacking)}")
    write_atomically(work.folder / FILE, render_page(contents))
    return Outcome({}, (FILE,))


def write_report(run: Path) -> Path:
    """Write the report of a run, whole or partial, and return where it is.

    A complete run's is the stage's own file, made anew if it is there already; a partial one lies in the run's folder.
    """
    chosen = read_yaml(run / SETTINGS)
    keys = stage_keys(chosen.settings)
    *before, last = stages_until(MAIN_LINE, chosen.settings)
    is_whole = all(is_done(run / stage.name, keys[stage.name]) for stage in before)
    path = run / last.name / FILE if is_whole else run / PARTIAL
    if is_whole and not is_done(run / last.name, keys[last.name]):
        run_stages(chosen, run, log=lambda line: None, force=True)
    else:
        write_atomically(path, render_page(collect(run)))  # needs no lock: a run may be looked at while it goes on
    return path


def collect(run: Path) -> Contents:
    """What there is to report of a run."""
    chosen = read_yaml(run / SETTINGS)
    problems: list[str] = []

    def attempt(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except UNREADABLE as error:
            if (problem := f"{what}: {type(error).__name__}: {error}") not in problems:
                problems.append(problem)
            return otherwise

    stages = _stages(run, chosen)
    done = {stage.name: run / stage.name for stage in stages if stage.state == "complete"}
    for name, folder in done.items():
        attempt(name, partial(require_intact, folder), folder)
    data = chosen.settings.data
    what = RESIDUAL if data.rule.named_code else "the rule"
    facts = attempt(what, lambda: report_facts(data, run.joinpath, done.get("evaluate")), None)
    if facts is not None and facts.problem:
        problems.append(f"{RESIDUAL}: {facts.problem}")

    coordinates = attempt("coordinates", lambda: data.coordinates, PIXELS)

    def pictures(key: str, images: Tensor) -> Array | None:
        return None if facts is None else attempt(RESIDUAL, lambda: facts.residual_pictures(key, images), None)

    metrics: dict[str, Any] = {}
    methods: Methods = ((), ())
    kept: tuple[Method, ...] = ()
    if "evaluate" in done:
        metrics = attempt("evaluate", lambda: read_metrics(done["evaluate"]), metrics)
        methods = attempt("samples", lambda: _methods(done["evaluate"], pictures), methods)
        kept = attempt("mirror space", lambda: read_mirror_space(done["evaluate"]), kept)
    return Contents(
        name=run.resolve().name,
        experiment=chosen.experiment,
        preset=chosen.name,
        rule=_rule_in_words(data),
        changed=_changed(chosen),
        settings=(run / SETTINGS).read_text(),
        stages=stages,
        verdict=attempt("evaluate" if "evaluate" in done else "map", lambda: run_verdict(run), None),
        rows=attempt("evaluate", lambda: _rows(metrics, chosen.reported), []),
        certificates=metrics.get("certificates", {}),
        ours=_costs(done, EQUAL_COMPUTE),
        few=_costs(done, ("few",)),
        baseline=_costs(done, ("dm",)),
        repair=_repair_costs(done),
        step_seconds=_step_seconds(done, chosen),
        milestones=attempt("evaluate", lambda: _milestones(metrics), {}),
        methods=methods[0],
        worst=methods[1],
        grids=attempt("images", lambda: _grids(done), {}),
        mirror=_mirror_space(methods[0], kept),
        tuning=read_record(done["map"]).results.get("tuning") if "map" in done else None,
        trainings=attempt("trainings", lambda: _trainings(run, stages), {}),
        view=replace(View() if facts is None else facts.view, coordinates=coordinates),
        made=_made(),
        problems=problems,
    )


def view_of(rule: Constraint, coordinates: Coordinates = PIXELS) -> View:
    """What people look at under this rule: the vorticity of a flow, else the image."""
    return replace(facts_of(rule).view, coordinates=coordinates)


# From the folder


def _stages(run: Path, chosen: Preset) -> list[StageLine]:
    """The stages of the main line, and others that are complete."""
    main_line = [stage.name for stage in stages_until(MAIN_LINE, chosen.settings)]
    lines = []
    for row in stage_states(run):
        if row.state == "aside" or (row.folder not in main_line and row.state != "complete"):
            continue
        line = StageLine(row.folder, row.state, row.seconds, row.results)
        if row.state != "not there yet":
            record = read_record(run / row.folder)
            line = replace(line, finished=_date(record.finished), version=record.version)
        lines.append(line)
    return lines


def _rows(metrics: Mapping[str, Any], reported: Reported) -> list[Row]:
    if not metrics:
        return []
    verdicts = judge_rows(metrics["rows"])
    papers = {"mdm": reported.without_finetuning, "finetuned": reported.with_finetuning, "dm": reported.baseline}
    if reported is UNREPORTED:
        papers = {}
    rows = []
    for name in (name for name in ORDER if name in metrics["rows"]):
        values = metrics["rows"][name]
        distance, kid = values["distance"], values.get("kid")
        row = Row(
            name=name,
            n=distance["n"],
            distance=distance["mean"],
            distance_std=distance["std"],
            distance_max=distance["max"],
            cd=reported.cd(distance["mean"]),
            mmd=(values["mmd"][0], values["mmd"][1]),
            total_variation=values["total_variation"],
            spread=values["spread"],
            kid=None if kid is None else (kid[0], kid[1]),
            fid=values.get("fid"),
            paper=papers.get(name),
            verdict=verdicts[name].outcome if name in verdicts else None,
        )
        rows.append(row)
    return rows


def _milestones(metrics: Mapping[str, Any]) -> dict[str, list[Milestone]]:
    stages = metrics.get("milestones", {})
    return {row: [Milestone(**each) for each in stages[stage]] for stage, row in ENDS.items() if stages.get(stage)}


def _methods(evaluated: Path, pictures: Callable[[str, Tensor], Array | None]) -> Methods:
    """The first and the worst samples of either method."""
    methods: dict[str, list[Method]] = {FIRST: [], WORST: []}
    for name, file in (("ours", OURS), ("baseline", BASELINE)):
        with SampleFile(evaluated / file) as samples:
            distances = samples.distances
            for which, rows in samples_shown(samples):
                images = samples.images[rows]
                residuals = pictures(f"{name}_{which}", images)
                methods[which].append(Method(name, images.numpy(), distances[rows], distances, residuals))
    return tuple(methods[FIRST]), tuple(methods[WORST])


def _mirror_space(methods: Sequence[Method], kept: Sequence[Method]) -> MirrorSpace | None:
    """Both spaces, f(ŷ) being the method's own first samples; none where nothing was kept of mirror space."""
    made = next((method for method in methods if method.name == "ours"), None)
    if not kept or made is None:
        return None
    data, mirror, sampled = kept
    return MirrorSpace(data, mirror, sampled, replace(made, name="f(ŷ)"))


def _grids(done: Mapping[str, Path]) -> dict[str, Array]:
    """The first images of every set that there is."""
    grids: dict[str, Array] = {}
    if "data" in done:
        with open_store(images_file(done["data"])) as store:
            split = "test" if store.sizes["test"] else "train"
            grids["data"] = store[split][:GRID].numpy()
    files = {"ours, not finetuned": ("samples", TRAIN), "ours": ("evaluate", OURS), "baseline": ("evaluate", BASELINE)}
    for name, (stage, file) in files.items():
        if stage in done:
            with SampleFile(done[stage] / file) as samples:
                grids[name] = samples.images[:GRID].numpy()
    return grids


def _trainings(run: Path, stages: Sequence[StageLine]) -> dict[str, list[dict[str, float]]]:
    """The logs of all trainings that were begun with these settings."""
    begun = [line.name for line in stages if line.state in ("complete", "partial")]
    paths = {name: run / name / TRAINING / METRICS for name in begun}
    logs = {name: log.read_metrics(path) for name, path in paths.items() if path.exists()}
    return {name: lines for name, lines in logs.items() if lines}


def _costs(done: Mapping[str, Path], names: Sequence[str]) -> tuple[Cost, ...]:
    records = {name: read_record(done[name]) for name in names if name in done}
    return tuple(Cost(name, each.compute_seconds, each.results.get("steps")) for name, each in records.items())


def _repair_costs(done: Mapping[str, Path]) -> tuple[Cost, ...]:
    """Compute of repair at equal compute, whose model is the baseline at an earlier step; nothing without the stage."""
    if "repair" not in done:
        return ()
    shorter = Cost("dm", read_record(done["repair"]).results["model_seconds"])
    return (*_costs(done, ("map",)), shorter, *_costs(done, ("repair",)))


def _step_seconds(done: Mapping[str, Path], chosen: Preset) -> float | None:
    """What a step of the mirrored model's training cost, where the baseline's is the same work."""
    ours, baseline = chosen.settings.mdm.train, chosen.settings.dm.train
    costs = _costs(done, ("mdm",)) if ours.same_step(baseline) else ()
    return costs[0].seconds / costs[0].steps if costs and costs[0].steps else None


def _changed(chosen: Preset) -> list[tuple[str, str, str]]:
    """Settings that are not the preset's: name, the preset's value, the run's."""
    before, after = (_flat(plain(each.settings)) for each in (preset(chosen.experiment, chosen.name), chosen))
    return [(name, str(before.get(name)), str(value)) for name, value in after.items() if value != before.get(name)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _rule_in_words(data: Data) -> str:
    """What the images are and what they obey, without the marks of code; settings.yaml has every digit."""
    images, rule = ((type(part).__doc__ or "").strip().replace("`", "") for part in (data, data.rule))
    known = {name: value for name, value in plain(data.rule).items() if value not in ("", None)}
    numbers = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in known.items())
    return f"The images: {images} The rule: {rule}" + (f" Its numbers: {numbers}." if numbers else "")


def _date(stamp: str | None) -> str:
    return (stamp or "").replace("T", " ").removesuffix("+00:00")


def _made() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU with {os.cpu_count()} cores"
    return {
        "made (UTC)": _date(now()),
        "by": f"namm {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}, {device}",
    }
