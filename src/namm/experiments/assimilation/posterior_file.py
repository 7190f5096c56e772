"""Posterior samples of any number of truths in one HDF5 file, made a few truths at a time and never twice.

    truth           (M, C, H, W)        measurement     (M, …)        numbers    of the truths in the split `test`, (M,)
    METHOD/samples  (M, n, C, H, W)     METHOD/mean     (M, C, H, W)  METHOD/spread     (M, C, H, W)
    METHOD/distance (M, n)              METHOD/chi2     (M, n)        METHOD/residuals  (M, n, …), of rules that have it
    METHOD/error    (M,)                METHOD/coverage (M,)          METHOD/redrawn    METHOD/failed    (M, n)

χ² is per measured value. Until the file is complete its parts lie in FILE.parts; the same call goes on with them.
"""

import io
import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from namm._version import __version__
from namm.constraints import Constraint
from namm.datasets.partial import beside, only_writer, publish, read_header
from namm.errors import RunFolderError
from namm.experiments.assimilation.assimilate import Outcome, Sampling, Score, Setting, assimilate
from namm.experiments.assimilation.tasks import Task
from namm.files import differences, write_atomically, write_json
from namm.generative import Mirrored
from namm.training.checkpoint import weights_digest

ARRAYS = ("samples", "mean", "spread", "distance", "chi2", "error", "coverage", "redrawn", "failed", "residuals")
HEADER = "header.json"

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
    header = _header(task, sources, settings, sampling)
    with only_writer(path):
        if path.exists():
            _require_same(path, json.loads(str(read_header(path).get("made_from", "{}"))), header)
            return path
        parts = beside(path, ".parts")
        _begin(parts, header)
        for setting in settings:
            for rows in _pieces(task, sampling):
                if not all(_part(parts, setting, k).exists() for k in rows):
                    made = assimilate(
                        sources[setting.method], task, setting, rule, sampling, rows=rows, progress=progress
                    )
                    for k in rows:
                        write_atomically(_part(parts, setting, k), _packed(made, k - rows.start))
        _assemble(path, task, settings, parts, header)
        shutil.rmtree(parts)
    return path


def read_scores(path: Path) -> list[Score]:
    """One line for each method of a file."""
    with h5py.File(path) as file:
        return [_score(file[name]) for name in json.loads(file.attrs["methods"])]


def read_truth(path: Path, k: int) -> tuple[Arrays, dict[Setting, Arrays]]:
    """Truth number k of the file: its own arrays, and those of each method, without the axis of truths."""
    with h5py.File(path) as file:
        own = {name: file[name][k] for name in ("truth", "measurement")}
        found = {}
        for name in json.loads(file.attrs["methods"]):
            group = file[name]
            found[_setting(group)] = {each: group[each][k] for each in ARRAYS if each in group}
    return own, found


def read_distances(path: Path) -> dict[Setting, NDArray[Any]]:
    """ℓ of all samples of each method that did not fail, (N,)."""
    with h5py.File(path) as file:
        groups = [file[name] for name in json.loads(file.attrs["methods"])]
        return {_setting(group): group["distance"][:][~group["failed"][:].astype(bool)] for group in groups}


def remembered(
    path: Path,
    task: Task,
    sources: Mapping[str, Mirrored],
    sampling: Sampling,
    tried: Mapping[str, Any],
    make: Callable[[], dict[str, list[Score]]],
) -> dict[str, list[Score]]:
    """Scores of settings by method, made once and kept beside `path`, in FILE.tuned.json."""
    kept, asked = beside(path, ".tuned.json"), _about(task, sampling)
    asked |= {"models": {name: weights_digest(source) for name, source in sources.items()}}
    asked |= json.loads(json.dumps(tried))
    if kept.exists():
        there = json.loads(kept.read_text())
        if there["asked"] == asked:
            return {name: [read_score(row) for row in rows] for name, rows in there["scores"].items()}
    found = make()
    scores = {name: [asdict(each) for each in own] for name, own in found.items()}
    write_json(kept, {"asked": asked, "scores": scores})
    return found


