"""What generative models have in common: a protocol, standardised images, and noise that belongs to a sample.

    u = (y − mean) / scale                per channel: what a network sees, whatever the scale of mirror space
    z(i, k) = row i mod 64 of a block     that depends on (seed, ⌊i/64⌋, k) only: the noise of sample i at step k

A model learns a distribution over images y of mirror space and draws from it. It knows the shape of its samples and
keeps its standardisation, so that whoever trains or samples it never has to. Which samples are made together, and
by which process, changes nothing: neither the batch size nor the number of processes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from accelerate.utils import broadcast_object_list, gather
from torch import Tensor, nn

from namm.datasets.batches import Images, in_chunks
from namm.distributed import process_state
from namm.errors import DataError, UsageError
from namm.numerics import at_least_float32
from namm.numerics import generator as seeded
from namm.progress import ProgressBar

CHUNK = 256  # images per piece of the statistics

BLOCK = 64
"""Samples per block of noise. Part of what a seed means, so not a setting."""


@runtime_checkable
class GenerativeModel(Protocol):
    """A model of mirror images; to be trained by `namm.train_model` it is also an `nn.Module`."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""

    def fit_statistics(self, y: Images) -> None:
        """Set the mean and scale of y (N, C, H, W), once, before training."""

    def loss(self, y: Tensor, *draws: Tensor) -> Tensor:
        """What to minimise on a batch (B, C, H, W): a scalar. `draws` come from `draw`, where the model has it."""

    @property
    def sample(self) -> Callable[..., Tensor]:
        """`sample(n, *, generator=None, …)`: (n, C, H, W) in mirror space, with whatever options the model has.

        The same generator state or seed gives the same samples.
        """


@runtime_checkable
class DrawsNoise(Protocol):
    """A model that takes the random numbers of its loss from outside, so that the loss compiles as one graph."""

    def draw(self, y: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Random tensors for `loss(y, *draws)`, each with the batch as its first axis; of y only its shape matters."""


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """`module` in evaluation mode inside this context, and in its previous mode after it."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


# Standardisation


class Standardised(nn.Module):
    """A model with a `sample_shape` (C, H, W), whose statistics are buffers (C, 1, 1), saved with the weights."""

    mean: Tensor
    scale: Tensor
    sample_shape: tuple[int, int, int]

    def register_statistics(self) -> None:
        """Add the buffers `mean` and `scale`."""
        self.register_buffer("mean", torch.zeros(self.sample_shape[0], 1, 1))
        self.register_buffer("scale", torch.ones(self.sample_shape[0], 1, 1))

    @torch.no_grad()
    def fit_statistics(self, y: Images) -> None:
        """Set mean and scale to the mean and standard deviation of each channel of y (N, C, H, W), read in pieces.

        A channel that never varies keeps the scale 1.
        """
        mean, deviation = channel_statistics(y, self.sample_shape)
        self.mean.copy_(mean.reshape(-1, 1, 1))
        self.scale.copy_(torch.where(deviation > 0, deviation, 1.0).reshape(-1, 1, 1))

    def standardise(self, y: Tensor) -> Tensor:
        """(y − mean) / scale, in float32 or better."""
        mean, scale = at_least_float32(self.mean), at_least_float32(self.scale)
        return (y.to(mean.dtype) - mean) / scale

    def unstandardise(self, u: Tensor) -> Tensor:
        """The inverse of `standardise`: scale u + mean."""
        return at_least_float32(self.scale) * u + at_least_float32(self.mean)


def channel_statistics(images: Images, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, (C,) in float64, in one pass over pieces of the images."""
    count, mean, squares = 0, torch.zeros(shape[0], dtype=torch.double), torch.zeros(shape[0], dtype=torch.double)
    for chunk in in_chunks(images, CHUNK):
        check_shape(chunk, shape)
        pixels = chunk.double().transpose(0, 1).flatten(1).cpu()
        size, centre = pixels.shape[1], pixels.mean(1)
        shift = centre - mean
        squares += (pixels - centre[:, None]).square().sum(1) + shift.square() * count * size / (count + size)
        count += size
        mean += shift * size / count
    if count == 0 or not torch.isfinite(squares).all():
        raise DataError("the mean and scale of the images are not finite: there are no images, or NaN or Inf in them.")
    return mean, (squares / count).sqrt()


def check_shape(y: Tensor, shape: tuple[int, int, int]) -> None:
    """Refuse what is not a batch of images (B, C, H, W) of that shape."""
    if y.ndim != 4 or tuple(y.shape[1:]) != shape:
        raise DataError(
            f"images of shape {tuple(y.shape)} do not fit a model of sample_shape {shape}: (N, C, H, W) is needed."
        )


# Noise, and samples made in batches by any number of processes


Draws = Callable[[int], Tensor]
"""z ~ N(0, I) of a batch for each step, 0 being the state from which sampling starts: what a sampler needs."""


class BatchNoise(Protocol):
    """`Draws` of samples `start` to `stop`."""

    @property
    def start(self) -> int:
        """Number of the first sample."""

    @property
    def stop(self) -> int:
        """Number after that of the last."""

    def __call__(self, step: int) -> Tensor:
        """z ~ N(0, I) for step `step`: (stop − start, …)."""


@dataclass(frozen=True)
class SampleNoise:
    """The noise of samples `start` to `stop`, each of shape `shape`, where `like` lives and in its precision."""

    seed: int
    start: int
    stop: int
    shape: tuple[int, ...]
    like: Tensor

    def __call__(self, step: int) -> Tensor:
        """z ~ N(0, I) for step `step`, 0 being the state from which sampling starts: (stop − start, *shape)."""
        first, last = self.start // BLOCK, (self.stop - 1) // BLOCK
        blocks = torch.cat([self._block(k, step) for k in range(first, last + 1)])
        return blocks[self.start - first * BLOCK : self.stop - first * BLOCK].to(self.like.dtype)

    def _block(self, k: int, step: int) -> Tensor:
        rng = seeded(self.seed, "sample", k, step, device=self.like.device)
        return torch.randn(BLOCK, *self.shape, generator=rng, device=self.like.device)


@dataclass(frozen=True)
class SeparateNoise:
    """The noise of samples from `start` on that have a seed each, on which it depends alone."""

    seeds: tuple[int, ...]
    start: int
    shape: tuple[int, ...]
    like: Tensor

    @property
    def stop(self) -> int:
        """Number after that of the last sample."""
        return self.start + len(self.seeds)

    def __call__(self, step: int) -> Tensor:
        """z ~ N(0, I) for step `step`: (stop − start, *shape)."""
        device = self.like.device
        streams = [seeded(seed, "separate", step, device=device) for seed in self.seeds]
        z = [torch.randn(self.shape, generator=stream, device=device) for stream in streams]
        return torch.stack(z).to(self.like.dtype)


Seeds = torch.Generator | int | Sequence[torch.Generator | int] | None
"""A seed, a generator to draw it from, torch's own for None; or one of these for each sample."""


def as_seed(generator: torch.Generator | int | None) -> int:
    """The seed itself, or one drawn from the generator (torch's global one for None)."""
    if isinstance(generator, int):
        return generator
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (1,), generator=generator, device=device))


