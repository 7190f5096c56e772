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

from namm.errors import DataError, RunFolderError, UsageError, VerdictError
from namm.experiments.engine.folder import (
    RUN,
    Record,
    is_done,
    now,
    place_stage,
    read_record,
    require_intact,
    run_claim,
    stage_digests,
    write_record,
    write_settings,
)
from namm.experiments.engine.processes import is_main, on_main_process, require_shared, world
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.settings_file import changes, to_yaml
from namm.experiments.engine.stages import Stage, Work, needs, stage_keys, stages_until, summary
from namm.experiments.presets import Preset
from namm.files import owned

Logger = Callable[[str], None]

REPORT = "report"
"""The stage that only reads: it needs no rule and no images, and the main process makes it while the others wait."""


def rank_zero_log(log: Logger) -> Logger:
    """`log` in the main process, silence in the others."""
    return log if is_main() else lambda line: None


def run(
    chosen: Preset,
    folder: str | Path,
    *,
    until: str | None = None,
    log: Logger = print,
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
    log = rank_zero_log(log)
    try:
        with ExitStack() as held:
            on_main_process(lambda: _begin(chosen, stages, folder, keys, held, log))
            require_shared(folder, RUN)
            records: dict[str, Record] = {}
            for stage in stages:
                records[stage.name] = _run_stage(stage, chosen, folder, keys, log, progress)
                if stage.gate and not force:
                    later = [other for other in stages if other.name not in records]
                    on_main_process(partial(_require_good, records[stage.name], folder, keys, later))
            return records
    except BrokenPipeError:  # stdout was closed
        raise
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be used ({error}): fix that, then run the same command to resume."
        ) from error


def _begin(
    chosen: Preset, stages: Sequence[Stage], folder: Path, keys: Mapping[str, str], held: ExitStack, log: Logger
) -> None:
    """Refuse what can be refused now; then the folder is ours until `held` is closed."""
    claim = run_claim(folder, chosen.experiment)
    claim.check()
    if any(stage.name != REPORT and not is_done(folder / stage.name, keys[stage.name]) for stage in stages):
        check_settings(chosen.settings, stages)
    held.enter_context(owned(folder))
    claim.take()
    text = to_yaml(chosen)
    if (before := write_settings(folder, text)) is not None:
        log(f"settings changed since the last call: {changes(before, text)}")


def _run_stage(
    stage: Stage, chosen: Preset, run_folder: Path, keys: Mapping[str, str], log: Logger, progress: bool
) -> Record:
    """Bring one stage to its end, unless it is there already."""
    settings, folder = chosen.settings, run_folder / stage.name
    needed = needs(stage, settings)

    def place() -> tuple[Record, bool]:
        before = {name: keys[name] for name in needed}
        record = place_stage(run_folder, stage.name, keys[stage.name], stage.part(settings), before)
        done = record.is_complete(folder)
        for name in () if done else needed:
            require_intact(run_folder / name)
        return record, done

    record, done = on_main_process(place)
    if not done:
        log(f"{stage.name:<9}{'resuming' if record.attempts else 'running'}")
        work = Work(settings, folder, {name: run_folder / name for name in needed}, progress)
        record = _attempt(stage, work, record)
    compute = f"compute {record.compute_seconds:.1f} s, " if record.compute_seconds else ""
    how = "done before" if done else f"done in {record.seconds:.1f} s"
    log(f"{stage.name:<9}{how}  {compute}{summary(stage, record.results)}")
    if record.verdict is not None:
        from namm.evaluation.verdict import Verdict

        for line in Verdict.from_json(record.verdict).lines():
            log(line)
    return record


def _attempt(stage: Stage, work: Work, record: Record) -> Record:
    """Do the work of a stage and keep its record; a failure leaves it running, to be gone on with."""
    started = replace(record, status="running", started=record.started or now(), attempts=record.attempts + 1)
    on_main_process(lambda: write_record(work.folder, started))
    begin = time.monotonic()
    try:
        outcome = on_main_process(lambda: stage.function(work)) if stage.name == REPORT else stage.function(work)
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

    def keep() -> Record:
        write_record(work.folder, replace(finished, digests=stage_digests(work.folder)))
        return read_record(work.folder)

    return on_main_process(keep)


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


def check_settings(settings: Settings, stages: Sequence[Stage]) -> None:
    """Refuse, before hours are spent, settings that some stage could not use."""
    from namm.experiments.engine.build_models import check

    check(settings)
    names = [stage.name for stage in stages]
    for name in ("vae" if name == "mvae" else name for name in names):  # batches that processes cannot share equally
        train = getattr(getattr(settings, name, None), "train", None)
        if train is not None and train.batch_size % world():
            raise UsageError(
                f"{name}.train.batch_size is {train.batch_size}, which {world()} processes cannot share: make it a "
                f"multiple of {world()}."
            )
    if "evaluate" in names:
        _check_evaluation(settings)


def _check_evaluation(settings: Settings) -> None:
    """Refuse an evaluation that would have too few images at its end."""
    asked, sizes = settings.evaluate, settings.data.sizes
    for split in ("train", "test"):
        if sizes[split] < asked.subset:
            raise UsageError(
                f"data.n_{split} is {sizes[split]}, and the evaluation takes subsets of {asked.subset} images "
                "(evaluate.subset) of it: ask for more images or for smaller subsets."
            )
    if (n := sizes[asked.reference]) < asked.n_fid:
        raise UsageError(
            f"evaluate.n_fid is {asked.n_fid} and data.n_{asked.reference} is {n}: FID compares equal numbers of "
            "images. Ask for fewer, or draw more."
        )
    if asked.n < asked.subset:
        raise UsageError(
            f"evaluate.n is {asked.n}, fewer than the {asked.subset} images of a subset (evaluate.subset): "
            "ask for more samples or for smaller subsets."
        )
    if asked.kid_subsets or asked.n_fid:
        from namm.evaluation.inception import load_inception

        try:
            load_inception()
        except DataError as error:
            raise UsageError(
                f"{error} To go without: --evaluate.kid-subsets 0 --evaluate.n-fid 0, or --until dm for now."
            ) from error
