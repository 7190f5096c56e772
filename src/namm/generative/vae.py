"""The β-VAE (paper App. A): one latent vector per image, and a single pass to draw one.

    u = (y − mean) / scale per channel,      q(z | u) = N(μ(u), diag σ²(u)),      z = μ + σ ε,   ε ~ N(0, I)
    loss = E (û(z) − u)² + β KL(q(z | u) ‖ N(0, I));      to sample, z ~ N(0, I) and y = scale û(z) + mean

The squared error is a mean over pixels, the divergence a sum over latents. That is a Gaussian likelihood of variance
s² = β d / 2 with d = C·H·W, so the best linear pair keeps the principal directions that explain more than β/2 of the
total variance, and its samples lack s² in each: 0.05 % for the paper's β, whatever the image size.
"""

from math import isfinite, prod
from typing import get_args

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.generative.base import Seeds, Standardised, check_shape, evaluating, sample_in_batches
from namm.maps.layers import Boundary, DoublingConv2d, SameConv2d
from namm.numerics import at_least_float32, full_precision

FACTOR = 8  # three of the five layers halve the image


class VAE(Standardised, ModelMixin, ConfigMixin):
    """A convolutional β-VAE of images in mirror space: five convolutions each way, of which three change the size.

    Args:
        sample_shape: (C, H, W); H and W divisible by 8.
        latent: Length of z.
        features: Channels of the first layer; twice as many at the lower resolutions.
        beta: Weight β of the divergence.
        boundary: `zeros` (the paper), `circular`, or `cylinder`, where only the top meets the bottom.
    """

    @register_to_config
    def __init__(
        self,
        sample_shape: tuple[int, int, int],
        latent: int = 128,
        features: int = 64,
        beta: float = 1e-3,
        boundary: Boundary = "zeros",
    ) -> None:
        super().__init__()
        _check(tuple(sample_shape), latent, features, beta, boundary)
        channels, height, width = (int(size) for size in sample_shape)
        self.sample_shape, self.latent, self.beta = (channels, height, width), latent, beta
        narrow, wide = features, 2 * features
        smallest = (wide, height // FACTOR, width // FACTOR)

        def same(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            return nn.Sequential(SameConv2d(inputs, outputs, 3, stride=stride, boundary=boundary), nn.GELU())

        def doubling(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(DoublingConv2d(inputs, outputs, boundary=boundary), nn.GELU())

        self.encoder = nn.Sequential(
            *(same(channels, narrow, stride=2), same(narrow, narrow), same(narrow, wide, stride=2)),
            *(same(wide, wide), same(wide, wide, stride=2), nn.Flatten()),
        )
        flat = prod(smallest)
        self.posterior = nn.Linear(flat, 2 * latent)
        self.decoder = nn.Sequential(
            *(nn.Linear(latent, flat), nn.GELU(), nn.Unflatten(1, smallest)),
            *(doubling(wide, wide), same(wide, wide), doubling(wide, narrow), same(narrow, narrow)),
        )
        self.tail = DoublingConv2d(narrow, channels, boundary=boundary)
        self.register_statistics()
        self.apply(_initial_weights)

    # Images to latents and back

    def encode(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """μ and log σ² of q(z | y), each (B, latent), for images y (B, C, H, W) in mirror space."""
        check_shape(y, self.sample_shape)
        return self._posterior(self.standardise(y))

    def decode(self, z: Tensor) -> Tensor:
        """The mean image of z (B, latent), in mirror space: (B, C, H, W)."""
        return self.unstandardise(self._image(z))

    def _posterior(self, u: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(u)
        with full_precision(u):
            return self.posterior(at_least_float32(h)).chunk(2, dim=1)

    def _image(self, z: Tensor) -> Tensor:
        h = self.decoder(z)
        with full_precision(z):
            return self.tail(at_least_float32(h))

    # Learning

    def draw(self, y: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor]:
        """ε (B, latent)."""
        return (torch.randn(len(y), self.latent, generator=generator, device=y.device, dtype=y.dtype),)

    def loss(self, y: Tensor, *draws: Tensor) -> Tensor:
        """Squared error + β KL on images y (B, C, H, W); `draws` is ε (B, latent), drawn here if not given."""
        check_shape(y, self.sample_shape)
        u = self.standardise(y)
        (epsilon,) = draws or self.draw(u)
        mu, log_variance = self._posterior(u)
        with full_precision(u):
            z = mu + (0.5 * log_variance).exp() * epsilon.to(u.dtype)
        error = (self._image(z) - u).square().mean()
        return error + self.beta * kl_to_standard_normal(mu, log_variance).mean()

    # Sampling

    @torch.no_grad()
    def sample(
        self,
        n: int,
        *,
        batch_size: int = 64,
        generator: Seeds = None,
        first: int = 0,
        progress: bool = True,
    ) -> Tensor:
        """`n` samples in mirror space, (n, C, H, W), on the model's device: the mean images of z ~ N(0, I).

        The arguments are those of `Diffusion.sample`; a single pass needs no `progress` bar. z of sample i depends on
        (seed, i) only, so `batch_size` and the number of processes do not change it. Under torchrun every process must
        call this; each makes its share and all get all samples.
        """
        with evaluating(self):
            return sample_in_batches(
                lambda noise: self.decode(noise(0)),
                n,
                self.sample_shape,
                noise_shape=(self.latent,),
                like=at_least_float32(self.mean),
                batch_size=batch_size,
                generator=generator,
                first=first,
            )


def kl_to_standard_normal(mu: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(μ, diag σ²) ‖ N(0, I)) = ½ Σ (μ² + σ² − 1 − log σ²): (B, L), (B, L) -> (B,)."""
    return 0.5 * (mu.square() + torch.expm1(log_variance) - log_variance).sum(1)


def _initial_weights(module: nn.Module) -> None:
    """Normal(0, 1/fan) weights, no bias; with torch's default weights z moves the image by less than a thousandth."""
    if isinstance(module, SameConv2d | DoublingConv2d):
        reached = 9 / 4 if isinstance(module, DoublingConv2d) else 9  # entries of the kernel that meet in one pixel
        fan = module.in_channels * reached
    elif isinstance(module, nn.Linear):
        fan = module.in_features
    else:
        return
    nn.init.normal_(module.weight, std=fan**-0.5)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def _check(shape: tuple[int, ...], latent: int, features: int, beta: float, boundary: str) -> None:
    conditions = [
        ("sample_shape", shape, len(shape) == 3 and min(shape) >= 1, "be three positive sizes (C, H, W)"),
        ("latent", latent, latent >= 1, "be at least 1"),
        ("features", features, features >= 1, "be at least 1"),
        ("beta", beta, isfinite(beta) and beta >= 0, "be a number of at least 0"),
        ("boundary", boundary, boundary in get_args(Boundary), f"be one of {', '.join(get_args(Boundary))}"),
    ]
    for name, value, holds, rule in conditions:
        if not holds:
            raise UsageError(f"VAE: {name} must {rule}, not {value!r}.")
    if shape[1] % FACTOR or shape[2] % FACTOR:
        raise DataError(
            f"a VAE needs height and width divisible by {FACTOR}; sample_shape {shape} has {shape[1]}×{shape[2]}. "
            "Crop or pad the images."
        )