def sample_in_batches(
    make: Callable[[BatchNoise], Tensor],
    n: int,
    shape: tuple[int, ...],
    *,
    noise_shape: tuple[int, ...] | None = None,
    like: Tensor,
    batch_size: int,
    generator: Seeds,
    first: int = 0,
) -> Tensor:
    """Samples `first` to `first` + `n`, `make` turning the noise of a batch into its samples: (n, *shape).

    The noise of a sample has its shape, where there is no other `noise_shape`. Where every sample has a generator of
    its own, its noise depends on that one alone. Under torchrun every process must call this: each makes its share, all
    get all samples, and the seeds are those of the first process.
    """
    if n < 1 or batch_size < 1 or first < 0:
        raise UsageError(
            f"n and batch_size must be at least 1 and first at least 0, not {n}, {batch_size} and {first}."
        )
    given = generator if isinstance(generator, Sequence) else [generator]
    if isinstance(generator, Sequence) and (len(given) != n or first):
        raise UsageError(f"{len(given)} generators were given for {n} samples: give one, or one for each.")
    processes = process_state()
    rank, world, seeds = processes.process_index, processes.num_processes, [as_seed(each) for each in given]
    if world > 1:
        seeds = broadcast_object_list(seeds)

    of_noise = shape if noise_shape is None else noise_shape

    def noise(start: int, stop: int) -> BatchNoise:
        if isinstance(generator, Sequence):
            return SeparateNoise(tuple(seeds[start:stop]), start, of_noise, like)
        return SampleNoise(seeds[0], first + start, first + stop, of_noise, like)

    parts = [make(noise(start, stop)) for start, stop in batch_bounds(n, batch_size, rank, world)]
    mine = torch.cat([like.new_empty(0, *shape), *parts])
    if world == 1:
        return mine
    padded = mine.new_zeros(-(-n // world), *shape)  # all processes must give equally many
    padded[: len(mine)] = mine
    return gather(padded.to(processes.device))[:n].to(mine.device)


def batch_bounds(n: int, batch_size: int, rank: int = 0, world: int = 1) -> list[tuple[int, int]]:
    """First sample of each batch of one process, and the one after its last; the last processes may have fewer."""
    share = -(-n // world)
    end = min(n, (rank + 1) * share)
    return [(start, min(start + batch_size, end)) for start in range(rank * share, end, batch_size)]


def sampling_bar(n: int, batch_size: int, steps: int, visible: bool) -> ProgressBar:
    """The bar of `n` samples of so many `steps` each, shown by the main process for its own batches."""
    processes = process_state()
    batches = len(batch_bounds(n, max(1, batch_size), 0, processes.num_processes))
    return ProgressBar(f"sampling {n}", steps * batches, visible=visible and processes.is_main_process)
