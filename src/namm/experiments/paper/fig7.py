"""Fig. 7: g as the gradient of a convex network against g as a ResNet, both without finetuning.

The ResNet's map and the model on its mirror images are variants of the run's own stages, trained with the same settings
and kept in the run's folder. As in the paper both of its networks add their input; its regulariser is Eq. 5, since a
ResNet has no potential.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from namm.experiments.engine import build
from namm.experiments.engine.run_parts import describe_samples, device, untrained
from namm.experiments.engine.settings import MapSettings
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages import STAGES
from namm.experiments.engine.stages.evaluate import BASELINE, OURS
from namm.experiments.engine.stages.map import TRAINING, mirror_folder
from namm.experiments.engine.stages.report import view_of
from namm.experiments.paper.measurements import (
    HISTOGRAM,
    by_experiment,
    complete,
    distances,
    images_of,
    settings_of,
    study,
    trained,
)
from namm.experiments.paper.output import Shown, Table, over_seeds
from namm.experiments.sweeps.cell import CellOutcome
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import MirrorMap, ResNet
from namm.numerics import fold
from namm.report.figures import Array
from namm.report.figures.studies import Variant, forward_maps_figure
from namm.training.objectives import identity_regulariser
from namm.training.train_map import train_map
from namm.training.train_model import train_model

SAMPLES = "samples.h5"
FORMATS = {"experiment": "", "g": "", "seeds": "d", "samples": "d", "mean ℓ": ".3g", "largest ℓ": ".3g", "CD": ".3g"}
NAMES = {"icnn": "ICNN", "resnet": "ResNet", "dm": "baseline"}


def fig7(outcomes: Sequence[CellOutcome]) -> Shown:
    """One image through either g, and distances of 128 samples of either and of the baseline, of the first seed."""
    rows: list[Any] = []
    figures, drawn = {}, {}
    for experiment, cells in by_experiment(outcomes).items():
        done, reported = complete(cells), cells[0].cell.preset.reported
        found = [_distances(outcome) for outcome in done]
        for key, name in NAMES.items():
            values = [each[key] for each in found]
            means, largest = ([float(reduced(each)) for each in values] for reduced in (np.mean, np.max))
            cd = over_seeds([reported.cd(mean) for mean in means])
            n = len(values[0]) if values else None
            rows.append([experiment, name, len(values), n, over_seeds(means), over_seeds(largest), cd])
        if done:
            x, images = _mirror_images(done[0])
            variants = [Variant(NAMES[key], images[key], found[0][key]) for key in ("icnn", "resnet")]
            view, name = view_of(trained(done[0]).rule().cpu()), f"fig7-{experiment}"
            figures[name] = forward_maps_figure(x, variants, found[0]["dm"], view=view)
            drawn[name] = {NAMES[key]: values.tolist() for key, values in found[0].items()}
    return Shown(Table(FORMATS, rows), figures, drawn)


def measure(outcome: CellOutcome, progress: bool) -> None:
    """Train the variant, or go on, and draw its samples."""
    folder, settings = _folder(outcome), settings_of(outcome)
    if (folder / SAMPLES).exists():
        return
    rule = trained(outcome).rule()
    with images_of(outcome) as store:
        shape = store["train"].shape[1:]
        mirror = resnets(settings.map, shape[0])
        train_map(
            mirror,
            store["train"],
            rule,
            noise=build.noise(settings.map),
            weights=build.weights(settings.map.weights),
            regulariser=identity_regulariser,
            settings=settings.map.train,
            validation=store["val"],
            folder=folder / "map" / TRAINING,
            progress=progress,
        )
        model = untrained("mdm", settings, shape)
        train_model(
            model,
            store["train"],
            mirror,
            settings=settings.mdm.train,
            validation=store["val"],
            folder=folder / "mdm" / TRAINING,
            progress=progress,
        )
    source = Mirrored(model, mirror).to(device())
    write_samples(
        folder / SAMPLES,
        source,
        HISTOGRAM,
        seed=settings.evaluate.seed,
        description=describe_samples(source, settings.evaluate.sampler),
        constraint=rule,
        progress=progress,
        sampler=build.sampler(settings.evaluate.sampler),
    )


def resnets(settings: MapSettings, channels: int) -> MirrorMap:
    """g and f as two networks of the kind of f, with their first weights; g has no last activation."""
    both = plain(settings.f) | {"residual": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(settings.train.seed, "init"))
        return MirrorMap(ResNet(channels, **both | {"activation": "none"}), ResNet(channels, **both))


def _folder(outcome: CellOutcome) -> Path:
    settings = settings_of(outcome)
    training = [STAGES[stage].part(settings) for stage in ("map", "mdm")]
    return study(outcome, "resnet", ("data",), [*training, plain(settings.evaluate.sampler), settings.evaluate.seed])


def _distances(outcome: CellOutcome) -> dict[str, Array]:
    """ℓ of as many samples of each: through the run's own map, through the ResNets, of the baseline."""
    parts, evaluation = trained(outcome), outcome.folder / "evaluate"
    with SampleFile(evaluation / OURS) as ours:
        own = distances(parts.rule(), parts.mirror("map"), ours.mirror_images)
    with SampleFile(_folder(outcome) / SAMPLES) as other, SampleFile(evaluation / BASELINE) as baseline:
        return {"icnn": own, "resnet": other.distances, "dm": baseline.distances[:HISTOGRAM]}


@torch.no_grad()
def _mirror_images(outcome: CellOutcome) -> tuple[Array, dict[str, Array]]:
    """A held-out image, and what either g makes of it."""
    maps = {"icnn": trained(outcome).mirror("map"), "resnet": MirrorMap.load(mirror_folder(_folder(outcome) / "map"))}
    with images_of(outcome) as store:
        x = store["test" if store.sizes["test"] else "val"][:1]
    found = {name: mirror.to(device()).to_mirror(x.to(device()))[0].cpu().numpy() for name, mirror in maps.items()}
    return x[0].numpy(), found
