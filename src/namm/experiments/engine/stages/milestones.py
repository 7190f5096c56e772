"""ℓ along the way: few samples of the models as they were at the milestones of their training (the paper's Fig. 4).

    mdm         f(ỹ), ỹ from the mirror diffusion model at that step, f as the stage `map` left it
    finetune    f(ỹ), ỹ from the trained model, f as finetuning had it at that step
    dm          the baseline's own samples

The paper draws the training of the mirror diffusion model as "Ours w/o FT", offset by the time that the map took: what
it shows there is what one would have had at that time, so f is the map's and not the finetuned one. Finetuning is a
curve of its own, "Ours", offset by the time of everything before it.

All have the evaluation's seed and sampler, so that one sample is followed through the training.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from namm.constraints import Constraint
from namm.datasets.batches import Images, map_images
from namm.errors import CheckpointError, ConstraintError, DataError
from namm.evaluation import distance_summary
from namm.evaluation.milestone import Milestone
from namm.evaluation.rows import View
from namm.experiments.engine import build
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.run_parts import Trained, describe_samples, device
from namm.experiments.engine.stages import Work
from namm.experiments.engine.stages.map import TRAINING
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile, write_samples
from namm.maps import IdentityMap, MirrorMap
from namm.training.checkpoint import PATTERN, read
from namm.training.train_map import load_weights

FOLDER = "milestones"
"""Name of the snapshots' folder in a training, and of that of their samples in the evaluation."""


def milestones(
    work: Work, trained: Trained, rule: Constraint, ours: SampleFile, baseline: SampleFile
) -> dict[str, list[Milestone]]:
    """ℓ at every milestone, by the name of the stage that trained; nothing where no samples are asked for.

    Args:
        work: The stage `evaluate`.
        trained: What the run has trained.
        rule: ℓ.
        ours: Samples of the trained mirror diffusion model.
        baseline: Samples of the trained baseline.
    """
    n = min(work.settings.evaluate.milestone_samples, work.settings.evaluate.drawn)
    if not n:
        return {}
    spent = {name: read_record(work.needs[name]).compute_seconds for name in ("map", "mdm", "samples")}
    first = View(ours.mirror_images, np.arange(n))
    return {
        "mdm": list(_of_model(work, trained, "mdm", trained.mirror("map"), rule, first, spent["map"])),
        "finetune": list(_of_finetuning(work, trained.mirror("map"), rule, first, sum(spent.values()))),
        "dm": list(_of_model(work, trained, "dm", IdentityMap(), rule, View(baseline.images, first.rows), 0.0)),
    }


def _of_model(
    work: Work,
    trained: Trained,
    stage: str,
    mirror: MirrorMap | IdentityMap,
    rule: Constraint,
    last: View,
    offset: float,
) -> Iterator[Milestone]:
    """A model at its milestones; of the trained model the mirror images `last` are there already."""
    model = trained.model(stage)
    for path in _snapshots(work.needs[stage]):
        facts = _load(model, path)
        if facts["step"] == facts["total"]:
            yield _measured(work, mirror, last, rule, facts, offset)
            continue
        file = work.folder / FOLDER / f"{stage}-{facts['step']}.h5"
        try:
            _sample(work, file, Mirrored(model, mirror), last.shape[0])
            with SampleFile(file) as samples:
                yield _measured(work, mirror, samples.mirror_images, rule, facts, offset)
        except (DataError, ConstraintError) as error:  # of a model that has learned little yet
            warnings.warn(f"the milestone of {stage} at step {facts['step']} is left out: {error}", stacklevel=2)


def _sample(work: Work, file: Path, source: Mirrored, n: int) -> None:
    settings = work.settings.evaluate
    write_samples(
        file,
        source,
        n,
        seed=settings.seed,
        description=describe_samples(source, settings.sampler),
        precision=work.settings.mdm.train.precision,
        **build.sampling(settings.sampler),
        progress=work.progress,
    )


def _of_finetuning(work: Work, mirror: MirrorMap, rule: Constraint, y: Images, offset: float) -> Iterator[Milestone]:
    for path in _snapshots(work.needs["finetune"]):
        load_weights(mirror, path)
        yield _measured(work, mirror, y, rule, read(path).facts, offset)


def _snapshots(folder: Path) -> list[Path]:
    return sorted((folder / TRAINING / FOLDER).glob(PATTERN))


def _load(model: nn.Module, path: Path) -> Mapping[str, Any]:
    """Give a trained model the weights of a milestone, and return what is known of it."""
    snapshot = read(path)
    state = {name.removeprefix("model."): tensor for name, tensor in snapshot.tensors.items()}
    if unknown := model.load_state_dict(state, strict=False).unexpected_keys:  # what was frozen is not in the file
        raise CheckpointError(f"{path} is not of this model: {', '.join(unknown[:3])}.")
    return snapshot.facts


def _measured(
    work: Work, mirror: MirrorMap | IdentityMap, y: Images, rule: Constraint, facts: Mapping[str, Any], offset: float
) -> Milestone:
    x = map_images(mirror.to_data, y, device(), "f")
    found = distance_summary(rule, x, device=device())
    seconds = offset + facts["compute_seconds"]
    return Milestone(facts["step"], seconds, found.mean, found.std, found.n)
