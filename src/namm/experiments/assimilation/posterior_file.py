"""Posterior samples of any number of truths in one HDF5 file, made a few truths at a time and never twice.

    truth           (M, C, H, W)        measurement     (M, …)        numbers    of the truths in the split `test`, (M,)
    METHOD/samples  (M, n, C, H, W)     METHOD/mean     (M, C, H, W)  METHOD/spread     (M, C, H, W)
    METHOD/distance (M, n)              METHOD/chi2     (M, n)        METHOD/residuals  (M, n, …), of rules that have it
    METHOD/error    (M,)                METHOD/coverage (M,)          METHOD/redrawn    METHOD/failed    (M, n)
    METHOD/seconds  (M,)

Polished samples bring their certificate: METHOD/before, after, moved, iterations and rounding, (M, n).

χ² is per measured value. The file grows truth by truth (`namm.datasets.store`); `outcomes_figure` draws Fig. 5 of it.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from namm._version import __version__
from namm.constraints import Constraint
from namm.datasets.checksums import require_header, require_rows
from namm.datasets.store import Block, grow, write_block
from namm.digests import require_signed, signed
from namm.errors import DataError, RunFolderError
from namm.exact.certificate import ARRAYS as CERTIFIED
from namm.exact.certificate import Certificate
from namm.experiments.assimilation.assimilate import (
    METHODS,
    PosteriorSummary,
    Sampling,
    Score,
    Setting,
    assimilate,
)
from namm.experiments.assimilation.tasks import Task
from namm.experiments.engine.stages.report import view_of
from namm.files import as_json, beside, write_json
from namm.generative import Mirrored
from namm.hdf5 import open_hdf5
from namm.inverse import Operator
from namm.inverse.polishing import NOT_PIXELS
from namm.reading import REASON, damage_as, load_json
from namm.report.figures.inverse import Reconstruction, assimilation_figure
from namm.training.checkpoint import weights_digest

ARRAYS = ("samples", "mean", "spread", "distance", "chi2", "error", "coverage", "redrawn", "failed", "residuals")
ORDER = ("mirror-dps", "dps", "cg-dps")
"""Order of the methods in a figure."""

REMAKE = "move it away, and it is made anew"

Arrays = dict[str, NDArray[Any]]


def write_outcomes(
    path: Path,
    task: Task,
    sources: Mapping[str, Mirrored],
    settings: Sequence[Setting],
    rule: Constraint,
    sampling: Sampling,
    *,
    progress: bool = True,
) -> Path:
    """Write every method's samples of every truth to `path`, or go on where an interrupted call stopped.

    A complete file of the same task, weights and settings is left alone, another is never overwritten.
    """
    settings = sorted(settings, key=lambda setting: METHODS.index(setting.method))
    made_from = {
        **_question(task, sampling),
        "methods": {s.method: asdict(s) | {"weights": weights_digest(sources[s.method])} for s in settings},
    }
    methods = json.dumps([setting.method for setting in settings])
    header: dict[str, Any] = {"namm_version": __version__, "made_from": made_from, "methods": methods}
    count, n, image = len(task.truth), sampling.n, task.truth.shape[1:]
    shapes: dict[str, tuple[int, ...]] = {
        "samples": (n, *image),
        **dict.fromkeys(("mean", "spread"), tuple(image)),
        **dict.fromkeys(("distance", "chi2", "redrawn", "failed"), (n,)),
        **dict.fromkeys(("error", "coverage", "seconds"), ()),
    }
    if rule.has_residual:
        shapes["residuals"] = (n, *rule.residual(task.truth[:1]).shape[1:])
    if sampling.polish is not None:
        shapes |= dict.fromkeys(CERTIFIED, (n,))
        seen = task.operator.pixels(tuple(image)) is not None
        header |= {"rule": rule.name, "floor": sampling.polish.floor, "notes": json.dumps([] if seen else [NOT_PIXELS])}
    arrays = {f"{s.method}/{name}": (count, *shape) for s in settings for name, shape in shapes.items()}
    dtypes = {f"{s.method}/{name}": kind for s in settings for name, kind in (("redrawn", "i8"), ("failed", "?"))}
    together = max(1, sampling.together(image) // n)  # about a batch of samples, and one truth at least

    def begin(file: h5py.File) -> None:
        file["truth"], file["measurement"] = task.truth.numpy(), task.measurement.numpy()
        file["numbers"] = np.array(task.numbers)
        for setting in settings:
            file.create_group(setting.method).attrs.update(asdict(setting))

    def fill(file: h5py.File, blocks: list[Block]) -> None:
        for setting in settings:
            missing = {k for name, k in blocks if name.startswith(f"{setting.method}/")}
            for start in range(0, count, together):
                rows = range(start, min(start + together, count))
                if missing.isdisjoint(rows):
                    continue
                source = sources[setting.method]
                outcome = assimilate(source, task, setting, rule, sampling, rows=rows, progress=progress)
                measured = shapes.keys() - {"seconds", *CERTIFIED}
                values = {name: getattr(outcome, name).numpy() for name in measured}
                values |= {} if sampling.polish is None else _certified(outcome)
                values["seconds"] = np.full(len(rows), outcome.seconds / len(rows), np.float32)
                for k in rows:
                    for name, each in values.items():
                        write_block(file, (f"{setting.method}/{name}", k), each[k - start : k - start + 1])

    grow(path, arrays, header, fill, rows=1, dtypes=dtypes, begin=begin)
    return path


def _certified(outcome: PosteriorSummary) -> Arrays:
    """The arrays of the certificate (M, n), NaN where a sample failed."""
    good = ~outcome.failed.numpy()
    arrays = {name: np.full(good.shape, np.nan, np.float32) for name in CERTIFIED}
    if outcome.certificate is not None:
        for name in CERTIFIED:
            arrays[name][good] = getattr(outcome.certificate, name)
    return arrays


def read_certificates(path: Path) -> dict[Setting, Certificate]:
    """The certificate of each method's samples that did not fail; nothing where they were not polished."""
    with _opened(path) as file:
        if "floor" not in file.attrs:
            return {}
        about, certificates = file.attrs, {}
        notes = tuple(json.loads(about["notes"]))
        for setting, group in _methods(file).items():
            good = ~require_rows(group["failed"])[:].astype(bool)
            arrays = {name: require_rows(group[name])[:][good].astype(np.float64) for name in CERTIFIED}
            if good.any():
                rule, floor = str(about["rule"]), float(about["floor"])
                certificates[setting] = Certificate(rule, "polishing", floor, **arrays, notes=notes)
        return certificates


