"""Memory that 10 000 images take: polished, certified and repaired from a file, each in a process of its own.

    python benchmarks/memory.py [--only polish] [--n 10000] [--size 64]

The images, float32, lie in an NPY file and are read a few at a time. Printed for each call: the most memory the process
held, imports included, and seconds. `polish` has a closed form, `solve` a residual for Gauss–Newton, and `repair` sends
the images through small g and f and compares ℓ before and after.

Asked: less than 2 GiB. The exit code is 1 where that is missed.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from shared import peak_bytes

ASKED = 2 * 2**30
CHUNK = 256
PARTS = ("polish", "solve", "certify", "repair")


@dataclass(frozen=True)
class Options:
    """Which parts, and how many images of which size."""

    only: tuple[str, ...] = PARTS
    n: int = 10_000
    size: int = 64
    child: str = ""
    """Used by the script itself: the file that a process of its own reads."""


def work(part: str, path: Path) -> None:
    """Call one of `PARTS` on the images of a file."""
    import torch

    import namm
    from namm.datasets import open_images
    from namm.maps import ICNN, ResNet

    rule: namm.Constraint = namm.TotalFlux(120.0)
    if part == "solve":
        rule = namm.constraint(
            lambda x: x.square().mean((1, 2, 3)).sub(1).abs(), residual=lambda x: x.square().mean((1, 2, 3)) - 1
        )
    with open_images(path, layout="NCHW") as images, torch.no_grad():
        if part == "certify":
            count = len(namm.certify(images, rule).after)
        elif part == "repair":
            f = ResNet(channels=1, filters=8, blocks=1, downsamplings=1, activation="none", normalisation="none")
            count = len(namm.repair(images, namm.MirrorMap(ICNN(filters=8), f), rule=rule).images)
        else:
            polished = namm.polish(images, rule)
            assert polished.certificate.reached.all(), polished.certificate
            count = len(polished.images)
    assert count == images.shape[0]


def write(path: Path, n: int, size: int) -> None:
    """Random images, a few at a time."""
    rng = np.random.default_rng(0)
    array = np.lib.format.open_memmap(path, "w+", np.float32, (n, 1, size, size))
    for start in range(0, n, CHUNK):
        part = array[start : start + CHUNK]
        part[:] = rng.random(part.shape, np.float32)
    array.flush()


def main(arguments: Sequence[str]) -> int:
    """Run each part in a process of its own; print what it held."""
    options = tyro.cli(Options, args=list(arguments))
    if options.child:
        start = time.perf_counter()
        work(options.only[0], Path(options.child))
        print(f"{peak_bytes()} {time.perf_counter() - start}")
        return 0
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npy"
        write(path, options.n, options.size)
        for part in options.only:
            command = [sys.executable, __file__, "--only", part, "--child", str(path)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            held, seconds = int(said[-2]), float(said[-1])
            missed |= held >= ASKED
            print(f"{part}: {held / 2**20:.0f} MiB at most, {seconds:.0f} s, {options.n} images of {options.size}²")
    print("more than 2 GiB" if missed else "everything is as asked")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
