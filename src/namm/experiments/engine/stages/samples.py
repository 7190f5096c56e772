"""The stages `samples` and `finetune`: what the model really produces, and f trained on it (paper Sec. 3.3, Eq. 7)."""

from contextlib import ExitStack

from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.batches import Images, in_chunks, map_images
from namm.evaluation import distance_summary, total_variation
from namm.experiments.engine import build_models
from namm.experiments.engine.folder import TRAINING, read_record
from namm.experiments.engine.run_parts import RunParts, describe_samples, device
from namm.experiments.engine.stages import Outcome, Work
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.map import CHUNK, Numbers
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import MirrorMap
from namm.training.train_map import finetune_map
from namm.training.trainer import TrainResult

TRAIN, HELD_OUT = "train.h5", "held_out.h5"
"""Samples to finetune on, and samples to see by whether it helps."""


def make_samples(work: Work) -> Outcome:
    """Draw mirror images from the model, or go on drawing them."""
    parts = RunParts.of(work)
    return draw_samples(work, parts.source("mdm", parts.mirror("map")))


def draw_samples(work: Work, source: Mirrored) -> Outcome:
    """Samples of `source` to finetune on, and held-out ones, in the files `TRAIN` and `HELD_OUT` of the stage."""
    settings, rule = work.settings.samples, RunParts.of(work).rule()
    sizes = {TRAIN: settings.n, HELD_OUT: settings.n_val}
    files = tuple(name for name, n in sizes.items() if n)
    seconds, distance = 0.0, 0.0
    for name in files:
        write_samples(
            work.folder / name,
            source,
            sizes[name],
            seed=settings.seed,
            first=0 if name == TRAIN else settings.n,
            description=describe_samples(source, settings.sampler),
            constraint=rule,
            precision=work.settings.mdm.train.precision,
            **build_models.sampling(settings.sampler),
            progress=work.progress,
        )
        with SampleFile(work.folder / name) as file:
            seconds += file.compute_seconds
            distance += float(file.distances.sum())
    count = sum(sizes.values())
    return Outcome({"samples": count, "distance_mean": distance / count}, files, seconds)


def make_finetune(work: Work) -> Outcome:
    """Train f on the samples, or go on, and measure on held-out ones what that changed."""
    folder = work.needs["samples"]
    with ExitStack() as stack:
        samples = stack.enter_context(SampleFile(folder / TRAIN)).mirror_images
        others = folder / HELD_OUT
        held_out = stack.enter_context(SampleFile(others)).mirror_images if others.exists() else None
        return finetune_on(work, RunParts.of(work).mirror("map"), samples, held_out)


def finetune_on(work: Work, mirror: MirrorMap, samples: Images, held_out: Images | None) -> Outcome:
    """Train f on `samples` of mirror space in the stage's folder, watched by others where there are any."""
    settings, rule = work.settings.finetune, RunParts.of(work).rule()
    numbers = Numbers.from_results(read_record(work.needs["map"]).results, work.settings.map)
    with open_store(images_file(work.needs["data"])) as store:
        before = _measure(mirror, rule, held_out)
        trained = finetune_map(
            mirror,
            store["train"],
            samples,
            rule,
            noise=numbers.finetuning_noise(work.settings),
            weights=build_models.weights(settings.weights, numbers.unit),
            settings=settings.train,
            validation=(store["val"], samples if held_out is None else held_out),  # without any, f could not be watched
            folder=work.folder / TRAINING,
            progress=work.progress,
        )
        after = _measure(mirror, rule, held_out)
    was = {f"{name}_before": value for name, value in before.items()}
    results = {"steps": trained.steps, "images": trained.images, **was, **after, "kept": _kept(trained)}
    return Outcome(results, (f"{TRAINING}/mirror",), trained.compute_seconds)


def _kept(trained: TrainResult) -> str:
    """Which f the watch has kept, in words."""
    if trained.collapsed:
        how = "the map's f stands" if not trained.kept_step else f"f of step {trained.kept_step} stands"
        return f"collapsed at step {trained.steps}: {how}"
    return f"f of step {trained.kept_step}" if trained.kept_step else "the map's f: finetuning did not improve it"


def _measure(mirror: MirrorMap, rule: Constraint, samples: Images | None) -> dict[str, float]:
    """Mean ℓ and total variation of f(ỹ), nothing where there are no samples."""
    if samples is None:
        return {}
    x = map_images(mirror.to_data, samples, device(), "f")
    variation = [float(total_variation(rows).sum()) for rows in in_chunks(x, CHUNK)]
    distance = distance_summary(rule, x, device=device()).mean
    return {"distance_samples": distance, "variation_samples": sum(variation) / len(x)}
