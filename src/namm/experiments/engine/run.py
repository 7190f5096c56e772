"""Running an experiment: stage after stage, each once.

A stage that is complete for the same settings is not run again; one that was cut short goes on from its last
checkpoint; a changed setting reruns the stages that depend on it, and the old ones are set aside, not lost.

Under torchrun every process calls `run`. The main one owns the folder, keeps the records and speaks; all of them train
and sample together.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from namm.errors import DataError, RunFolderError, UsageError, VerdictError
from namm.experiments.engine.folder import (
    RUN,
    Record,
    claim_run,
    is_done,
    now,
    place_stage,
    read_record,
    require_run,
    write_record,
    write_settings,
)
from namm.experiments.engine.processes import alone, is_main, require_shared, world
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.settings_file import changes, to_yaml
from namm.experiments.engine.stages import Stage, Work, needs, stage_keys, stages_until, summary
from namm.experiments.presets import Preset
from namm.files import owned

Tell = Callable[[str], None]

REPORT = "report"
"""The stage that builds nothing from the settings, so that it needs no rule and no images."""
ALONE = (REPORT,)
"""Stages that neither train nor sample: the main process does them while the others wait."""


def of_main(tell: Tell) -> Tell:
    """`tell` in the main process, silence in the others."""
    return tell if is_main() else lambda line: None


def run(
    chosen: Preset,
    folder: str | Path,
    *,
    until: str | None = None,
    tell: Tell = print,
    progress: bool = True,
    force: bool = False,
) -> dict[str, Record]:
    """Run `chosen` in `folder` up to the stage `until` and return the record of every stage.

    After a map that is no good (its verdict is not `works`) the run stops, unless `force` is set: models, samples and
    finetuning would only inherit its fault.

    Everything that can be wrong with names, settings and folder is refused before anything is computed or written.
    """
    stages, folder = stages_until(until, chosen.settings), Path(folder)
    keys = stage_keys(chosen.settings)
    tell = of_main(tell)
    try:
        with ExitStack() as held:
            alone(lambda: _begin(chosen, stages, folder, keys, held, tell))
            require_shared(folder, RUN)
            records: dict[str, Record] = {}
            for stage in stages:
                records[stage.name] = _run_stage(stage, chosen, folder, keys, tell, progress)
                if stage.gate and not force:
                    later = [other for other in stages if other.name not in records]
                    alone(partial(_require_good, records[stage.name], folder, keys, later))
            return records
    except BrokenPipeError:  # nobody reads what is told
        raise
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be used ({error}): once that is mended, the same command goes on where this one stopped."
        ) from error


def _begin(
    chosen: Preset, stages: Sequence[Stage], folder: Path, keys: Mapping[str, str], held: ExitStack, tell: Tell
) -> None:
    """Refuse what can be refused now; then the folder is ours until `held` is closed."""
    require_run(folder, chosen.experiment)
    if any(stage.name != REPORT and not is_done(folder / stage.name, keys[stage.name]) for stage in stages):
        _check_settings(chosen)
        _check_sharing(chosen.settings, stages)
        if any(stage.name == "evaluate" for stage in stages):
            _check_evaluation(chosen.settings)
    held.enter_context(owned(folder))
    claim_run(folder, chosen.experiment)
    text = to_yaml(chosen)
    if (before := write_settings(folder, text)) is not None:
        tell(f"settings changed since the last call: {changes(before, text)}")


def _run_stage(
    stage: Stage, chosen: Preset, run_folder: Path, keys: Mapping[str, str], tell: Tell, progress: bool
) -> Record:
    """Bring one stage to its end, unless it is there already."""
    settings, folder = chosen.settings, run_folder / stage.name
    needed = needs(stage, settings)
    part, before = stage.part(settings), {name: keys[name] for name in needed}
    record, done = alone(lambda: _placed(run_folder, stage.name, keys[stage.name], part, before))
    if done:
        tell(f"{stage.name:<9}done before  {_found(stage, record)}")
        _tell_verdict(record, tell)
        return record
    tell(f"{stage.name:<9}{'goes on' if record.attempts else 'running'}")
    work = Work(settings, folder, {name: run_folder / name for name in needed}, progress)
    record = _attempt(stage, work, record)
    tell(f"{stage.name:<9}done in {record.seconds:.1f} s  {_found(stage, record)}")
    _tell_verdict(record, tell)
    return record


def _tell_verdict(record: Record, tell: Tell) -> None:
    if record.verdict is not None:
        from namm.evaluation.verdict import Verdict

        for line in Verdict.from_json(record.verdict).lines():
            tell(line)


def _require_good(record: Record, run: Path, keys: Mapping[str, str], later: Sequence[Stage]) -> None:
    """Refuse to build on a stage whose verdict is not `works`; what is there already is not refused."""
    if record.verdict is None or all(is_done(run / stage.name, keys[stage.name]) for stage in later):
        return
    from namm.evaluation.verdict import Verdict

    verdict = Verdict.from_json(record.verdict)
    if not verdict.works:
        raise VerdictError(
            f"stopped after the stage {record.stage!r}, whose verdict is {verdict.headline} "
            f"Try: {' Or: '.join(verdict.next_steps)} --force goes on all the same."
        )


def _placed(run: Path, stage: str, key: str, part: Any, before: Mapping[str, str]) -> tuple[Record, bool]:
    """The record of a stage in its folder, and whether it is complete."""
    record = place_stage(run, stage, key, part, before)
    return record, record.is_complete(run / stage)


def _found(stage: Stage, record: Record) -> str:
    """What the stage cost on its side of the comparison, and its results."""
    compute = f"compute {record.compute_seconds:.1f} s, " if record.compute_seconds else ""
    return compute + summary(stage, record.results)


def _attempt(stage: Stage, work: Work, record: Record) -> Record:
    """Do the work of a stage and keep its record; a failure leaves it running, to be gone on with."""
    started = replace(record, status="running", started=record.started or now(), attempts=record.attempts + 1)
    alone(lambda: write_record(work.folder, started))
    begin = time.monotonic()
    try:
        outcome = alone(lambda: stage.function(work)) if stage.name in ALONE else stage.function(work)
    except BaseException:
        if is_main():
            write_record(work.folder, replace(started, seconds=started.seconds + time.monotonic() - begin))
        raise
    finished = replace(
        started,
        status="complete",
        finished=now(),
        seconds=started.seconds + time.monotonic() - begin,
        compute_seconds=outcome.compute_seconds,
        results=dict(outcome.results),
        files=outcome.files,
        verdict=outcome.verdict,
    )
    return alone(lambda: _kept(work.folder, finished))


def _kept(folder: Path, record: Record) -> Record:
    write_record(folder, record)
    return read_record(folder)


def _check_settings(chosen: Preset) -> None:
    from namm.experiments.engine.build import check

    check(chosen.settings)


def _check_evaluation(settings: Settings) -> None:
    """Refuse, before hours are spent, an evaluation that would have too few images at its end."""
    asked = settings.evaluate
    for split in ("train", "test"):
        if (n := settings.data.sizes[split]) < asked.subset:
            raise UsageError(
                f"data.n_{split} is {n}, and the evaluation takes subsets of {asked.subset} images (evaluate.subset) "
                "of it: ask for more images or for smaller subsets."
            )
    if (n := settings.data.sizes[asked.reference]) < asked.n_fid:
        raise UsageError(
            f"evaluate.n_fid is {asked.n_fid} and data.n_{asked.reference} is {n}: FID compares equal numbers of "
            "images. Ask for fewer, or draw more."
        )
    if asked.kid_subsets or asked.n_fid:
        _require_inception()
    if asked.n < asked.subset:
        raise UsageError(
            f"evaluate.n is {asked.n}, fewer than the {asked.subset} images of a subset (evaluate.subset): "
            "ask for more samples or for smaller subsets."
        )


def _check_sharing(settings: Settings, stages: Sequence[Stage]) -> None:
    """Refuse batches that the processes cannot share equally."""
    trained = {"mvae": "vae"}
    for name in (trained.get(stage.name, stage.name) for stage in stages):
        train = getattr(getattr(settings, name, None), "train", None)
        if train is not None and train.batch_size % world():
            raise UsageError(
                f"{name}.train.batch_size is {train.batch_size}, which {world()} processes cannot share: make it a "
                f"multiple of {world()}."
            )


def _require_inception() -> None:
    from namm.evaluation.inception import load_inception

    try:
        load_inception()
    except DataError as error:
        raise UsageError(
            f"{error} To go without: --evaluate.kid-subsets 0 --evaluate.n-fid 0, or --until dm for now."
        ) from error
