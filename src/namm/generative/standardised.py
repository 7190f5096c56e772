"""Standardisation: what a model sees is u = (y − mean) / scale, per channel, whatever the scale of mirror space."""

import torch
from torch import Tensor, nn

from namm.datasets.batches import Images, in_chunks
from namm.errors import DataError
from namm.numerics import at_least_float32

CHUNK = 256  # images per piece of the statistics


class Standardised:
    """Mixed into a module that has a `sample_shape` (C, H, W); the statistics are buffers, saved with the weights."""

    mean: Tensor
    scale: Tensor
    sample_shape: tuple[int, int, int]

    def register_statistics(self, module: nn.Module) -> None:
        """Add the buffers `mean` and `scale`, (C, 1, 1), to `module`, which is this object."""
        channels = self.sample_shape[0]
        module.register_buffer("mean", torch.zeros(channels, 1, 1))
        module.register_buffer("scale", torch.ones(channels, 1, 1))

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
