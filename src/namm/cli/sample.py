"""`namm sample`: any number of samples of a run's model, in one HDF5 file."""

import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from namm.cli.options import RunName, log, parse, require_hdf5
from namm.errors import Interrupted, UsageError
from namm.experiments.engine.folder import find_run
from namm.experiments.engine.settings import SamplerSettings, SamplingMethod, Settings
from namm.formatting import format_estimate, format_number
from namm.precision import Precision

if TYPE_CHECKING:
    from namm.experiments.engine.run_parts import RunParts
    from namm.generative.mirrored import Mirrored

STEPS = {"euler-maruyama": 1000, "ancestral": 1000, "ddim": 200, "dpm-solver": 50, "sde-dpm-solver": 50, "unipc": 50}
"""Evaluations of the network for a sampler that is not the run's own."""

THROUGH = {"finetune": "through the finetuned f", "map": "through the map's f, not finetuned", None: "as it is"}
"""What is said of the f that images come through, by the stage that it is of."""

MEASURED, FEW = 1000, 16
"""Samples and images whose variation is compared, and the fewest whose spread is."""


@dataclass(frozen=True)
class Sample:
    """Draw samples from a run's model into an HDF5 file: images, mirror images and ℓ of each.

    Interrupted, the same command goes on. A complete file of the same samples is left alone, another is never
    overwritten. With --trust, a rule of the run's that you have not run before is run: it is Python code.
    """

    run: RunName
    n: Annotated[int, arg(aliases=["-n"])] = 1000
    """How many."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("samples.h5")
    """File to write."""
    model: Literal["mdm", "dm", "mvae", "vae"] = "mdm"
    """Which model; mdm goes through the finetuned f where there is one."""
    seed: int | None = None
    """By default one that neither the finetuning nor the evaluation has used."""
    sampler: SamplingMethod | None = None
    """The evaluation's (`evaluate.sampler`) by default."""
    steps: int | None = None
    """Evaluations of the network: those of the evaluation, or what suits another sampler."""
    batch_size: int | None = None
    """Samples made together."""
    precision: Precision = "auto"
    """How a GPU computes: bf16 where it has it, unless told otherwise."""
    polish: bool = False
    """Move every sample to the nearest image on the rule, and keep a certificate of it in the file."""


def main(arguments: list[str]) -> None:
    """Draw samples."""
    options = parse(Sample, arguments, "namm sample")
    require_hdf5(options.out, "-o", "samples.h5")
    run = find_run(options.run)

    from namm.experiments.engine.run_parts import RunParts

    trained = RunParts.load(run)
    sampler = _sampler(options, trained.settings)
    source, stage = choose(trained, run, options.model)
    seed = _seed(options.seed, trained.settings, stage)
    how = "" if sampler is None else f", {sampler.method} of {sampler.steps} steps"
    log(f"{options.model} of {run}, {THROUGH[stage]}{how}, seed {seed}")
    holds = "already holds" if options.out.exists() else "holds"
    _draw(options, trained, source, sampler, seed)
    _report(options, run, stage, holds)


def choose(trained: "RunParts", run: Path, model: str) -> "tuple[Mirrored, str | None]":
    """The model with the maps that belong to it, and the stage that these are of."""
    from namm.experiments.engine.folder import is_complete
    from namm.experiments.engine.run_parts import IN_MIRROR_SPACE
    from namm.maps import IdentityMap

    trained.folder(model)  # if it is missing, that is what to say, and not what it needs in turn
    if model not in IN_MIRROR_SPACE:
        return trained.source(model, IdentityMap()), None
    stage = "finetune" if model == "mdm" and is_complete(run, "finetune") else "map"
    return trained.source(model, trained.mirror(stage)), stage


def _sampler(options: Sample, settings: Settings) -> SamplerSettings | None:
    """The sampler that was asked for, the evaluation's where none was; none for an autoencoder."""
    from namm.experiments.engine.run_parts import AUTOENCODERS

    if options.model in AUTOENCODERS:
        if options.sampler is not None or options.steps is not None:
            raise UsageError(f"{options.model} is an autoencoder and has no sampler: leave out --sampler and --steps.")
        return None
    default = settings.evaluate.sampler
    method = options.sampler or default.method
    steps = default.steps if method == default.method else STEPS[method]
    return SamplerSettings(method, steps if options.steps is None else options.steps, default.compile)


def _seed(seed: int | None, settings: Settings, stage: str | None) -> int:
    """The seed that was asked for, or one that nothing has used."""
    if seed == settings.samples.seed and stage == "finetune":
        print(
            f"namm: warning: f was finetuned on samples of the seed {seed}; those of another are a fairer test.",
            file=sys.stderr,
        )
    used = settings.samples.seed, settings.evaluate.seed
    return next(k for k in count() if k not in used) if seed is None else seed


def _draw(options: Sample, trained: "RunParts", source: "Mirrored", sampler: SamplerSettings | None, seed: int) -> None:
    """Write the file."""
    from namm.experiments.engine.build_models import sampling
    from namm.experiments.engine.run_parts import describe_samples
    from namm.generative.sample_file import write_samples

    rule = trained.rule()
    polisher = trained.polisher(rule) if options.polish else None
    floor = {} if polisher is None else {"floor": polisher.floor}
    try:
        write_samples(
            options.out,
            source,
            options.n,
            seed=seed,
            description={"model": options.model, **describe_samples(source, sampler), **floor},
            constraint=rule,
            batch_size=options.batch_size,
            precision=options.precision,
            polish=polisher,
            **({} if sampler is None else sampling(sampler)),
        )
    except KeyboardInterrupt as error:
        raise Interrupted(f"{options.out} is not complete yet: the same command goes on with it.") from error


def _report(options: Sample, run: Path, stage: str | None, holds: str) -> None:
    """Print ℓ of the samples, how they compare with the run's own held-out images, and the verdict on the run."""
    import numpy as np

    from namm.datasets import open_store
    from namm.evaluation.scores import measure_images
    from namm.evaluation.verdict import loses_images
    from namm.experiments.engine.folder import complete_stage, is_complete
    from namm.experiments.engine.stages.data import images_file
    from namm.experiments.engine.stages.evaluate import run_verdict
    from namm.generative.sample_file import SampleFile

    with SampleFile(options.out) as file, open_store(images_file(complete_stage(run, "data"))) as store:
        distances, certificate = file.distances.astype(np.float64), file.certificate
        data = store["test" if store.sizes["test"] else "train"]
        generated, real = (measure_images(images[:MEASURED]) for images in (file.images, data))
    deviation = distances.std(ddof=1) if len(distances) > 1 else 0.0
    print(
        f"ℓ: mean {format_estimate(distances.mean(), deviation)}, median {format_number(np.median(distances))}, "
        f"worst {format_number(distances.max())} (sample {distances.argmax()})"
    )
    print(f"{options.out} {holds} {options.n} samples: images, mirror_images, distances")
    if certificate is not None:
        print(certificate)
    variation, spread = generated.against(real)
    shown = f"total variation {format_number(variation, '.2f')}"
    if options.n < FEW:
        print(f"{shown} of the data's; too few samples to tell their spread")
    else:
        print(f"{shown} and spread {format_number(spread, '.2f')} of the data's")
        if loses_images(variation, spread):
            print("collapsed: these samples have lost the images, whatever their ℓ is")
    if options.model == "mdm" and (verdict := run_verdict(run, stage)) is not None:
        if not is_complete(run, "evaluate"):
            print("samples are judged by the stage `evaluate`, which is not complete; this is about the map alone")
        print("\n".join(verdict.lines()))
