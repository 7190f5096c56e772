"""How long 1000 images of each dataset take to draw and store, and how much memory.

The baseline, measured in the same run, draws one image at a time: the plain loop that the datasets'
vectorised blocks replace. Its time is measured on a few images and scaled. The targets are 20 seconds and
1 GiB (of the whole process, PyTorch included) for 1000 images on two cores. Simulations that run for
minutes have targets of their own, and are measured only when they are named.

    python benchmarks/data.py [NAME ...] [--n 1000] [--baseline-n 16]

With `--paper` every training set is drawn and stored in the paper's size, on the GPU where there is one; six minutes is
the target for all five together. `--scale 0.01` draws a hundredth of each, to see that it works.

    python benchmarks/data.py [NAME ...] --paper [--scale 1]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from namm.datasets import DATASETS, Dataset, write_store
from namm.numerics import generator
from shared import peak_bytes

MAX_SECONDS_PER_1000 = 20.0
MINUTES: dict[str, float] = {"kolmogorov": 360.0, "black-holes": 90.0}
"""Datasets measured only when named, with the seconds that 1000 of their images may take."""
MAX_BYTES = 2**30
MAX_SECONDS_PAPER = 360.0
"""For the paper's training sets of all five datasets."""


@dataclass(frozen=True)
class Row:
    """One dataset's figures; `baseline` is the one-at-a-time loop, scaled to the same number of images."""

    name: str
    seconds: float
    baseline: float
    peak_bytes: int


def store_seconds(dataset: Dataset, n: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_store(Path(folder) / "data.h5", dataset, {"train": n}, quiet=True)
        return time.perf_counter() - start


def loop_seconds(dataset: Dataset, n: int) -> float:
    start = time.perf_counter()
    for i in range(n):
        dataset.draw(1, generator(0, "baseline", i))
    return time.perf_counter() - start


def measure(dataset: Dataset, n: int, baseline_n: int) -> Row:
    dataset.draw(1, generator(0))  # what a first call costs is not what an image costs
    seconds = store_seconds(dataset, n)
    return Row(dataset.name, seconds, loop_seconds(dataset, baseline_n) * n / baseline_n, peak_bytes())


def paper(names: Sequence[str], scale: float) -> int:
    """Draw the paper's training sets, or a part `scale` of each; a line as soon as each is done."""
    gpu = torch.cuda.is_available()
    print(
        f"the paper's training sets, drawn and written to HDF5 on {torch.cuda.get_device_name() if gpu else 'the CPU'}"
    )
    print(f"{'dataset':<12}{'images':>10}{'seconds':>10}{'per 1000':>10}{'peak MiB':>10}{'GPU MiB':>10}", flush=True)
    total = 0.0
    for name in names:
        dataset = DATASETS[name]()
        n = max(1, round(scale * dataset.sizes["train"]))
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = store_seconds(dataset, n)
        on_gpu = torch.cuda.max_memory_reserved() if gpu else 0
        memory = f"{peak_bytes() / 2**20:>10.0f}{on_gpu / 2**20:>10.0f}"
        print(f"{name:<12}{n:>10}{seconds:>10.2f}{1000 * seconds / n:>10.3f}{memory}", flush=True)
        total += seconds
    over, whole = total > MAX_SECONDS_PAPER, scale >= 1 and set(names) == set(DATASETS)
    verdict = "missed" if over else "met" if whole else "not judged by a part of the images"
    print(f"total {total:.1f} s; target {MAX_SECONDS_PAPER:.0f} s for all five: {verdict}", flush=True)
    return 1 if over else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DATASETS)} (default: the quick ones)")
    parser.add_argument("--n", type=int, default=1000, help="images per dataset")
    parser.add_argument("--baseline-n", type=int, default=16, help="images to time the baseline on")
    parser.add_argument("--paper", action="store_true", help="draw the paper's training sets (default: all five)")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the paper's images to draw")
    options = parser.parse_args(arguments)

    if unknown := set(options.names) - set(DATASETS):
        parser.error(f"no dataset is called {', '.join(sorted(unknown))}; there are {', '.join(DATASETS)}")
    if options.paper:
        return paper(options.names or list(DATASETS), options.scale)
    chosen = options.names or [name for name in DATASETS if name not in MINUTES]
    rows = [measure(DATASETS[name](), options.n, options.baseline_n) for name in chosen]
    print(f"{options.n} images, drawn and written to HDF5; baseline: one image at a time, not written")
    print(f"{'dataset':<12}{'seconds':>10}{'target s':>10}{'baseline s':>12}{'ratio':>8}{'peak MiB':>10}")
    targets = {row.name: MINUTES.get(row.name, MAX_SECONDS_PER_1000) * max(options.n, 1000) / 1000 for row in rows}
    for r in rows:
        times = f"{r.seconds:>10.3f}{targets[r.name]:>10.4g}{r.baseline:>12.2f}{r.baseline / r.seconds:>8.1f}"
        print(f"{r.name:<12}{times}{r.peak_bytes / 2**20:>10.0f}")
    slow = [r.name for r in rows if r.seconds > targets[r.name]]
    large = [r.name for r in rows if r.peak_bytes > MAX_BYTES]
    for names, target in ((slow, "seconds"), (large, "1 GiB of memory")):
        print(f"{target}: {'missed by ' + ', '.join(names) if names else 'met'}")
    return 1 if slow or large else 0


if __name__ == "__main__":
    sys.exit(main())
