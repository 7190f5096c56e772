"""MMD² between 10 000 and 10 000 images: seconds, peak memory, and both against full matrices.

The baseline, measured in the same run, is what one writes first: `torch.cdist` for the three whole matrices of
distances, the median of one of them, and their exponentials, in float32. `mmd2` goes through the same pairs in blocks.
CPU seconds, over all threads, are also given, since a busy machine changes them less than the time on the clock. Each
runs in a process of its own, whose peak memory counts, PyTorch and images included. The targets are 120 seconds
and 3 GiB on two cores.

    python benchmarks/mmd.py [--n 10000] [--size 64] [--threads 2] [--quick]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from namm.evaluation import mmd2

MAX_SECONDS = 120.0
MAX_BYTES = 3 * 2**30


def full_matrices(x: Tensor, y: Tensor) -> float:
    """Biased MMD² with every matrix kept."""
    a, b = x.flatten(1), y.flatten(1)
    xx, yy, xy = (torch.cdist(p, q).square() for p, q in ((a, a), (b, b), (a, b)))
    median = xx[torch.ones_like(xx, dtype=torch.bool).triu(1)].median()
    return float(sum(sign * (-d / median).exp().mean() for sign, d in ((1, xx), (1, yy), (-2, xy))))


METHODS: dict[str, Callable[[Tensor, Tensor], float]] = {"blocks": mmd2, "full matrices": full_matrices}


def measure(method: str, n: int, size: int) -> dict[str, float]:
    """One method's figures, in this process."""
    torch.manual_seed(0)
    x, y = torch.rand(n, 1, size, size), torch.rand(n, 1, size, size).pow_(1.1)
    METHODS[method](x[:64], y[:64])  # what a first call costs is not what a pair costs
    start, cpu = time.perf_counter(), time.process_time()
    value = METHODS[method](x, y)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"value": value, "seconds": seconds, "cpu": cpu, "bytes": peak_bytes()}


def measure_apart(method: str, n: int, size: int, threads: int) -> dict[str, float]:
    """The same in a process of its own."""
    settings = ["--n", str(n), "--size", str(size), "--threads", str(threads), "--method", method]
    return json.loads(subprocess.run([sys.executable, __file__, *settings], check=True, stdout=subprocess.PIPE).stdout)


def peak_bytes() -> int:
    """The most memory this process has held. What `getrusage` says may be its parent's, so Linux is asked directly."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 10_000), ("size", 64), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="500 images of 16×16 in this process, to see that it runs")
    parser.add_argument("--method", choices=METHODS, help="measure this one alone, in this process")
    options = parser.parse_args(arguments)
    n, size = (500, 16) if options.quick else (options.n, options.size)
    if options.method:
        torch.set_num_threads(options.threads)
        print(json.dumps(measure(options.method, n, size)))
        return 0

    print(f"MMD² of {n} and {n} images of {size}×{size}, {options.threads} thread(s)")
    rows = {}
    for method in METHODS:
        row = measure(method, n, size) if options.quick else measure_apart(method, n, size, options.threads)
        rows[method] = row
        times = f"{row['seconds']:9.3f} s  {row['cpu']:9.3f} CPU s"
        print(f"{method:<14} {times}  {row['bytes'] / 2**20:9.1f} MiB  MMD² {row['value']:.6e}")
    ours, naive = rows.values()
    time_, cpu, memory = (naive[key] / ours[key] for key in ("seconds", "cpu", "bytes"))
    print(f"ratio full matrices / blocks: {time_:.2f} in time, {cpu:.2f} in CPU time, {memory:.2f} in memory")
    met = ours["seconds"] <= MAX_SECONDS and ours["bytes"] <= MAX_BYTES
    print(f"targets {MAX_SECONDS:.0f} s and {MAX_BYTES / 2**30:.0f} GiB: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
