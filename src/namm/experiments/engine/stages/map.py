"""The stage `map`: learn g and f on the data and measure what they do to held-out images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.batches import Images, in_chunks
from namm.evaluation.scores import ratio, total_variation
from namm.evaluation.verdict import judge_map
from namm.experiments.engine import build, build_models
from namm.experiments.engine.folder import TRAINING
from namm.experiments.engine.settings import MapSettings, Settings
from namm.experiments.engine.stages import Outcome, Work
from namm.experiments.engine.stages.data import images_file
from namm.maps import MirrorMap
from namm.numerics import arithmetic, generator
from namm.training.objectives import Noise, perturb
from namm.training.train_map import train_map
from namm.training.trainer import TrainResult
from namm.training.tune import Tuning, chosen_once, tune

CHUNK = 64
"""Images measured at a time."""


def make_map(work: Work) -> Outcome:
    """Train the map, or go on training it, and measure it on the validation images."""
    settings, rule = work.settings.map, build.rule_of(work.settings.data, work.needs.__getitem__)
    with open_store(images_file(work.needs["data"])) as store:
        mirror, trained, numbers = learn_map(
            settings, rule, store["train"], store["val"], work.folder / TRAINING, progress=work.progress
        )
        figures = measure(mirror, rule, store["val"], numbers.noise(settings), settings.train.seed)
    verdict = judge_map(figures)
    results = {"steps": trained.steps, "images": trained.images, **numbers.as_json(), **figures}
    seconds = trained.compute_seconds + (numbers.tuning.compute_seconds if numbers.tuning else 0.0)
    return Outcome(results | {"verdict": verdict.outcome}, (f"{TRAINING}/mirror",), seconds, verdict.as_json())


@dataclass(frozen=True)
class Numbers:
    """What a map was trained with, where it depends on the data.

    Attributes:
        sigma_max: In the units of mirror space.
        unit: σ_max over ℓ of errors of σ_max, by which relative weights are multiplied.
        tuning: How they were chosen, where they were.
    """

    sigma_max: float
    unit: float
    tuning: Tuning | None = None

    def noise(self, settings: MapSettings) -> Noise:
        """How far from g(x) f was trained."""
        return build_models.noise(settings.noise, self.sigma_max)

    def finetuning_noise(self, settings: Settings) -> Noise:
        """What samples get in finetuning: errors of the map's kind, in the ratio of the settings to the map's."""
        kind = "model" if settings.map.noise.startswith("model") else "uniform"
        return build_models.noise(kind, settings.finetune.sigma_max * self.sigma_max / settings.map.sigma_max)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for the stage's record."""
        tuning = {} if self.tuning is None else {"tuning": self.tuning.as_json()}
        return {"sigma_max": self.sigma_max, "weight_unit": self.unit, **tuning}

    @classmethod
    def from_results(cls, results: Mapping[str, Any], settings: MapSettings) -> Self:
        """What the stage `map` wrote; version 0.1 had settings alone."""
        return cls(results.get("sigma_max", settings.sigma_max), results.get("weight_unit", 1.0))


def choose_numbers(
    settings: MapSettings,
    mirror: MirrorMap,
    data: Images,
    rule: Constraint,
    folder: Path | None = None,
    *,
    progress: bool = False,
) -> Numbers:
    """σ_max and the unit of λ, measured where the settings leave them to the data."""
    if not settings.weights.relative:
        return Numbers(settings.sigma_max, 1.0)
    noise = None if settings.tune else build_models.noise(settings.noise, settings.sigma_max)
    weight = None if settings.tune else 1.0
    others = build_models.weights(replace(settings.weights, constraint=1.0, relative=False), 1.0)
    seed = settings.train.seed
    choose = partial(tune, mirror, data, rule, noise=noise, weight=weight, weights=others, seed=seed, progress=progress)
    tuning = chosen_once(folder, choose)
    if settings.tune:
        return Numbers(tuning.sigma, tuning.weight / settings.weights.constraint, tuning)
    return Numbers(tuning.sigma, tuning.unit)


def learn_map(
    settings: MapSettings, rule: Constraint, data: Images, held_out: Images, folder: Path, *, progress: bool = True
) -> tuple[MirrorMap, TrainResult, Numbers]:
    """The map that `settings` describe, trained on `data` for `rule`, or trained further, and what that took."""
    mirror = build_models.mirror(settings, data).to(build.device())
    numbers = choose_numbers(settings, mirror, data, rule, folder, progress=progress)
    trained = train_map(
        data,
        rule,
        mirror,
        noise=numbers.noise(settings),
        weights=build_models.weights(settings.weights, numbers.unit),
        regulariser=build_models.regulariser(settings),
        settings=settings.train,
        validation=held_out,
        folder=folder,
        progress=progress,
    )
    return mirror, trained, numbers


def mirror_folder(folder: Path) -> Path:
    """Where the stage keeps its maps, for `MirrorMap.load`."""
    return folder / TRAINING / "mirror"


@torch.no_grad()
def measure(mirror: MirrorMap, constraint: Constraint, images: Images, noise: Noise, seed: int) -> dict[str, float]:
    """What g and f do, in plain float32, to images x (N, C, H, W) that they were not trained on.

    e are the errors that `noise` draws, of its largest size, in the units of the networks.

    Returns:
        distance_data: mean ℓ(x), the floor.
        distance_noise: mean ℓ(x + e), what errors alone do.
        distance_map: mean ℓ(f(g(x) + e)), what f makes of them.
        distance_cycle: mean ℓ(f(g(x))).
        cycle_error: mean |x − f(g(x))| / mean |x|.
        total_variation, spread: Total variation, and standard deviation over the pixels of an image, of f(g(x) + e)
            over those of x; a map that keeps the rule by smoothing images shows here.
    """
    device = next(mirror.parameters()).device
    chunks = []
    for k, rows in enumerate(in_chunks(images, CHUNK)):
        x = rows.to(device)
        errors = [each.to(x) for each in noise.errors(rows, generator(seed, "measure", k))]
        sigma = x.new_full((), noise.maximum)
        with arithmetic("fp32", device):
            y = mirror.to_mirror(x)
            there_and_back, mapped = (mirror.to_data(each) for each in (y, perturb(y, sigma, *errors)))
        noisy = mirror.unstandardise(perturb(mirror.standardise(x), sigma, *errors))
        figures = {
            "distance_data": constraint(x),
            "distance_noise": constraint(noisy),
            "distance_map": constraint(mapped),
            "distance_cycle": constraint(there_and_back),
            "error": _mean(x - there_and_back),
            "size": _mean(x),
            "variation": total_variation(mapped),
            "variation_data": total_variation(x),
            "spread": mapped.flatten(1).std(1),
            "spread_data": x.flatten(1).std(1),
        }
        chunks.append(figures)
    mean = {name: float(torch.cat([chunk[name] for chunk in chunks]).double().mean()) for name in chunks[0]}
    return {
        **{name: mean[name] for name in ("distance_data", "distance_noise", "distance_map", "distance_cycle")},
        "cycle_error": ratio(mean["error"], mean["size"]),
        "total_variation": ratio(mean["variation"], mean["variation_data"]),
        "spread": ratio(mean["spread"], mean["spread_data"]),
        "measured_on": images.shape[0],
    }


def _mean(x: Tensor) -> Tensor:
    """Mean |x| of each image."""
    return x.abs().flatten(1).mean(1)
