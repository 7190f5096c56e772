"""Any number of samples in one HDF5 file, made a batch at a time and never twice.

images            x = f(y), polished where asked for   (N, C, H, W)
mirror_images     y                                    (N, C, H, W)
distances         ℓ(x), where there is a rule          (N,)
seconds           what each sample took to compute     (N,)

Polished samples bring their certificate: before, after, moved, iterations and rounding, each (N,).

Sample i depends on (model, sampler, seed, i) only, so a file that was cut short goes on where it stopped and ends with
the samples of an uninterrupted one (in the same batches, their very bytes on a CPU). Memory does not grow with N.

Under torchrun all processes make each batch together, and the main one writes it.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from namm._version import __version__
from namm.clock import clock
from namm.constraints import Constraint
from namm.datasets import store
from namm.datasets.base import BLOCK
from namm.datasets.readers import LazyImages
from namm.distributed import process_state
from namm.errors import DataError, MemoryShortage, UsageError
from namm.exact.certificate import ARRAYS, Certificate
from namm.exact.polish import Polished
from namm.generative.base import evaluating
from namm.generative.diffusion import Diffusion
from namm.generative.mirrored import Mirrored
from namm.memory import shortage
from namm.numerics import arithmetic, generator
from namm.precision import Precision
from namm.progress import ProgressBar
from namm.reading import REASON, damage_as

PIXELS = 2**20
"""Pixels of all images that are made together, where no batch size is given."""


def write_samples(
    path: str | Path,
    source: Mirrored,
    n: int,
    *,
    seed: int,
    description: Mapping[str, bool | int | float | str],
    constraint: Constraint | None = None,
    first: int = 0,
    batch_size: int | None = None,
    precision: Precision = "auto",
    compile: bool = False,
    polish: Callable[[torch.Tensor], Polished] | None = None,
    progress: bool = True,
    **options: Any,
) -> Path:
    """Write samples `first` to `first` + `n` of `source` to `path`, or go on where an interrupted call stopped.

    Under torchrun every process must call this.

    Args:
        path: The file. A complete one of the same seed and description is not changed, one of others is refused.
        source: The model and the maps; on the device to be used.
        n: How many samples.
        seed: Seed of the samples.
        description: What else distinguishes these samples: weights, sampler. Stored as attributes.
        constraint: ℓ, to be measured on every sample.
        first: Number of the first sample, to go on where another file ends.
        batch_size: Samples that a process makes together; by default as many as have a million pixels together, but no
            more than 256.
        precision: How the networks compute on a GPU, by its name in `namm.numerics`.
        compile: Compile the network of a diffusion model before the first batch; not counted in `seconds`.
        polish: Moves images to the nearest ones on the rule, such as `partial(namm.polish, rule=rule, floor=…)`; with
            that `floor` in the description too, the file's certificate knows it.
        progress: Show a progress bar, where there is a terminal.
        options: Passed to `source.model.sample`, such as `sampler`.
    """
    shape = tuple(source.model.sample_shape)
    size = max(1, min(256, PIXELS // (shape[1] * shape[2]))) if batch_size is None else batch_size
    if n < 1 or size < 1 or first < 0:
        raise UsageError(f"n and batch_size must be at least 1 and first at least 0, not {n}, {size} and {first}.")
    processes = process_state()
    together = -(-size * processes.num_processes // BLOCK)
    shapes = {"images": (n, *shape), "mirror_images": (n, *shape), "seconds": (n,)}
    if constraint is not None:
        shapes["distances"] = (n,)
    if polish is not None:
        shapes |= dict.fromkeys(ARRAYS, (n,))
        description = {**description, "polished": True}
    rule = "none" if constraint is None else constraint.name
    header = {"samples": n, "first": first, "seed": seed, "rule": rule, **description, "namm_version": __version__}
    options |= {"generator": seed, "batch_size": size} | ({"compile": True} if compile else {})

    @cache
    def rehearsed() -> None:
        rehearse_sampling(source, size if compile else min(size, n), constraint, compile=compile)

    def make(start: int, stop: int) -> dict[str, np.ndarray]:
        with torch.no_grad(), arithmetic(precision, source.device):
            rehearsed()
            return _arrays(source, first + start, stop - start, constraint, polish, options)

    def fill(file: h5py.File, blocks: list[store.Block]) -> None:
        missing = {k for _, k in blocks}
        with ProgressBar("samples", n, start=max(0, n - BLOCK * len(missing)), visible=progress) as bar:
            # Whole batches, also where a kill left a part of one: the values may depend on what is made together.
            for batch in sorted({k // together for k in missing}):
                start, stop = batch * together * BLOCK, min(n, (batch + 1) * together * BLOCK)
                broadcast_object_list([(start, stop)])
                arrays = make(start, stop)
                for k in missing & set(range(batch * together, (batch + 1) * together)):
                    rows = slice(k * BLOCK - start, (k + 1) * BLOCK - start)
                    for name, values in arrays.items():
                        store.write_block(file, (name, k), values[rows])
                    bar.advance(len(values[rows]))

    if processes.is_main_process:
        store.grow(Path(path), shapes, header, fill)
        broadcast_object_list([None])
    else:
        while (bounds := broadcast_object_list([None])[0]) is not None:
            make(*bounds)
    return Path(path)


def rehearse_sampling(
    source: Mirrored, size: int, constraint: Constraint | None = None, *, compile: bool = False
) -> None:
    """Refuse to make `size` samples together where the network, f or ℓ does not fit into memory.

    One evaluation of each is tried. With `compile` the network is compiled, or recorded, for this size.
    """
    device = source.device

    @torch.no_grad()
    def attempt(n: int) -> None:
        noise = torch.randn((n, *source.model.sample_shape), generator=generator(0, "dry sampling")).to(device)
        with evaluating(source):
            if isinstance(source.model, Diffusion):
                with source.model.compiled(n) if compile else nullcontext():
                    for _ in range(3 if compile else 1):  # a compiled network records CUDA graphs after its first call
                        source.model.denoise(noise, noise.new_ones(n))
            x = source.to_data(noise)
        if constraint is not None:
            constraint(x)

    if (found := shortage(attempt, size, device)) is None:
        return
    problem, fitting = found
    smaller = f"{fitting} fit: ask for that batch_size" if fitting else "not even one fits: take a smaller network"
    raise MemoryShortage(
        f"sampling: {size} samples together do not fit into memory ({problem}); {smaller}, or free what other programs "
        "hold."
    )


def _arrays(
    source: Mirrored,
    first: int,
    count: int,
    constraint: Constraint | None,
    polish: Callable[[torch.Tensor], Polished] | None,
    options: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Samples `first` to `first` + `count`, as they are written."""
    began = clock(source.device)
    x, y = source.sample_pairs(count, first=first, progress=False, **options)
    if bad := (~torch.isfinite(x).flatten(1).all(1)).nonzero().flatten().tolist():
        raise DataError(
            f"sample {first + bad[0]} is not finite, like {len(bad)} of the {len(x)} made together: the model has "
            "not learned enough for this sampler. Train it longer, let it predict v (mdm.diffusion.prediction), or "
            "choose another sampler or more steps."
        )
    certified = {}
    if polish is not None:
        polished = polish(x)
        x, certified = polished.images, {name: getattr(polished.certificate, name) for name in ARRAYS}
    arrays = {"images": x.cpu().numpy(), "mirror_images": y.cpu().numpy(), **certified}
    arrays["seconds"] = np.full(count, (clock(source.device) - began) / count)
    if constraint is not None:
        distances = [constraint(part) for part in x.split(options["batch_size"])]
        arrays["distances"] = torch.cat(distances).cpu().numpy()
    return {name: values.astype(np.float32) for name, values in arrays.items()}


