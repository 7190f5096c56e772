"""Does polishing bring samples onto their rule, and what does it cost them?

    python benchmarks/exact.py [--only burgers flux] [--seed 0] [--out runs/every_rule]

For Burgers' equation, flows without divergence, brightness, tiles and Darcy's flow: a run of `namm run NAME` (preset
demo) to its evaluation, by `every_rule.py`, with polished rows (`evaluate.polish`). Printed for the samples of
the method, of the baseline and of the baseline repaired: ℓ before and after, √MMD², total variation and spread before
and after, how far polishing moved them and, where the rule has one, how far `project` does, and the seconds that
polishing a sample took over those that drawing it took. What is complete is not run again.

Asked: ℓ ≤ 3 × (the data's mean ℓ + float32 rounding); √MMD², total variation and spread no further from the data's
than before by more than 2 %; moved no more than by `project`; no longer than drawing. The exit code is 1 where one of
them is missed.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

import every_rule
from every_rule import settings_of
from namm.constraints import Constraint
from namm.datasets.batches import map_images
from namm.experiments.engine import build
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.engine.stages.evaluate import BASELINE, OURS, POLISHED
from namm.formatting import format_number, print_table
from namm.generative.sample_file import SampleFile

RULES = ("burgers", "divergence", "flux", "periodic", "darcy")
TIMED = 256
"""Samples that are polished once more, to time it and to compare the move with that of `project`."""
SLACK = 0.02


@dataclass(frozen=True)
class Options:
    """Which rules, seed and folder."""

    only: tuple[str, ...] = RULES
    seed: int = 0
    out: Path = Path("runs/every_rule")
    quick: bool = False
    """A few steps and samples: only to see that everything runs."""


def finished_run(name: str, options: Options) -> tuple[Path, dict[str, Any]]:
    """The folder of a run with polished rows, and what it measured."""
    chosen = settings_of(name, options.seed, every_rule.Options(out=options.out, quick=options.quick))
    if options.quick:
        few = replace(chosen.settings.data, n_train=32, n_val=16, n_test=32)
        chosen = replace(chosen, settings=replace(chosen.settings, data=few))
    folder = options.out / f"{name}-demo-{options.seed}"
    run(chosen, folder, until="evaluate", log=lambda line: print(f"  {line}"), force=True)
    return folder, json.loads((folder / "evaluate" / "metrics.json").read_text())


def timed(folder: Path, samples: str) -> tuple[float, float, float | None]:
    """Seconds of polishing over those of drawing, and the moves (in standard deviations) of polish and `project`."""
    parts = RunParts.load(folder)
    rule = parts.rule()
    polisher = parts.polisher(rule)
    with SampleFile(folder / "evaluate" / samples) as file:
        images, drawing = torch.as_tensor(file.images[:TIMED]), file.compute_seconds / file.images.shape[0]
    polisher(images[:2])
    start = time.perf_counter()
    polished = polisher(images)
    seconds = (time.perf_counter() - start) / len(images)
    moved = float(polished.certificate.moved.mean())
    return seconds / drawing, moved, moved_by_project(rule, images, polisher.keywords["scale"])


def moved_by_project(rule: Constraint, images: torch.Tensor, scale: torch.Tensor) -> float | None:
    """Mean over images of the root mean square move of `project`; None where the rule has none."""
    if not rule.has_project:
        return None
    projected = torch.as_tensor(map_images(rule.project, images, build.device(), "project"))
    move = (projected.double() - images) / scale.reshape(-1, 1, 1)
    return float(move.square().mean((1, 2, 3)).sqrt().mean())


def main(arguments: Sequence[str]) -> int:
    """Run, print the table, judge."""
    options = tyro.cli(Options, args=list(arguments))
    table, missed = [], []
    for name in options.only:
        print(name, flush=True)
        folder, metrics = finished_run(name, options)
        rows, certificates = metrics["rows"], metrics["certificates"]
        files = {"dm_polished": BASELINE, "finetuned_polished": OURS}
        for row, source in POLISHED.items():
            cells, misses = judge_row(rows[source], rows[row], rows["data"], certificates[row])
            if row in files:
                share, moved, projected = timed(folder, files[row])
                cells += ["" if value is None else format_number(value, ".3g") for value in (moved, projected, share)]
                if share > 1:
                    misses.append("longer than drawing")
                if projected is not None and moved > 1.001 * projected:
                    misses.append("moved more than by project")
            missed += [f"{name}, {source}: {miss}" for miss in misses]
            table.append((name, source, *cells, *[""] * (8 - len(cells))))
    titles = ["rule", "samples", "ℓ", "reached", "√MMD²", "TV", "spread", "moved", "by project", "s / s to draw"]
    print_table(titles, table)
    print("\n".join(f"missed: {miss}" for miss in missed) or "everything is as asked")
    return int(bool(missed))


def judge_row(
    before: dict[str, Any], after: dict[str, Any], data: dict[str, Any], certificate: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Cells of the table, and what was asked for and is not met."""
    misses = []
    if certificate["after_mean"] > 3 * (certificate["floor"] + certificate["rounding"]):
        misses.append("ℓ above three times floor and rounding")
    off = {
        "√MMD²": (before["mmd"][0], after["mmd"][0], data["mmd"][0]),
        "total variation": (before["total_variation"], after["total_variation"], 1.0),
        "spread": (before["spread"], after["spread"], 1.0),
    }
    misses += [
        f"{name} further from the data's"
        for name, (old, new, real) in off.items()
        if abs(new - real) > abs(old - real) + SLACK * real
    ]
    cells = [
        f"{format_number(certificate['before_mean'], '.2g')} → {format_number(certificate['after_mean'], '.2g')}",
        f"{certificate['reached']} / {certificate['images']}",
        *(f"{old:.3f} → {new:.3f}" for old, new, _ in off.values()),
    ]
    return cells, misses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
