"""Does polishing bring samples onto their rule, and what does it cost them?

    python benchmarks/exact.py [--only burgers flux] [--seed 0] [--out runs/every_rule]
    python benchmarks/exact.py --only truth derivative

For Burgers' equation, flows without divergence, brightness, tiles and Darcy's flow: a run of `namm run NAME` (preset
demo) to its evaluation, by `every_rule.py`, with polished rows (`evaluate.polish`). Printed for the samples of
the method, of the baseline and of the baseline repaired: ℓ before and after, √MMD², total variation and spread before
and after, how far polishing moved them and, where the rule has one, how far `project` does, and the seconds that
polishing a sample took over those that drawing it took. What is complete is not run again.

Asked: ℓ ≤ 3 × (the data's mean ℓ + float32 rounding); √MMD², total variation and spread no further from the data's
than before by more than 2 %; moved no more than by `project`; no longer than drawing. The exit code is 1 where one of
them is missed.

`truth`, a part that needs no run, asks how near to the truth polishing comes: trajectories of Burgers' equation, 64×64,
with smooth errors of rms 2·10⁻³, are polished, rolled out from their first column (`project`), and fitted by SciPy's
least squares over the first column in float64 with Jacobians by central differences. Asked: ℓ ≤ 10⁻⁶, and an rms to the
truth within 2 % of that of SciPy's fit.

`derivative`, another, polishes trajectories of 16×16 with bounds, by the products that the rule knows
(`Burgers.derivative`) and by automatic differentiation. Asked: the same images to 10⁻⁶, in less than half the processor
time.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.optimize
import torch
import tyro
from torch import Tensor

import every_rule
from every_rule import settings_of
from namm.clock import clock
from namm.constraints import Burgers, Constraint
from namm.datasets import BurgersTrajectories
from namm.datasets.batches import map_images
from namm.exact import polish
from namm.experiments.engine import build
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.engine.stages.evaluate import BASELINE, OURS, POLISHED
from namm.formatting import format_number, print_table
from namm.generative.sample_file import SampleFile
from namm.numerics import generator
from namm.training.objectives import smoothed

RULES = ("burgers", "divergence", "flux", "periodic", "darcy")
TIMED = 256
"""Samples that are polished once more, to time it and to compare the move with that of `project`."""
SLACK = 0.02
TRUTHS, SIZE, ERROR, EXACT = 4, 64, 2e-3, 1e-6
"""Of `truth`: images, their size, rms of the errors, and the ℓ that is asked for."""


@dataclass(frozen=True)
class Options:
    """Which rules (or `truth`), seed and folder."""

    only: tuple[str, ...] = RULES
    seed: int = 0
    out: Path = Path("runs/every_rule")
    quick: bool = False
    """A few steps and samples: only to see that everything runs."""


def finished_run(
    name: str, options: Options, *, preset: Literal["demo", "gpu"] = "demo", until: str = "evaluate"
) -> Path:
    """The folder of a run with polished rows, complete up to the stage `until`."""
    chosen = settings_of(name, options.seed, every_rule.Options(preset=preset, out=options.out, quick=options.quick))
    if options.quick:
        few = replace(chosen.settings.data, n_train=32, n_val=16, n_test=32)
        chosen = replace(chosen, settings=replace(chosen.settings, data=few))
    folder = options.out / f"{name}-{preset}-{options.seed}"
    run(chosen, folder, until=until, log=lambda line: print(f"  {line}"), force=True)
    return folder


def timed(folder: Path, samples: str) -> tuple[float, float, float | None]:
    """Seconds of polishing over those of drawing, and the moves (in standard deviations) of polish and `project`."""
    parts = RunParts.load(folder)
    rule = parts.rule()
    polisher = parts.polisher(rule)
    with SampleFile(folder / "evaluate" / samples) as file:
        images, drawing = torch.as_tensor(file.images[:TIMED]), file.compute_seconds / file.images.shape[0]
    polisher(images[:2])
    start = clock(build.device())
    polished = polisher(images)
    seconds = (clock(build.device()) - start) / len(images)
    moved = float(polished.certificate.moved.mean())
    return seconds / drawing, moved, moved_by_project(rule, images, polisher.scale)


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
        if name == "truth":
            missed += near_the_truth(*((2, 16) if options.quick else (TRUTHS, SIZE)), options.seed)
            continue
        if name == "derivative":
            missed += known_derivative(16, options.seed)
            continue
        folder = finished_run(name, options)
        metrics = json.loads((folder / "evaluate" / "metrics.json").read_text())
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
    if table:
        print_table(titles, table, width=150)
    print("\n".join(f"missed: {miss}" for miss in missed) or "everything is as asked")
    return int(bool(missed))


def near_the_truth(count: int, size: int, seed: int) -> list[str]:
    """Print ℓ and the rms to the truth of images as they are, polished, fitted and rolled out; what is missed."""
    rule = Burgers()
    truth = BurgersTrajectories(size=size).images(seed, "test", 0, count).double()
    truth = rule.project(truth)  # in float64
    rng = generator(seed, "truth")
    errors = smoothed(
        torch.randn(truth.shape, generator=rng, dtype=torch.float64),
        torch.rand((count, 1, 1, 1), generator=rng, dtype=torch.float64),
    )
    x = truth + ERROR * errors / errors.square().mean((1, 2, 3), keepdim=True).sqrt()
    start = time.perf_counter()
    polished = polish(x.float(), rule)
    seconds = time.perf_counter() - start
    images = {
        "as they are": x,
        "polished": polished.images.double(),
        "SciPy's fit": torch.cat([fitted(image[None], rule) for image in x]),
        "rolled out": rule.project(x),
    }
    off = {name: (each - truth).square().mean((1, 2, 3)).sqrt() for name, each in images.items()}
    rows = [
        (
            name,
            f"{rule(each).mean():.2g}",
            f"{rule(each).max():.2g}",
            f"{off[name].mean():.3e}",
            f"{off[name].max():.3e}",
        )
        for name, each in images.items()
    ]
    print_table(["images", "ℓ", "largest", "rms to the truth", "largest"], rows, width=100)
    worst = float((off["polished"] / off["SciPy's fit"] - 1).abs().max())
    print(f"polish differs from SciPy's fit by {worst:.2%} in rms at most; {seconds / count:.2f} s an image")
    misses = {
        f"ℓ above {EXACT:g}": float(rule(images["polished"]).max()) > EXACT,
        f"further from SciPy's fit than {SLACK:.0%}": worst > SLACK,
    }
    return [f"truth: {miss}" for miss, is_so in misses.items() if is_so]


def known_derivative(size: int, seed: int) -> list[str]:
    """Print the processor time of polishing with bounds by either derivative; what is missed."""
    x = BurgersTrajectories(size=size).images(seed, "test", 0, TRUTHS)
    x = x + ERROR * torch.randn(x.shape, generator=generator(seed, "derivative"))
    bounds = (float(x.min()) + 0.05, float(x.max()) - 0.05)
    found, seconds = [], []
    differentiated = type("Differentiated", (Burgers,), {"derivative": Constraint.derivative})
    for rule in (Burgers(), differentiated()):
        polish(x[:1, :, :8, :4], rule, bounds=bounds)  # what is done once in a process
        start = time.process_time()
        found.append(polish(x, rule, bounds=bounds).images)
        seconds.append(time.process_time() - start)
    off = float((found[0] - found[1]).abs().max())
    print(
        f"with bounds: {seconds[0]:.2f} s; by automatic differentiation {seconds[1]:.2f} s, "
        f"{seconds[1] / seconds[0]:.1f} times as long"
    )
    misses = {f"images differ by {off:.2g}": off > EXACT, "not twice as fast": 2 * seconds[0] > seconds[1]}
    return [f"derivative: {miss}" for miss, is_so in misses.items() if is_so]


def fitted(x: Tensor, rule: Burgers) -> Tensor:
    """The trajectory nearest to one image (1, 1, H, W), by SciPy's least squares over its first column."""
    step = 1e-6

    def trajectories(columns: np.ndarray) -> Tensor:
        """From first columns (K, H)."""
        first = torch.from_numpy(columns)[:, None, :, None]
        return rule.project(first.expand(-1, 1, *x.shape[2:]))

    def misfit(column: np.ndarray) -> np.ndarray:
        found: np.ndarray = (trajectories(column[None]) - x).flatten().numpy()
        return found

    def jacobian(column: np.ndarray) -> np.ndarray:
        shifts = step * np.eye(len(column))
        up, down = trajectories(np.concatenate([column + shifts, column - shifts])).chunk(2)
        found: np.ndarray = ((up - down) / (2 * step)).flatten(1).T.numpy()
        return found

    result = scipy.optimize.least_squares(misfit, x[0, 0, :, 0].numpy(), jacobian, xtol=1e-12, ftol=1e-14, gtol=1e-12)
    return trajectories(result.x[None])


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
