"""What a generative model is to the rest of the package.

A model learns a distribution over images y of mirror space and draws from it. It knows the shape of its samples and
keeps its own standardisation, so that whoever trains or samples it never has to.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from namm.datasets.batches import Images


@runtime_checkable
class GenerativeModel(Protocol):
    """A model of mirror images; to be trained by `namm.train_model` it is also an `nn.Module`."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""

    def fit_statistics(self, y: Images) -> None:
        """Take in the mean and scale of y (N, C, H, W), once, before training."""

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
    """`module` in evaluation mode inside this context, and in its own mode again after it."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
