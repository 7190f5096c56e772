"""`namm repair`: images of any model through a run's g and f, into one HDF5 file, with a verdict on them.

images            f(g(x)), polished where asked for   (N, C, H, W)
distances         ℓ of them                           (N,)

Polished images bring their certificate: before, after, moved, iterations and rounding, each (N,). Attributes hold what
they were made from, the figures and the verdict, so that `SampleFile` and every command that reads images reads them.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from namm.cli.options import Layout, RunName, log, open_file, parse, require_hdf5
from namm.errors import RunFolderError
from namm.experiments.engine.folder import find_run
from namm.formatting import format_estimate, format_number, print_table

if TYPE_CHECKING:
    import numpy as np

    from namm.constraints import Constraint
    from namm.datasets import Store
    from namm.datasets.batches import Images
    from namm.evaluation import Scores
    from namm.evaluation.verdict import Verdict
    from namm.exact import Certificate
    from namm.experiments.engine.run_parts import RunParts
    from namm.maps import MirrorMap

WATCHING = 10
"""One image of so many watches the training of f instead of taking part in it."""


@dataclass(frozen=True)
class Repair:
    """Send images of any model through a run's g and f, f(g(x)), and judge them against the run's test images.

    The images must be in the units of the run's data. An existing file is never overwritten. With --trust, a rule of
    the run's that you have not run before is run: it is Python code.
    """

    run: RunName
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """Images: a file of `namm sample`, HDF5, NPY or NPZ, or a folder of PNGs."""
    out: Annotated[Path, arg(aliases=["-o"])]
    """HDF5 file to write: images and ℓ of each."""
    key: str | None = None
    """Name of the array in FILE; `images` in a file of samples."""
    layout: Layout | None = None
    """Order of the axes of FILE; our own files and PNGs know theirs."""
    stage: Literal["finetune", "map"] | None = None
    """Whose f: that of `finetune` where it is complete, else that of `map`."""
    finetune: bool = False
    """Train f on these images first, with the run's own settings, in a folder beside OUT; interrupted, it goes on."""
    polish: bool = False
    """Move each image to the nearest one on the rule in the end, and keep a certificate of it in the file."""


def main(arguments: list[str]) -> None:
    """Repair a file of images."""
    options = parse(Repair, arguments, "namm repair")
    require_hdf5(options.out, "-o", "repaired.h5")
    run = find_run(options.run)

    from namm.datasets import open_store
    from namm.evaluation.mmd import in_memory
    from namm.experiments.engine.folder import is_complete
    from namm.experiments.engine.run_parts import RunParts
    from namm.experiments.engine.stages.data import images_file
    from namm.files import beside, only_writer

    with only_writer(options.out):  # said now, and not after all the work
        _refuse_existing(options.out)
        beside(options.out, ".partial").unlink(missing_ok=True)  # of a call that was killed
    trained = RunParts.load(run)
    stage = options.stage or ("finetune" if is_complete(run, "finetune") else "map")
    mirror, rule = trained.mirror(stage), trained.rule()
    with ExitStack() as stack:
        x = open_file(options.file, options.key, options.layout, stack)
        store = stack.enter_context(open_store(images_file(trained.folder("data"))))
        log(f"{x.shape[0]} images of {options.file} through g and f of {run}, f as the stage {stage} left it")
        if options.finetune:
            folder = options.out.with_name(f"{options.out.stem}-finetune-{stage}")
            _finetune(trained, mirror, rule, x, store, folder)
        data = in_memory(store["test" if store.sizes["test"] else "train"])
        made = _repair(x, data, mirror, rule, trained if options.polish else None)
    about = {"file": options.file.name, "run": run.resolve().name, "stage": stage, "finetuned": options.finetune}
    _write(options.out, made, {"rule": rule.name, **about, **_describe(options.file, mirror)})
    _report(options, made)


@dataclass(frozen=True)
class Made:
    """What is written and shown: images and ℓ of each, figures by row, images in a subset, verdict and certificate."""

    images: "np.ndarray"
    distances: "np.ndarray"
    rows: Mapping[str, "Scores"]
    subset: int
    verdict: "Verdict | None"
    certificate: "Certificate | None"


