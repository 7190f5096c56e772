"""The stage `evaluate`: every way to a sample side by side, on samples that no training has seen.

    data         other real images, the floor of every figure
    mdm          f(ỹ), ỹ from the mirror diffusion model, f as the stage `map` left it
    finetuned    the same ỹ through the finetuned f: the method
    dm           the baseline's own samples
    projected    the baseline's samples, projected on the rule's set, where the rule has a projection
    repaired     the baseline's samples through g and the finetuned f

All are compared with the same reference images, and both models are run by the same sampler from the same seed. How
the trainings came there is measured on fewer samples, `namm.experiments.engine.stages.milestones`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import nn

from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.batches import Images, map_images
from namm.datasets.store import Store
from namm.evaluation import Extractor, compare, fid, kid, picture_for
from namm.evaluation.milestone import Milestone, half_way
from namm.evaluation.rows import View, held
from namm.experiments.engine import build
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.judgement import METRICS, judge_rows
from namm.experiments.engine.processes import alone, is_main
from namm.experiments.engine.rule_facts import write_facts
from namm.experiments.engine.run_parts import Trained, describe_samples, device
from namm.experiments.engine.settings import EvaluateSettings
from namm.experiments.engine.stages import Outcome, Work
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.milestones import milestones
from namm.experiments.engine.stages.model import EQUAL_COMPUTE
from namm.files import write_json
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import IdentityMap, MirrorMap

ROWS = ("data", "mdm", "finetuned", "dm", "projected", "repaired")
OURS, BASELINE = "mdm.h5", "dm.h5"
"""Samples of the method (through the finetuned f) and of the baseline."""


def make_evaluation(work: Work) -> Outcome:
    """Draw the samples of both models, or go on drawing them, and measure every row."""
    settings = work.settings.evaluate
    with ExitStack() as stack:
        store = stack.enter_context(open_store(images_file(work.needs["data"])))
        trained = Trained.of(work)
        rule, before, after = trained.rule(), trained.mirror("map"), trained.mirror("finetune")
        ours = stack.enter_context(_samples(work, OURS, trained.source("mdm", after), rule))
        baseline = stack.enter_context(_samples(work, BASELINE, trained.source("dm", IdentityMap()), rule))

        def measured() -> dict[str, dict[str, Any]]:
            extractor, reference = _extractor(work, rule), held(store[settings.reference])
            return {
                name: _scores(settings, held(images), reference, rule, extractor)
                for name, images in _rows(work, store, rule, before, after, ours, baseline)
            }

        rows = alone(measured)
        found = milestones(work, trained, rule, ours, baseline)
        if is_main():
            write_facts(work.folder, rule, {"ours": ours, "baseline": baseline}, device())
    costs, along = _costs(work), {name: [asdict(each) for each in them] for name, them in found.items()}
    verdicts = judge_rows(rows, read_record(work.needs["map"]).results)
    verdict = verdicts["finetuned"]
    if is_main():
        outcomes = {name: each.outcome for name, each in verdicts.items()}
        judged = {"verdict": verdict.as_json(), "verdicts": outcomes}
        write_json(work.folder / METRICS, {"rows": rows, **judged, **costs, "milestones": along})
    results = _headline(rows, found) | {"compute": _in_words(costs), "verdict": verdict.outcome}
    return Outcome(results, (METRICS, OURS, BASELINE), verdict=verdict.as_json())


def _scores(
    settings: EvaluateSettings, images: Images, reference: Images, rule: Constraint, extractor: Extractor | None
) -> dict[str, Any]:
    """Everything that is asked of one row; FID alone may take more images than the rest."""
    first = View(images, np.arange(min(settings.n, images.shape[0])))
    how = {"size": settings.subset, "seed": settings.seed}
    scores = asdict(compare(first, reference, rule, subsets=settings.mmd_subsets, device=device(), **how))
    if settings.kid_subsets:
        scores["kid"] = kid(reference, first, extractor, subsets=settings.kid_subsets, **how)
    if settings.n_fid and images.shape[0] >= settings.n_fid:  # of fewer images FID is larger: no floor to compare with
        among = np.arange(settings.n_fid)
        scores["fid"] = fid(View(reference, among), View(images, among), extractor)
    return scores


def _extractor(work: Work, rule: Constraint) -> Extractor | None:
    """Inception with the rule's kind of picture, if it is needed."""
    settings = work.settings.evaluate
    if not (settings.kid_subsets or settings.n_fid):
        return None
    return Extractor(picture_for(rule), cache=work.folder / "features", device=device())


def _rows(
    work: Work,
    store: Store,
    rule: Constraint,
    before: MirrorMap,
    after: MirrorMap,
    ours: SampleFile,
    baseline: SampleFile,
) -> Iterator[tuple[str, Images]]:
    """Every row's images, one row at a time in memory."""
    yield "data", _others(work, store)
    yield "mdm", map_images(before.to_data, ours.mirror_images, device(), "f")
    yield "finetuned", ours.images
    yield "dm", baseline.images
    if rule.has_project:
        yield "projected", map_images(rule.project, baseline.images, device(), "project")
    yield "repaired", map_images(nn.Sequential(after.g, after.f), baseline.images, device(), "f∘g")


def _others(work: Work, store: Store) -> Images:
    """Real images that are not the reference, as many as there are samples."""
    split = "train" if work.settings.evaluate.reference == "test" else "test"
    return View(store[split], np.arange(min(work.settings.evaluate.drawn, store.sizes[split])))


def _samples(work: Work, name: str, source: Mirrored, rule: Constraint) -> SampleFile:
    """The samples of one model, made if they are not there yet."""
    settings = work.settings.evaluate
    write_samples(
        work.folder / name,
        source,
        settings.drawn,
        seed=settings.seed,
        description=describe_samples(source, settings.sampler),
        constraint=rule,
        precision=work.settings.mdm.train.precision,
        **build.sampling(settings.sampler),
        progress=work.progress,
    )
    return SampleFile(work.folder / name)


def _costs(work: Work) -> dict[str, Any]:
    """Compute seconds and steps of every stage that both sides are made of."""
    records = {name: read_record(work.needs[name]) for name in (*EQUAL_COMPUTE, "dm")}
    seconds = {name: record.compute_seconds for name, record in records.items()}
    return {
        "compute_seconds": seconds,
        "compute_seconds_ours": sum(seconds[name] for name in EQUAL_COMPUTE),
        "compute_seconds_baseline": seconds["dm"],
        "steps": {name: record.results.get("steps") for name, record in records.items()},
    }


def _in_words(costs: dict[str, Any]) -> str:
    """What both sides cost, stage by stage."""
    parts = ", ".join(f"{name} {costs['compute_seconds'][name]:.1f}" for name in EQUAL_COMPUTE)
    ours, baseline = costs["compute_seconds_ours"], costs["compute_seconds_baseline"]
    return f"ours {ours:.1f} s ({parts}) and baseline {baseline:.1f} s"


def _headline(rows: dict[str, dict[str, Any]], found: Mapping[str, Sequence[Milestone]]) -> dict[str, float]:
    ours, baseline = rows["finetuned"], rows["dm"]
    half = half_way(found.get("dm", []))
    return {
        "distance_ours": ours["distance"]["mean"],
        "distance_baseline": baseline["distance"]["mean"],
        **({} if half is None else {"distance_baseline_half_way": half.mean}),
        "mmd_ours": ours["mmd"][0],
        "mmd_baseline": baseline["mmd"][0],
        "mmd_data": rows["data"]["mmd"][0],
        "total_variation_ours": ours["total_variation"],
    }
