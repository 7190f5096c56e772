"""Table 5: FID before and after finetuning, beside the baseline and the paper's numbers.

FID falls with the number of images, so values for other numbers than the paper's 50 000 compare with each other and not
with the paper's. Where a run's evaluation has no FID it is measured here, on as many of its samples as there are real
images to compare them with.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from namm.datasets.batches import Images, map_images
from namm.evaluation import fid
from namm.evaluation.rows import View
from namm.experiments.engine.run_parts import device
from namm.experiments.engine.stages.evaluate import BASELINE, OURS
from namm.experiments.paper.measurements import (
    by_experiment,
    complete,
    extractor_for,
    images_of,
    metrics,
    settings_of,
    study,
    trained,
)
from namm.experiments.paper.output import Shown, Table, over_seeds
from namm.experiments.paper.table1 import METHODS, of_paper
from namm.experiments.sweeps.cell import CellOutcome
from namm.files import write_json
from namm.generative.sample_file import SampleFile
from namm.report.contents import ROWS

FILE = "fid.json"
FORMATS = {"experiment": "", "method": "", "seeds": "d", "images": "d", "FID": ".4g", "FID, paper": "g"}
STAGES = ("data", "map", "evaluate")


def table5(outcomes: Sequence[CellOutcome]) -> Shown:
    """FID of ours before and after finetuning and of the baseline; of other real images where they are enough."""
    rows = []
    for experiment, cells in by_experiment(outcomes).items():
        found = [_read(outcome) for outcome in complete(cells)]
        reported = cells[0].cell.preset.reported
        for method in (*METHODS, "data"):
            values = [each["fid"][method] for each in found if method in each["fid"]]
            paper = of_paper(reported, method)
            if values or paper is not None:
                n = found[0]["n"] if found else None
                name = ROWS[method][0]
                rows.append(
                    [experiment, name, len(values), n, over_seeds(values), None if paper is None else paper.fid]
                )
    return Shown(Table(FORMATS, rows), notes=["The paper's FID is that of 50000 images; it depends on their number."])


def measure(outcome: CellOutcome, progress: bool) -> None:
    """FID of the samples of an evaluation that did not measure it."""
    if _asked(outcome) or (folder := study(outcome, "fid", STAGES)).joinpath(FILE).exists():
        return
    rule = trained(outcome).rule()
    extractor = extractor_for(outcome, rule)
    reference = settings_of(outcome).evaluate.reference
    with images_of(outcome) as store:
        n = min(store.sizes[reference], settings_of(outcome).evaluate.drawn)
        among = np.arange(n)
        real = View(store[reference], among)
        found = {name: fid(real, View(images, among), extractor) for name, images in _samples(outcome)}
        other = store["train" if reference == "test" else "test"]
        if other.shape[0] >= n:
            found["data"] = fid(real, View(other, among), extractor)
    write_json(folder / FILE, {"n": n, "fid": found})


def _samples(outcome: CellOutcome) -> Iterator[tuple[str, Images]]:
    """The evaluation's samples, by method."""
    with ExitStack() as stack:
        ours, baseline = (
            stack.enter_context(SampleFile(outcome.folder / "evaluate" / name)) for name in (OURS, BASELINE)
        )
        yield "mdm", map_images(trained(outcome).mirror("map").to_data, ours.mirror_images, device(), "f")
        yield "finetuned", ours.images
        yield "dm", baseline.images


def _asked(outcome: CellOutcome) -> bool:
    """Whether the evaluation measured it already."""
    return settings_of(outcome).evaluate.n_fid > 0


def _read(outcome: CellOutcome) -> dict[str, Any]:
    if not _asked(outcome):
        found: dict[str, Any] = json.loads((study(outcome, "fid", STAGES) / FILE).read_text())
        return found
    rows = metrics(outcome)["rows"]
    values = {name: row["fid"] for name, row in rows.items() if "fid" in row}
    return {"n": settings_of(outcome).evaluate.n_fid, "fid": values}
