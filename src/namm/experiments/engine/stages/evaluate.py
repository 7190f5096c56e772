"""The stage `evaluate`: every way to a sample side by side, on samples that no training has seen.

    data         other real images, the floor of every figure
    mdm          f(ỹ), ỹ from the mirror diffusion model, f as the stage `map` left it
    finetuned    the same ỹ through the finetuned f: the method
    few          f(ỹ), ỹ by the few evaluations of a model distilled from the mirror diffusion model, f finetuned
    dm           the baseline's own samples
    projected    the baseline's samples, projected on the rule's set, where the rule has a projection
    repaired     the baseline's samples through g and the finetuned f
    repair       repair at equal compute: samples of the baseline after the training that a map and its finetuning leave
                 for it, through g and an f that was finetuned on such samples
    … polished   samples of `finetuned`, `dm` and `repaired` moved to the nearest images on the rule, where asked for

All are compared with the same reference images, and both models are run by the same sampler from the same seed.

How the trainings came there is measured on fewer samples of the models as they were at their milestones (Fig. 4):

    mdm         f(ỹ), ỹ from the mirror diffusion model at that step, f as the stage `map` left it
    finetune    f(ỹ), ỹ from the trained model, f as finetuning had it at that step
    dm          the baseline's own samples

The paper draws the training of the mirror diffusion model as "Ours w/o FT", offset by the time that the map took: what
it shows there is what one would have had at that time, so f is the map's and not the finetuned one. Finetuning is a
curve of its own, "Ours", offset by the time of everything before it.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.batches import Images, map_images
from namm.errors import ConstraintError, DataError, RunFolderError
from namm.evaluation import Extractor, compare, distance_summary, fid, kid, picture_for
from namm.evaluation.mmd import Subset, in_memory
from namm.evaluation.scores import Milestone, half_way
from namm.evaluation.verdict import Figures, Verdict, judge, judge_map
from namm.exact.polish import can_polish
from namm.experiments.engine import build_models
from namm.experiments.engine.folder import is_complete, read_record, require_intact
from namm.experiments.engine.mirror_space import write_mirror_space
from namm.experiments.engine.processes import is_main, on_main_process
from namm.experiments.engine.rule_facts import write_facts
from namm.experiments.engine.run_parts import RunParts, describe_samples, device
from namm.experiments.engine.stages import Outcome, Work
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.model import EQUAL_COMPUTE, MILESTONES, load_milestone, milestones
from namm.experiments.engine.stages.repair import shorter_model
from namm.files import read_json, write_json
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import IdentityMap, MirrorMap
from namm.reading import REASON, damage_as
from namm.training.checkpoint import read
from namm.training.train_map import load_weights

POLISHED = {"finetuned_polished": "finetuned", "dm_polished": "dm", "repaired_polished": "repaired"}
"""Rows of polished samples, and what they are made of."""
ROWS = ("data", "mdm", "finetuned", "few", "dm", "projected", "repaired", "repair", *POLISHED)
OURS, BASELINE, SHORTER, FEW = "mdm.h5", "dm.h5", "repair.h5", "few.h5"
"""Samples of the method (through the finetuned f), of the baseline, of its shorter training, which are repaired, and of
the few-step model."""
METRICS = "metrics.json"
"""Every row's scores, the verdicts, the milestones, and what both sides cost."""


