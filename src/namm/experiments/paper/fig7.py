"""Fig. 7: g as the gradient of a convex network against g as a ResNet, both without finetuning.

The ResNet's map and the model on its mirror images are variants of the run's own stages, trained with the same settings
and kept in the run's folder. As in the paper both of its networks add their input; its regulariser is Eq. 5, since a
ResNet has no potential.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from namm.datasets.batches import Images
from namm.experiments.engine import build_models
from namm.experiments.engine.folder import TRAINING
from namm.experiments.engine.run_parts import describe_samples, device, untrained
from namm.experiments.engine.settings import MapSettings
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages import STAGES
from namm.experiments.engine.stages.evaluate import BASELINE, OURS
from namm.experiments.engine.stages.map import choose_numbers, mirror_folder
from namm.experiments.engine.stages.report import view_of
from namm.experiments.paper.measurements import HISTOGRAM, FinishedRun
from namm.experiments.paper.output import Part, Runs, Value, over_seeds
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import MirrorMap
from namm.numerics import fold
from namm.report.figures import Array
from namm.report.figures.studies import Variant, forward_maps_figure
from namm.training.objectives import identity_regulariser
from namm.training.train_map import train_map
from namm.training.train_model import train_model

SAMPLES = "samples.h5"
FORMATS = {"g": "", "seeds": "d", "samples": "d", "mean ℓ": ".3g", "largest ℓ": ".3g", "CD": ".3g"}
NAMES = {"icnn": "ICNN", "resnet": "ResNet", "dm": "baseline"}


def fig7(runs: Runs) -> Part:
    """One image through either g, and distances of 128 samples of either and of the baseline, of the first seed."""
    distances = [_distances(run) for run in runs.complete]
    rows: list[list[Value]] = []
    for key, name in NAMES.items():
        values = [seed[key] for seed in distances]
        means, largest = ([float(reduced(each)) for each in values] for reduced in (np.mean, np.max))
        cd = over_seeds([runs.reported.cd(mean) for mean in means])
        n = len(values[0]) if values else None
        rows.append([name, len(values), n, over_seeds(means), over_seeds(largest), cd])
    if not runs.complete:
        return Part(FORMATS, rows)
    first, drawn = runs.complete[0], {NAMES[key]: values.tolist() for key, values in distances[0].items()}
    figure = forward_maps_figure(
        first.held_out_image()[0].numpy(),
        [Variant(NAMES[key], image, distances[0][key]) for key, image in _mirror_images(first).items()],
        distances[0]["dm"],
        view=view_of(first.parts.rule().cpu()),
    )
    return Part(FORMATS, rows, figure, drawn)


def measure(run: FinishedRun, progress: bool) -> None:
    """Train the variant, or go on, and draw its samples."""
    folder, settings = _folder(run), run.settings
    if (folder / SAMPLES).exists():
        return
    rule = run.parts.rule()
    with run.images() as store:
        images, shape = store["train"], store["train"].shape[1:]
        shared: dict[str, Any] = {"validation": store["val"], "progress": progress}
        mirror = resnet_pair(settings.map, images)
        numbers = choose_numbers(settings.map, mirror, images, rule)
        train_map(
            mirror,
            images,
            rule,
            noise=numbers.noise(settings.map),
            weights=build_models.weights(settings.map.weights, numbers.unit),
            regulariser=identity_regulariser,
            settings=settings.map.train,
            folder=folder / "map" / TRAINING,
            **shared,
        )
        model = untrained("mdm", settings, shape)
        train_model(model, images, mirror, settings=settings.mdm.train, folder=folder / "mdm" / TRAINING, **shared)
    source = Mirrored(model, mirror).to(device())
    write_samples(
        folder / SAMPLES,
        source,
        HISTOGRAM,
        seed=settings.evaluate.seed,
        description=describe_samples(source, settings.evaluate.sampler),
        constraint=rule,
        progress=progress,
        sampler=build_models.sampler(settings.evaluate.sampler),
    )


def resnet_pair(settings: MapSettings, data: Images) -> MirrorMap:
    """g and f as two networks of the kind of f, with their first weights; g has no last activation."""
    f = replace(settings.f, residual=True)
    maps = build_models.mirror(replace(settings, f=f), data)
    seed = fold(settings.train.seed, "g") % 2**31
    train = replace(settings.train, seed=seed)
    maps.g = build_models.mirror(replace(settings, f=replace(f, activation="none"), train=train), data).f
    return maps


def _folder(run: FinishedRun) -> Path:
    training = [STAGES[stage].part(run.settings) for stage in ("map", "mdm")]
    evaluate = run.settings.evaluate
    return run.study("resnet", ("data",), [*training, plain(evaluate.sampler), evaluate.seed])


def _distances(run: FinishedRun) -> dict[str, Array]:
    """ℓ of as many samples of each: through the run's own map, through the ResNets, of the baseline."""
    evaluation = run.folder / "evaluate"
    with SampleFile(evaluation / OURS) as ours:
        own = run.distances("map", ours.mirror_images)
    with SampleFile(_folder(run) / SAMPLES) as resnet, SampleFile(evaluation / BASELINE) as baseline:
        return {"icnn": own, "resnet": resnet.distances, "dm": baseline.distances[:HISTOGRAM]}


@torch.no_grad()
def _mirror_images(run: FinishedRun) -> dict[str, Array]:
    """What either g makes of a held-out image."""
    x = run.held_out_image().to(device())
    maps = {"icnn": run.parts.mirror("map"), "resnet": MirrorMap.load(mirror_folder(_folder(run) / "map")).to(device())}
    return {name: mirror.to_mirror(x)[0].cpu().numpy() for name, mirror in maps.items()}
