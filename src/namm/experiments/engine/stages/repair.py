"""The stage `repair`: the same map, spent on a plain model instead of one in mirror space.

    x ~ the plain model at the step that is left for it,      y = g(x),      f trained further on y,      x̂ = f(g(x))

Map, samples and finetuning cost what they cost in the main line, so the plain model has trained for as many steps as
the mirrored one: at a constant rate that is a snapshot of the baseline's training, and no other training is needed.
"""

from contextlib import ExitStack
from pathlib import Path

from namm.datasets.batches import Images, map_images
from namm.errors import CheckpointError
from namm.experiments.engine.run_parts import RunParts, device
from namm.experiments.engine.stages import Outcome, Work
from namm.experiments.engine.stages.model import load_milestone, milestones, steps_to_repair
from namm.experiments.engine.stages.samples import HELD_OUT, TRAIN, draw_samples, finetune_on
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile
from namm.maps import IdentityMap


def make_repair(work: Work) -> Outcome:
    """Draw samples of the shorter plain model and train the map's f on them, or go on with either."""
    mirror = RunParts.of(work).mirror("map")
    source, shorter = shorter_model(work)
    drawn = draw_samples(work, source)

    def in_mirror_space(path: Path, stack: ExitStack) -> Images:
        return map_images(mirror.to_mirror, stack.enter_context(SampleFile(path)).images, device(), "g")

    with ExitStack() as stack:
        held_out = in_mirror_space(work.folder / HELD_OUT, stack) if HELD_OUT in drawn.files else None
        outcome = finetune_on(work, mirror, in_mirror_space(work.folder / TRAIN, stack), held_out)
    results = {**outcome.results, "samples": drawn.results["samples"], "model_seconds": shorter}
    seconds = drawn.compute_seconds + outcome.compute_seconds
    return Outcome(results, (*drawn.files, *outcome.files), seconds)


def shorter_model(work: Work) -> tuple[Mirrored, float]:
    """The plain model as it was when its training had cost what the mirrored one's did, and these seconds."""
    model, step = RunParts.of(work).model("dm"), steps_to_repair(work)
    for path in milestones(work.needs["dm"]):
        facts = load_milestone(model, path)
        if facts["step"] == step:
            return Mirrored(model, IdentityMap()).to(device()), float(facts["compute_seconds"])
    raise CheckpointError(f"{work.needs['dm']} has no snapshot of step {step}: remove that folder to train it again.")