def make_evaluation(work: Work) -> Outcome:
    """Draw the samples of both models, or go on drawing them, and measure every row."""
    trained = RunParts.of(work)
    rule, before, after = trained.rule(), trained.mirror("map"), trained.mirror("finetune")
    with ExitStack() as stack:
        store = stack.enter_context(open_store(images_file(work.needs["data"])))
        n, reference = work.settings.evaluate.drawn, work.settings.evaluate.reference
        ours = stack.enter_context(_samples(work, OURS, trained.source("mdm", after), n, rule))
        baseline = stack.enter_context(_samples(work, BASELINE, trained.source("dm", IdentityMap()), n, rule))

        shorter = None
        if work.settings.repairs:
            shorter = stack.enter_context(_samples(work, SHORTER, shorter_model(work)[0], n, rule))

        few = None
        if work.settings.few.steps:
            few = stack.enter_context(_few_samples(work, trained.source("few", after), n, rule))

        certificates: dict[str, Any] = {}
        polisher = trained.polisher(rule) if work.settings.evaluate.polish and can_polish(rule) else None

        def rows() -> Iterator[tuple[str, Images]]:
            """Every row's images, one row at a time in memory."""
            others = "train" if reference == "test" else "test"
            yield "data", Subset(store[others], np.arange(min(n, store.sizes[others])))
            yield "mdm", map_images(before.to_data, ours.mirror_images, device(), "f")
            yield "finetuned", ours.images
            if few is not None:
                yield "few", few.images
            yield "dm", baseline.images
            if rule.has_project:
                yield "projected", map_images(rule.project, baseline.images, device(), "project")
            repaired = map_images(after.repair, baseline.images, device(), "f∘g")
            yield "repaired", repaired
            if shorter is not None:
                yield "repair", map_images(trained.mirror("repair").repair, shorter.images, device(), "f∘g")
            if polisher is not None:
                sources: dict[str, Images] = {"finetuned": ours.images, "dm": baseline.images, "repaired": repaired}
                for name, of in POLISHED.items():
                    polished = polisher(sources[of])
                    certificates[name] = polished.certificate.summary()
                    yield name, polished.images

        scores = on_main_process(lambda: _scores(work, rows(), in_memory(store[reference]), rule))
        learning = _milestones(work, trained, rule, ours, baseline)
        if is_main():
            write_facts(work.folder, rule, {"ours": ours, "baseline": baseline}, device())
            held_out = store["test" if store.sizes["test"] else "train"]
            write_mirror_space(work.folder, after, rule, held_out, ours, device())
    costs, half = _costs(work), half_way(learning.get("dm", []))
    verdicts = judge_rows(scores, read_record(work.needs["map"]).results)
    verdict = verdicts["finetuned"]
    metrics = {
        "rows": scores,
        "verdict": verdict.as_json(),
        "verdicts": {name: each.outcome for name, each in verdicts.items()},
        "certificates": certificates,
        **costs,
        "milestones": {name: [asdict(each) for each in them] for name, them in learning.items()},
    }
    if is_main():
        write_json(work.folder / METRICS, metrics)
    results = {
        "distance_ours": scores["finetuned"]["distance"]["mean"],
        "distance_baseline": scores["dm"]["distance"]["mean"],
        **({} if half is None else {"distance_baseline_half_way": half.mean}),
        "mmd_ours": scores["finetuned"]["mmd"][0],
        "mmd_baseline": scores["dm"]["mmd"][0],
        "mmd_data": scores["data"]["mmd"][0],
        "total_variation_ours": scores["finetuned"]["total_variation"],
        "compute": _describe_costs(costs),
        "verdict": verdict.outcome,
    }
    return Outcome(results, (METRICS, OURS, BASELINE), verdict=verdict.as_json())


def _samples(work: Work, name: str, source: Mirrored, n: int, rule: Constraint | None = None) -> SampleFile:
    """The file of that name with samples of one diffusion model, made if they are not there yet."""
    sampler = work.settings.evaluate.sampler
    return _written(work, name, source, n, rule, describe_samples(source, sampler), build_models.sampling(sampler))


def _few_samples(work: Work, source: Mirrored, n: int, rule: Constraint) -> SampleFile:
    """The same of the few-step model."""
    how = {"steps": work.settings.few.steps}
    return _written(work, FEW, source, n, rule, describe_samples(source, None) | how, how)


def _written(
    work: Work,
    name: str,
    source: Mirrored,
    n: int,
    rule: Constraint | None,
    description: Mapping[str, Any],
    options: Mapping[str, Any],
) -> SampleFile:
    write_samples(
        work.folder / name,
        source,
        n,
        seed=work.settings.evaluate.seed,
        description=description,
        constraint=rule,
        precision=work.settings.mdm.train.precision,
        progress=work.progress,
        **options,
    )
    return SampleFile(work.folder / name)


def _scores(
    work: Work, rows: Iterator[tuple[str, Images]], reference: Images, rule: Constraint
) -> dict[str, dict[str, Any]]:
    """Everything that is asked of every row; FID alone may take more images than the rest."""
    settings = work.settings.evaluate
    how: dict[str, Any] = {"size": settings.subset, "seed": settings.seed}
    extractor = None
    if settings.kid_subsets or settings.n_fid:
        extractor = Extractor(picture_for(rule), cache=work.folder / "features", device=device())
    scores = {}
    for name, lazy in rows:
        images = in_memory(lazy)
        first = Subset(images, np.arange(min(settings.n, images.shape[0])))
        row = asdict(compare(first, reference, rule, subsets=settings.mmd_subsets, device=device(), **how))
        if settings.kid_subsets:
            row["kid"] = kid(reference, first, extractor, subsets=settings.kid_subsets, **how)
        if settings.n_fid and images.shape[0] >= settings.n_fid:  # of fewer images FID is larger: nothing to compare
            among = np.arange(settings.n_fid)
            row["fid"] = fid(Subset(reference, among), Subset(images, among), extractor)
        scores[name] = row
    return scores


def _costs(work: Work) -> dict[str, Any]:
    """Compute seconds and steps of every stage that both sides are made of."""
    stages = (*EQUAL_COMPUTE, "dm", *(name for name in ("repair", "few") if name in work.needs))
    records = {name: read_record(work.needs[name]) for name in stages}
    seconds = {name: record.compute_seconds for name, record in records.items()}
    repaired = {}
    if "repair" in records:
        shorter = records["repair"].results["model_seconds"]
        repaired["compute_seconds_repair"] = seconds["map"] + shorter + seconds["repair"]
    return {
        "compute_seconds": seconds,
        "compute_seconds_ours": sum(seconds[name] for name in EQUAL_COMPUTE),
        "compute_seconds_baseline": seconds["dm"],
        **repaired,
        "steps": {name: record.results.get("steps") for name, record in records.items()},
    }