class SampleFile(store.GrownFile):
    """An open file of samples; its images are read on demand.

    `parameters` holds seed, sampler, weights and whatever else the samples were made from.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "samples", "`write_samples` or `namm sample`.")

    @property
    def images(self) -> LazyImages:
        """x."""
        return LazyImages(self.array("images"), "NCHW", self.path)

    @property
    def mirror_images(self) -> LazyImages:
        """y."""
        return LazyImages(self.array("mirror_images"), "NCHW", self.path)

    @property
    def distances(self) -> np.ndarray:
        """ℓ(x): (N,)."""
        if "distances" not in self._file:
            raise DataError(f"{self.path} holds no distances: it was written without a constraint.")
        return self.numbers("distances")

    @property
    def certificate(self) -> Certificate | None:
        """How far polishing moved each sample and what is left of ℓ; None where they were not polished."""
        if "after" not in self._file:
            return None
        arrays: dict[str, Any] = {name: self.numbers(name).astype(np.float64) for name in ARRAYS}
        if len({len(self.images), *map(len, arrays.values())}) != 1:
            raise DataError(f"{self.path} holds a certificate of other images: its arrays differ in length.")
        about = self.parameters
        with damage_as(DataError, f"{self.path} holds no certificate that can be read ({REASON}): sample anew."):
            return Certificate(str(about["rule"]), "polishing", float(about.get("floor", 0.0)), **arrays)

    @property
    def compute_seconds(self) -> float:
        """What all samples took together."""
        return float(self.numbers("seconds").astype(np.float64).sum())
