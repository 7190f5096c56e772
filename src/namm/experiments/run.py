"""Running an experiment: stage after stage, each once.

A stage that is complete for the same settings is not run again; one that was cut short goes on from its last
checkpoint; a changed setting reruns the stages that depend on it, and the old ones are set aside, not lost.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from namm.errors import DataError, RunFolderError, UsageError
from namm.experiments.folder import (
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
from namm.experiments.plain import changes, to_yaml
from namm.experiments.presets import Preset
from namm.experiments.settings import Settings
from namm.experiments.stages import Stage, Work, needs, stage_keys, stages_until, summary
from namm.files import owned

Tell = Callable[[str], None]


def run(
    chosen: Preset,
    folder: str | Path,
    *,
    until: str | None = None,
    tell: Tell = print,
    progress: bool = True,
) -> dict[str, Record]:
    """Run `chosen` in `folder` up to the stage `until` and return the record of every stage.

    Everything that can be wrong with names, settings and folder is refused before anything is computed or written.
    """
    stages, folder = stages_until(until, chosen.settings), Path(folder)
    require_run(folder, chosen.experiment)
    _require_one_process()
    keys = stage_keys(chosen.settings)
    if not all(is_done(folder / stage.name, keys[stage.name]) for stage in stages):
        _check_settings(chosen)
        if any(stage.name == "evaluate" for stage in stages):
            _check_evaluation(chosen.settings)
    try:
        with owned(folder):
            claim_run(folder, chosen.experiment)
            text = to_yaml(chosen)
            if (before := write_settings(folder, text)) is not None:
                tell(f"settings changed since the last call: {changes(before, text)}")
            return {stage.name: _run_stage(stage, chosen, folder, keys, tell, progress) for stage in stages}
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be used ({error}): once that is mended, the same command goes on where this one stopped."
        ) from error


def _run_stage(
    stage: Stage, chosen: Preset, run_folder: Path, keys: Mapping[str, str], tell: Tell, progress: bool
) -> Record:
    """Bring one stage to its end, unless it is there already."""
    settings, folder = chosen.settings, run_folder / stage.name
    needed = needs(stage, settings)
    record = place_stage(
        run_folder, stage.name, keys[stage.name], stage.part(settings), {name: keys[name] for name in needed}
    )
    if record.is_complete(folder):
        tell(f"{stage.name:<9}done before  {summary(stage, record.results)}")
        return record
    tell(f"{stage.name:<9}{'goes on' if record.attempts else 'running'}")
    work = Work(settings, folder, {name: run_folder / name for name in needed}, progress)
    record = _attempt(stage, work, record)
    tell(f"{stage.name:<9}done in {record.seconds:.1f} s  {summary(stage, record.results)}")
    return record


def _attempt(stage: Stage, work: Work, record: Record) -> Record:
    """Do the work of a stage and keep its record; a failure leaves it running, to be gone on with."""
    started = replace(record, status="running", started=record.started or now(), attempts=record.attempts + 1)
    write_record(work.folder, started)
    begin = time.monotonic()
    try:
        outcome = stage.function(work)
    except BaseException:
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
    )
    write_record(work.folder, finished)
    return read_record(work.folder)


def _check_settings(chosen: Preset) -> None:
    from namm.experiments.build import check

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


def _require_one_process() -> None:
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UsageError(
            "a run is one process and this is one of several: start it without torchrun. "
            "(`namm.train_map` itself trains on several.)"
        )


def _require_inception() -> None:
    from namm.evaluation.inception import load_inception

    try:
        load_inception()
    except DataError as error:
        raise UsageError(
            f"{error} To go without: --evaluate.kid-subsets 0 --evaluate.n-fid 0, or --until dm for now."
        ) from error