def read_scores(path: Path) -> list[Score]:
    """One line for each method of a file."""
    needed = ("distance", "chi2", "error", "coverage", "spread", "redrawn", "failed")
    scores = []
    with _opened(path) as file:
        for setting, group in _methods(file).items():
            arrays = {name: torch.from_numpy(require_rows(group[name])[:]) for name in needed}
            seconds = (
                require_rows(group["seconds"])[:].sum() if "seconds" in group else group.attrs["seconds"]
            )  # the latter: 0.1
            scores.append(Score.of(setting, arrays, float(seconds)))
    return scores


def read_truth(path: Path, k: int) -> tuple[Arrays, dict[Setting, Arrays]]:
    """Truth number k of the file: its own arrays, and those of each method, without the axis of truths."""
    row = np.array([k])
    with _opened(path) as file:
        own = {name: require_rows(file[name], row)[k] for name in ("truth", "measurement")}
        methods = _methods(file).items()
        return own, {
            setting: {name: require_rows(group[name], row)[k] for name in ARRAYS if name in group}
            for setting, group in methods
        }


def read_distances(path: Path) -> dict[Setting, NDArray[Any]]:
    """ℓ of all samples of each method that did not fail, (N,)."""
    with _opened(path) as file:
        methods = _methods(file).items()
        found = {s: [require_rows(group[name])[:] for name in ("distance", "failed")] for s, group in methods}
        return {setting: distance[~failed.astype(bool)] for setting, (distance, failed) in found.items()}


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """The file, open for reading; what cannot be read in it is a sentence."""
    with (
        open_hdf5(path) as file,
        damage_as(DataError, f"{path} is no file of `namm assimilate` that can be read ({REASON}): make it anew."),
    ):
        require_header(file)
        yield file