def _repair(x: "Images", data: "Images", mirror: "MirrorMap", rule: "Constraint", polishing: "RunParts | None") -> Made:
    """f(g(x)), polished by the run's data where that is asked for, and its figures."""
    import numpy as np

    from namm.evaluation.scores import measure_images
    from namm.experiments.engine.build import device
    from namm.generative.repair import judge_scores, repair, score, subset_size

    repaired = repair(x, mirror, rule=rule, data=data, device=device(), progress=True)
    images, verdict, certificate = repaired.images, repaired.verdict, None
    rows: dict[str, Any] = {"before": repaired.before, "repaired": repaired.after, "data": repaired.data}
    if polishing is not None:
        polished = polishing.polisher(rule)(images, progress=True)
        images, certificate = polished.images, polished.certificate
        rows = {**rows, "polished": score(images, data, rule, device())}
        verdict = judge_scores(rows["polished"], rows["before"], rows["data"], data)
    distances = measure_images(images, rule, device=device()).distances.numpy()
    return Made(np.asarray(images), distances, rows, subset_size(x, data), verdict, certificate)


def _finetune(
    trained: "RunParts", mirror: "MirrorMap", rule: "Constraint", x: "Images", store: "Store", folder: Path
) -> None:
    """Train f on g of these images, as the stage `finetune` of a run does on its model's samples."""
    import numpy as np

    from namm.datasets.batches import map_images
    from namm.experiments.engine import build, build_models
    from namm.experiments.engine.folder import read_record
    from namm.experiments.engine.stages.map import Numbers
    from namm.training.train_map import finetune_map

    settings = trained.settings
    numbers = Numbers.from_results(read_record(trained.folder("map")).results, settings.map)
    y = map_images(mirror.to_mirror, x, build.device(), "g")
    watching = np.arange(len(y)) % WATCHING == WATCHING - 1
    training, held_out = (y[~watching], y[watching]) if watching.sum() > 1 else (y, y)
    result = finetune_map(
        mirror,
        store["train"],
        training,
        rule,
        noise=numbers.finetuning_noise(settings),
        weights=build_models.weights(settings.finetune.weights, numbers.unit),
        settings=settings.finetune.train,
        validation=(store["val"], held_out),
        folder=folder,
    )
    kept = f"f of step {result.kept_step} is kept" if result.kept_step else "that did not improve f, which stays"
    log(f"f trained on {len(training)} of these images for {result.steps} steps, in {folder}: {kept}")


def _describe(file: Path, mirror: "MirrorMap") -> dict[str, str]:
    """Hashes of what the images were made from."""
    from namm.datasets.user_files import content_hash
    from namm.training.checkpoint import weights_digest

    return {"content": content_hash(file), "weights": weights_digest(mirror)}


def _write(path: Path, made: Made, about: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all."""
    import h5py
    import numpy as np

    from namm._version import __version__
    from namm.datasets import store
    from namm.datasets.base import BLOCK
    from namm.exact.certificate import ARRAYS
    from namm.files import as_json

    arrays = {"images": made.images.astype(np.float32, copy=False), "distances": made.distances}
    attributes = {"samples": len(made.images), **about, "namm_version": __version__}
    attributes["scores"] = {name: asdict(row) for name, row in made.rows.items()}
    attributes["subset"] = made.subset
    if made.verdict is not None:
        attributes["verdict"] = made.verdict.as_json()
    if made.certificate is not None:
        arrays |= {name: getattr(made.certificate, name) for name in ARRAYS}
        attributes |= {"floor": made.certificate.floor, "certificate": made.certificate.summary()}

    def fill(file: h5py.File, blocks: list[store.Block]) -> None:
        for name, k in blocks:
            store.write_block(file, (name, k), arrays[name][k * BLOCK : (k + 1) * BLOCK])

    shapes = {name: each.shape for name, each in arrays.items()}
    dtypes = {name: each.dtype.str for name, each in arrays.items()}
    store.grow(path, shapes, as_json(attributes), fill, dtypes=dtypes)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise RunFolderError(f"{path} is there already and is not overwritten: choose another file with -o.")


def _report(options: Repair, made: Made) -> None:
    """Print figures, verdict and certificate."""
    cells = [
        (
            name,
            format_estimate(row.distance.mean, row.distance.std),
            format_number(row.distance.max),
            format_estimate(row.mmd.mean, row.mmd_error),
            format_number(row.total_variation, ".2f"),
            format_number(row.spread, ".2f"),
        )
        for name, row in made.rows.items()
    ]
    title = f"√MMD² over subsets of {made.subset} images; the baseline of the verdict is the row `before`"
    print_table(["", "ℓ", "worst", "√MMD²", "total variation", "spread"], cells, title=title)
    if made.verdict is not None:
        print("\n".join(made.verdict.lines()))
    if made.certificate is not None:
        print(made.certificate)
    print(f"{options.out} holds {len(made.images)} images and ℓ of each")
