"""A generative model of mirror space, seen from data space (paper Sec. 3.2).

    y ~ model,    x = f(y)

With `IdentityMap` this is the model itself. f is computed in float32, whatever the model's precision: it costs little
beside many steps of a network, and rounding what f hands over would break the rule.
"""

from typing import Any

import torch
from torch import Tensor, nn

from namm.generative.base import GenerativeModel, Seeds, evaluating
from namm.maps import Mirror
from namm.numerics import arithmetic

CHUNK = 64  # images mapped at a time


class Mirrored(nn.Module):
    """Samples of `model`, mapped to data space by `mirror`.

    Args:
        model: Draws mirror images y.
        mirror: f and g; only f, `to_data`, is used.
    """

    def __init__(self, model: GenerativeModel, mirror: Mirror) -> None:
        super().__init__()
        self.model, self.mirror = model, mirror

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def sample(self, n: int, *, generator: Seeds = None, **options: Any) -> Tensor:
        """x = f(y), (n, C, H, W); `options` (sampler, batch_size, progress …) are the model's."""
        return self.sample_pairs(n, generator=generator, **options)[0]

    @torch.no_grad()
    def sample_pairs(self, n: int, *, generator: Seeds = None, **options: Any) -> tuple[Tensor, Tensor]:
        """x = f(y) and the y they come from, each (n, C, H, W)."""
        y = self.model.sample(n, generator=generator, **options)
        with evaluating(self):
            return self.to_data(y), y

    def to_data(self, y: Tensor) -> Tensor:
        """f(y), (n, C, H, W), a few images at a time."""
        with arithmetic("fp32", y.device):
            return torch.cat([self.mirror.to_data(chunk) for chunk in y.split(CHUNK)])
