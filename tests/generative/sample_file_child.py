"""Writes sample files in processes that are killed or measured; what costs seconds, importing torch, is done once.

sample_file_child.py kills FOLDER      whole.h5 in one go and killed.h5 in many; prints where each kill hit
sample_file_child.py memory FOLDER     prints the peak memory in bytes of writing few and of writing many samples
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from namm.constraints import TotalFlux
from namm.datasets import store
from namm.generative import Diffusion, DPMSolver, Mirrored
from namm.generative.base import sample_in_batches
from namm.generative.sample_file import write_samples
from namm.maps import ICNN, IdentityMap, MirrorMap, ResNet

N, BATCH = 400, 128


class Network(nn.Module):
    """A small convolution of state and time."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.inside(torch.cat([y, t.reshape(-1, 1, 1, 1).expand_as(y)], 1))


class Noisy(nn.Module):
    """A model whose samples are noise, at no cost."""

    sample_shape = (1, 16, 16)

    def sample(self, n, *, generator, first, batch_size, progress):
        like = torch.zeros(1)
        options = {"like": like, "batch_size": batch_size, "generator": generator, "first": first}
        return sample_in_batches(lambda noise: noise(0), n, self.sample_shape, **options)


def source() -> Mirrored:
    """A model and maps with random weights, the same every time."""
    torch.manual_seed(1)
    mirror = MirrorMap(ICNN(1, layers=1, filters=4), ResNet(1, filters=4, blocks=1, downsamplings=1)).eval()
    return Mirrored(Diffusion(Network(), (1, 8, 8)), mirror)


def write(path: Path, n: int = N, first: int = 0, batch_size: int = BATCH) -> Path:
    """Samples `first` to `first` + `n`, of the same seed every time."""
    return write_samples(
        path,
        source(),
        n,
        seed=5,
        first=first,
        description={"weights": "random"},
        constraint=TotalFlux(3.0),
        batch_size=batch_size,
        progress=False,
        sampler=DPMSolver(3),
    )


def in_a_fork(work, *arguments) -> int:
    """Do `work` in another process; its exit code, −9 for a kill."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        work(*arguments)
        code = 0
    finally:
        os._exit(code)


def write_and_die(path: Path, at: int) -> None:
    """Write, and be killed when block number `at` of this attempt has its values but not yet its checksum."""
    checksum, left = store.checksum, at

    def dying(rows):
        nonlocal left
        left -= sys._getframe(1).f_code.co_name == "write_block"
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(rows)

    store.checksum = dying
    write(path)


def kills(folder: Path) -> None:
    """Nine kills, each a little further on, then an end in peace."""
    codes = [in_a_fork(write_and_die, folder / "killed.h5", at) for at in (0, 1, 6, 3, 0, 5, 2, 4, 3)]
    assert not (folder / "killed.h5").exists()
    for name in ("killed.h5", "whole.h5"):
        assert in_a_fork(write, folder / name) == 0
    print(json.dumps(codes))


def measure(folder: Path, n: int) -> None:
    """Write `n` samples and leave the peak memory in a file."""
    described = {"weights": "none"}
    write_samples(folder / f"{n}.h5", Mirrored(Noisy(), IdentityMap()), n, seed=0, description=described)
    (folder / f"{n}.peak").write_text(str(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def memory(folder: Path) -> None:
    """Peaks of two processes that begin alike."""
    for n in (2000, 20_000):
        assert in_a_fork(measure, folder, n) == 0
    print(json.dumps([int((folder / f"{n}.peak").read_text()) for n in (2000, 20_000)]))


if __name__ == "__main__":
    {"kills": kills, "memory": memory}[sys.argv[1]](Path(sys.argv[2]))
