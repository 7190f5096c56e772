"""The stages that train a generative model: `mdm` and `mvae` on mirror images, `dm` and `vae` on the images themselves.

The stage `few` distils `mdm` into a model of few evaluations; it is extra, and no part of what is compared below.

The plain models are the baselines, and a comparison is fair at equal compute. A step of a baseline costs what a step of
its mirrored counterpart does, being that of the same network on images of the same shape, so it gets

    steps = (compute seconds of everything it is compared with) / (compute seconds of a step of its counterpart),

which is right to within one step if the machine was equally busy in all of these; how busy it is while the baseline
trains does not matter.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from namm.datasets import open_store
from namm.errors import CheckpointError
from namm.experiments.engine.folder import TRAINING, read_record
from namm.experiments.engine.run_parts import RunParts, untrained
from namm.experiments.engine.stages import Outcome, Work
from namm.experiments.engine.stages.data import images_file
from namm.generative import Consistency, Diffusion
from namm.maps import IdentityMap, MirrorMap
from namm.training.checkpoint import PATTERN, read
from namm.training.settings import TrainSettings
from namm.training.train_model import AVERAGE, MODEL, train_model


def make_mdm(work: Work) -> Outcome:
    """Train the diffusion model on g(x), or go on."""
    return _train(work, "mdm", RunParts.of(work).mirror("map"), work.settings.mdm.train)


def make_dm(work: Work) -> Outcome:
    """Train the same diffusion model on x, at equal compute unless it has a budget of its own."""
    settings = work.settings.dm.train
    if work.settings.dm.equal_compute:
        folders = [work.needs[name] for name in EQUAL_COMPUTE]
        settings = equal_compute(settings, work.settings.mdm.train, work.needs["mdm"], folders)
    snapshots = (steps_to_repair(work),) if work.settings.repairs else ()
    return _train(work, "dm", IdentityMap(), settings, snapshots)


def make_mvae(work: Work) -> Outcome:
    """Train the autoencoder on g(x), or go on."""
    return _train(work, "mvae", RunParts.of(work).mirror("map"), work.settings.vae.train)


def make_vae(work: Work) -> Outcome:
    """Train the same autoencoder on x, for what the map and its counterpart took together."""
    settings = work.settings.vae.train
    folders = [work.needs["map"], work.needs["mvae"]]
    return _train(work, "vae", IdentityMap(), equal_compute(settings, settings, work.needs["mvae"], folders))


def make_few(work: Work) -> Outcome:
    """Distil the trained diffusion model of g(x) into one of few evaluations, or go on."""
    parts, settings = RunParts.of(work), work.settings.few
    teacher = parts.model("mdm")
    assert isinstance(teacher, Diffusion)
    return _train(work, "few", parts.mirror("map"), settings.train, model=Consistency(teacher, grid=settings.grid))


EQUAL_COMPUTE = ("map", "mdm", "samples", "finetune")
"""What the baseline's compute is equal to, together."""


def equal_compute(
    settings: TrainSettings, counterpart: TrainSettings, folder: Path, folders: Sequence[Path]
) -> TrainSettings:
    """`settings` with the budget that makes their training cost what the stages in `folders` did.

    The price of a step is that of the training in the stage `folder`, whose settings are `counterpart`; where a step
    means something else (another batch size or precision), the budget is given as time.
    """
    seconds = sum(read_record(each).compute_seconds for each in folders)
    if not settings.same_step(counterpart):
        return replace(settings, budget=f"{seconds / 60:.6f} minutes")
    record = read_record(folder)
    steps = round(seconds * record.results["steps"] / record.compute_seconds)
    return replace(settings, budget=f"{max(1, steps)} steps")


def steps_to_repair(work: Work) -> int:
    """Steps of a plain model whose samples are repaired at equal compute: those of its counterpart.

    Map, samples and finetuning cost that method what they cost ours.
    """
    return int(read_record(work.needs["mdm"]).results["steps"])


MILESTONES = "milestones"
"""Name of the snapshots' folder in a training."""


def milestones(folder: Path) -> list[Path]:
    """The snapshots of the training in a stage's folder, by step."""
    return sorted((folder / TRAINING / MILESTONES).glob(PATTERN))


def load_milestone(model: nn.Module, path: Path) -> Mapping[str, Any]:
    """Give a trained model the weights of a milestone, and return what is known of it."""
    snapshot = read(path)
    state = {name.removeprefix("model."): tensor for name, tensor in snapshot.tensors.items()}
    if unknown := model.load_state_dict(state, strict=False).unexpected_keys:  # what was frozen is not in the file
        raise CheckpointError(f"{path} is not of this model: {', '.join(unknown[:3])}.")
    return snapshot.facts


def _train(
    work: Work,
    stage: str,
    mirror: MirrorMap | IdentityMap,
    settings: TrainSettings,
    snapshots: Collection[int] = (),
    model: Consistency | None = None,
) -> Outcome:
    """Train `model`, by default that of the stage with its first weights."""
    with open_store(images_file(work.needs["data"])) as store:
        trained = train_model(
            untrained(stage, work.settings, store["train"].shape[1:]) if model is None else model,
            store["train"],
            mirror,
            settings=settings,
            validation=store["val"],
            folder=work.folder / TRAINING,
            snapshots=snapshots,
            progress=work.progress,
        )
    results = {"steps": trained.steps, "images": trained.images, **trained.losses}
    files = (MODEL, *(AVERAGE.format(decay=decay) for decay in trained.averages))
    return Outcome(results, tuple(f"{TRAINING}/{name}" for name in files), trained.compute_seconds)