def _describe_costs(costs: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {costs['compute_seconds'][name]:.1f}" for name in EQUAL_COMPUTE)
    ours, baseline = costs["compute_seconds_ours"], costs["compute_seconds_baseline"]
    return f"ours {ours:.1f} s ({parts}) and baseline {baseline:.1f} s"


# Milestones


def _milestones(
    work: Work, trained: RunParts, rule: Constraint, ours: SampleFile, baseline: SampleFile
) -> dict[str, list[Milestone]]:
    """ℓ at every milestone, by the name of the stage that trained; nothing where no samples are asked for.

    One sample is followed through the training, since all have the evaluation's seed and sampler.
    """
    n = min(work.settings.evaluate.milestone_samples, work.settings.evaluate.drawn)
    if not n:
        return {}

    def milestone(mirror: MirrorMap | IdentityMap, y: Images, facts: Mapping[str, Any], offset: float) -> Milestone:
        x = map_images(mirror.to_data, y, device(), "f")
        distance = distance_summary(rule, x, device=device())
        seconds = offset + facts["compute_seconds"]
        return Milestone(facts["step"], seconds, distance.mean, distance.std, distance.n)

    def of_model(stage: str, mirror: MirrorMap | IdentityMap, last: Images, offset: float) -> Iterator[Milestone]:
        """A model at its milestones; the mirror images `last` of the trained model are there already."""
        model = trained.model(stage)
        for path in milestones(work.needs[stage]):
            facts = load_milestone(model, path)
            step = facts["step"]
            if step == facts["total"]:
                yield milestone(mirror, last, facts, offset)
                continue
            try:
                name = f"{MILESTONES}/{stage}-{step}.h5"
                with _samples(work, name, Mirrored(model, mirror), n) as samples:
                    yield milestone(mirror, samples.mirror_images, facts, offset)
            except (DataError, ConstraintError) as error:  # of a model that has learned little yet
                warnings.warn(f"the milestone of {stage} at step {step} is left out: {error}", stacklevel=2)

    def of_finetuning(y: Images, offset: float) -> Iterator[Milestone]:
        mirror = trained.mirror("map")
        for path in milestones(work.needs["finetune"]):
            load_weights(mirror, path)
            yield milestone(mirror, y, read(path).facts, offset)

    spent = {name: read_record(work.needs[name]).compute_seconds for name in ("map", "mdm", "samples")}
    first = np.arange(n)
    y = Subset(ours.mirror_images, first)
    return {
        "mdm": list(of_model("mdm", trained.mirror("map"), y, spent["map"])),
        "finetune": list(of_finetuning(y, sum(spent.values()))),
        "dm": list(of_model("dm", IdentityMap(), Subset(baseline.images, first), 0.0)),
    }


# The verdict


def judge_rows(
    rows: Mapping[str, Mapping[str, Any]], map_figures: Mapping[str, Any] | None = None
) -> dict[str, Verdict]:
    """The verdict on every row that the baseline is compared with; that on the row `finetuned` is the run's."""
    figures = {name: Figures.from_row(row) for name, row in rows.items()}
    data, baseline, repaired = figures.pop("data"), figures.pop("dm"), figures.get("repaired")
    return {
        name: judge(row, baseline, data, map_figures=map_figures, repaired=repaired) for name, row in figures.items()
    }


def read_metrics(folder: Path) -> dict[str, Any]:
    """What the stage in `folder` measured, refused where it is no longer as the stage wrote it."""
    found: dict[str, Any] = read_json(require_intact(folder) / METRICS)
    return found


def run_certificate(run: Path, row: str) -> Mapping[str, Any] | None:
    """The summary of the certificate of a run's polished row, such as `dm_polished`; None where it has none."""
    if not is_complete(run, "evaluate"):
        return None
    found: Mapping[str, Any] | None = read_metrics(run / "evaluate").get("certificates", {}).get(row)
    return found


def run_verdict(run: Path, stage: str | None = "finetune") -> Verdict | None:
    """The verdict on a run: on its evaluation where that is complete, else on its map; None where neither is.

    Runs of version 0.1 kept none, and are judged by the figures that they kept.

    Args:
        run: The run's folder.
        stage: The stage whose f the samples go through; `map` for those that are not finetuned.
    """
    learned = read_record(run / "map").results if is_complete(run, "map") else None
    if is_complete(run, "evaluate"):
        metrics, file = read_metrics(run / "evaluate"), run / "evaluate" / METRICS
        with damage_as(RunFolderError, f"{file} holds no verdict that can be read ({REASON}): move it away."):
            if "verdict" in metrics and stage == "finetune":
                return Verdict.from_json(metrics["verdict"])
            return judge_rows(metrics["rows"], learned)["finetuned" if stage == "finetune" else "mdm"]
    return None if learned is None else judge_map(learned)