def _methods(file: h5py.File) -> dict[Setting, h5py.Group]:
    """The group of each method in a file."""
    found = json.loads(file.attrs["made_from"])["methods"]
    names = json.loads(file.attrs["methods"])
    return {Setting(**{k: v for k, v in found[name].items() if k != "weights"}): file[name] for name in names}


def remembered(
    path: Path,
    task: Task,
    sources: Mapping[str, Mirrored],
    sampling: Sampling,
    tried: Mapping[str, Any],
    make: Callable[[], dict[str, list[Score]]],
) -> dict[str, list[Score]]:
    """Scores of settings by method, made once and kept beside `path`, in FILE.tuned.json."""
    kept, models = beside(path, ".tuned.json"), {name: weights_digest(source) for name, source in sources.items()}
    asked = as_json({**_question(task, sampling), "models": models, **tried})
    if kept.exists():
        with damage_as(RunFolderError, f"{kept} cannot be read ({REASON}): {REMAKE}."):
            there = require_signed(kept, load_json(kept), f"{REMAKE}.", RunFolderError)
            if there["asked"] == asked:
                return {name: [read_score(row) for row in rows] for name, rows in there["scores"].items()}
    scores = make()
    rows = {name: [asdict(score) for score in each] for name, each in scores.items()}
    write_json(kept, signed(as_json({"asked": asked, "scores": rows})))
    return scores


def read_score(row: Mapping[str, Any]) -> Score:
    """A score from what `asdict` made of it."""
    return Score(**{**row, "setting": Setting(**row["setting"])})


def _question(task: Task, sampling: Sampling) -> dict[str, Any]:
    """What tells samples of a task from others; not the batch size, which changes nothing."""
    return {
        "observed": task.observed,
        "noise": float(torch.as_tensor(task.noise.std).mean()),
        "truths": [task.numbers.start, task.numbers.stop],
        "measurement": zlib.crc32(task.measurement.numpy().tobytes()),
        "n": sampling.n,
        "steps": f"{type(sampling.steps).__name__} {sampling.steps.steps}",
        "seed": sampling.seed,
        "retries": sampling.retries,
        **({} if sampling.polish is None else {"polish": as_json(asdict(sampling.polish))}),
    }


# The figure


def outcomes_figure(file: Path, task: Task, rule: Constraint, k: int = 0) -> Figure:
    """Fig. 5 of truth k of a file: its samples and residuals, and ℓ of all samples of all truths."""
    own, found = read_truth(file, k)
    distances, rule = read_distances(file), rule.cpu()
    methods = []
    for setting in sorted(found, key=lambda s: ORDER.index(s.method)):
        arrays = found[setting]
        good = ~arrays["failed"].astype(bool)
        if good.any():
            residuals = arrays["residuals"][good] if "residuals" in arrays else None
            first = float(arrays["distance"][good][0])
            methods.append(Reconstruction(setting.title, arrays["samples"][good], distances[setting], first, residuals))
    if not methods:
        raise DataError(f"every sample of truth {k} in {file} diverged: there is nothing to show.")
    observed = as_image(task.operator, torch.from_numpy(own["measurement"]), own["truth"].shape)
    floor = float(rule(task.truth).mean())
    return assimilation_figure(own["truth"], observed, methods, view=view_of(rule), floor=floor)


def as_image(operator: Operator, measurement: Tensor, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """A measurement of an image of `shape` (C, H, W) as such an image, NaN where nothing was seen, if it is one."""
    if (pixels := operator.pixels(shape)) is not None:
        image = np.full(int(np.prod(shape)), np.nan)
        image[pixels.flatten().numpy()] = measurement.flatten().numpy()
        return image.reshape(shape)
    return measurement.numpy() if tuple(measurement.shape) == shape else None
