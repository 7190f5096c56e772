"""Table 5: FID before and after finetuning, beside the baseline and the paper's numbers.

FID falls with the number of images, so values for other numbers than the paper's 50 000 compare with each other and not
with the paper's. Where a run's evaluation has no FID it is measured here, on as many of its samples as there are real
images to compare them with.
"""

from pathlib import Path
from typing import Any

import numpy as np

from namm.datasets.batches import Images, map_images
from namm.evaluation import fid
from namm.evaluation.mmd import Subset
from namm.experiments.engine.run_parts import device
from namm.experiments.engine.stages.evaluate import BASELINE, OURS
from namm.experiments.paper.measurements import FinishedRun
from namm.experiments.paper.output import Part, Runs, Value, over_seeds
from namm.experiments.paper.table1 import METHODS, of_paper
from namm.files import read_json, write_json
from namm.generative.sample_file import SampleFile
from namm.report.contents import ROWS

FORMATS = {"method": "", "seeds": "d", "images": "d", "FID": ".4g", "FID, paper": "g"}
NOTE = "The paper's FID is that of 50000 images; it depends on their number."


def table5(runs: Runs) -> Part:
    """FID of ours before and after finetuning and of the baseline; of other real images where they are enough."""
    measured = [_read(run) for run in runs.complete]
    n = measured[0]["n"] if measured else None
    rows: list[list[Value]] = []
    for method in (*METHODS, "data"):
        values = [each["fid"][method] for each in measured if method in each["fid"]]
        paper = of_paper(runs.reported, method)
        if values or paper is not None:
            theirs = None if paper is None else paper.fid
            rows.append([ROWS[method][0], len(values), n, over_seeds(values), theirs])
    return Part(FORMATS, rows, notes=[NOTE])


def measure(run: FinishedRun, progress: bool) -> None:
    """FID of the samples of an evaluation that did not measure it."""
    if run.settings.evaluate.n_fid or (file := _file(run)).exists():
        return
    extractor = run.extractor(run.parts.rule())
    reference = run.settings.evaluate.reference
    evaluation = run.folder / "evaluate"
    with run.images() as store, SampleFile(evaluation / OURS) as ours, SampleFile(evaluation / BASELINE) as baseline:
        n = min(store.sizes[reference], run.settings.evaluate.drawn)
        images: dict[str, Images] = {
            "mdm": map_images(run.parts.mirror("map").to_data, ours.mirror_images, device(), "f"),
            "finetuned": ours.images,
            "dm": baseline.images,
        }
        other = store["train" if reference == "test" else "test"]
        if other.shape[0] >= n:
            images["data"] = other
        first = np.arange(n)
        real = Subset(store[reference], first)
        values = {name: fid(real, Subset(each, first), extractor) for name, each in images.items()}
    write_json(file, {"n": n, "fid": values})


def _read(run: FinishedRun) -> dict[str, Any]:
    """The number of images, and FID by method."""
    if not run.settings.evaluate.n_fid:
        return dict(read_json(_file(run)))
    values = {name: row["fid"] for name, row in run.metrics()["rows"].items() if "fid" in row}
    return {"n": run.settings.evaluate.n_fid, "fid": values}


def _file(run: FinishedRun) -> Path:
    return run.study("fid", ("data", "map", "evaluate")) / "fid.json"