def read_score(row: Mapping[str, Any]) -> Score:
    """A score from what `asdict` made of it."""
    return Score(**{**row, "setting": Setting(**row["setting"])})


def _header(
    task: Task, sources: Mapping[str, Mirrored], settings: Sequence[Setting], sampling: Sampling
) -> dict[str, Any]:
    """What tells these samples from others."""
    methods = {s.method: asdict(s) | {"weights": weights_digest(sources[s.method])} for s in settings}
    return {**_about(task, sampling), "methods": methods}


def _about(task: Task, sampling: Sampling) -> dict[str, Any]:
    """Without the batch size, which changes nothing."""
    return {
        "observed": task.observed,
        "noise": float(torch.as_tensor(task.noise.std).mean()),
        "truths": [task.numbers.start, task.numbers.stop],
        "measurement": zlib.crc32(task.measurement.numpy().tobytes()),
        "n": sampling.n,
        "steps": f"{type(sampling.steps).__name__} {sampling.steps.steps}",
        "seed": sampling.seed,
        "retries": sampling.retries,
    }


def _require_same(path: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    if found := differences(there, asked):
        raise RunFolderError(
            f"{path} holds other samples than asked for ({'; '.join(found)}) and is not overwritten: write to another "
            "path with -o, or remove it first."
        )


def _begin(parts: Path, header: Mapping[str, Any]) -> None:
    if (parts / HEADER).exists():
        _require_same(parts, json.loads((parts / HEADER).read_text()), header)
    else:
        write_json(parts / HEADER, header)


def _pieces(task: Task, sampling: Sampling) -> list[range]:
    """Truths that are made together: about a batch of samples, and one truth at least."""
    size, count = max(1, sampling.together(task.truth.shape[1:]) // sampling.n), len(task.truth)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _part(parts: Path, setting: Setting, k: int) -> Path:
    return parts / f"{setting.method}-{k}.npz"


def _packed(outcome: Outcome, k: int) -> bytes:
    """Truth k of an outcome."""
    arrays = {name: values[k].numpy() for name in ARRAYS if isinstance(values := getattr(outcome, name), Tensor)}
    buffer = io.BytesIO()
    np.savez(buffer, seconds=np.array(outcome.seconds / len(outcome.error)), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _assemble(path: Path, task: Task, settings: Sequence[Setting], parts: Path, header: Mapping[str, Any]) -> None:
    """Copy the parts, one at a time in memory."""
    draft = beside(path, ".partial")
    draft.unlink(missing_ok=True)  # a link, too, which h5py would write through
    with h5py.File(draft, "w", track_order=True) as file:
        file.attrs.update(
            {
                "namm_version": __version__,
                "made_from": json.dumps(header, sort_keys=True),
                "methods": json.dumps([s.method for s in settings]),
            }
        )
        file["truth"], file["measurement"] = task.truth.numpy(), task.measurement.numpy()
        file["numbers"] = np.array(task.numbers)
        for setting in settings:
            group, seconds = file.create_group(setting.method), 0.0
            for k in range(len(task.truth)):
                with np.load(_part(parts, setting, k), allow_pickle=False) as piece:
                    seconds += float(piece["seconds"])
                    for name in (each for each in ARRAYS if each in piece):
                        _put(group, name, piece[name], k, len(task.truth))
            group.attrs.update({**asdict(setting), "seconds": seconds})
    publish(draft, path)


def _put(group: h5py.Group, name: str, values: NDArray[Any], k: int, count: int) -> None:
    if name not in group:
        group.create_dataset(name, (count, *values.shape), values.dtype)
    group[name][k] = values


def _setting(group: h5py.Group) -> Setting:
    return Setting(
        str(group.attrs["method"]),
        float(group.attrs["zeta"]),
        float(group.attrs["weight"]),
        str(group.attrs["guidance"]),
    )


def _score(group: h5py.Group) -> Score:
    needed = ("distance", "chi2", "error", "coverage", "spread", "redrawn", "failed")
    arrays = {name: torch.from_numpy(group[name][:]) for name in needed}
    return Score.of(_setting(group), arrays, float(group.attrs["seconds"]))
