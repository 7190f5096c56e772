"""The inverse mirror map f: the generator of CycleGAN (paper Sec. 3.1 and App. D.1).

    head (7×7) → downsamplings (3×3, stride 2) → residual blocks → upsamplings → tail (7×7) → [+ input] → [activation]

Beyond the published network: no normalisation, periodic boundaries, and a skip that adds the head's features to the
tail's input, so that fine detail need not pass through the low-resolution middle. Whatever autocast does inside, the
tail, the residual addition and the activation run in float32 or better, because the constraint distances we want are
smaller than the rounding of bfloat16; and so does the head where its features reach the tail directly.
"""

from itertools import pairwise
from typing import Literal, get_args

import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.maps.layers import Boundary, DoublingConv2d, FirstConv2d, InstanceNorm2d, LastConv2d, SameConv2d
from namm.numerics import at_least_float32, full_precision

Normalisation = Literal["instance", "none"]
Activation = Literal["softplus", "sigmoid", "tanh", "none"]

ACTIVATIONS = {"softplus": F.softplus, "sigmoid": F.sigmoid, "tanh": F.tanh, "none": lambda x: x}


class ResidualBlock(nn.Module):
    """x + norm(conv(dropout(relu(norm(conv(x))))))."""

    def __init__(self, width: int, normalisation: Normalisation, dropout: float, boundary: Boundary) -> None:
        super().__init__()
        self.conv0 = SameConv2d(width, width, 3, boundary=boundary)
        self.norm0 = _norm(width, normalisation)
        self.dropout = nn.Dropout(dropout)
        self.conv1 = SameConv2d(width, width, 3, boundary=boundary)
        self.norm1 = _norm(width, normalisation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, W, H', W') -> the same shape."""
        h = F.relu(self.norm0(self.conv0(x)))
        return x + self.norm1(self.conv1(self.dropout(h)))


class ResNet(ModelMixin, ConfigMixin):
    """CycleGAN's generator with options; input and output have the same shape.

    Args:
        channels: Image channels C.
        filters: Channels after the head; doubled by every downsampling.
        blocks: Residual blocks at the lowest resolution.
        downsamplings: Number of halvings; height and width must be divisible by 2 to that power.
        normalisation: `instance` (the paper) or `none`.
        dropout: Probability inside the residual blocks, in training only.
        residual: Add the input to the output, before the activation.
        skip: Add the head's features to the tail's input.
        activation: Last activation: `softplus`, `sigmoid`, `tanh` or `none`.
        boundary: `zeros` (the paper), `circular`, or `cylinder`, where only the top meets the bottom.
    """

    @register_to_config
    def __init__(
        self,
        channels: int = 1,
        filters: int = 64,
        blocks: int = 6,
        downsamplings: int = 2,
        normalisation: Normalisation = "instance",
        dropout: float = 0.5,
        residual: bool = True,
        skip: bool = False,
        activation: Activation = "softplus",
        boundary: Boundary = "zeros",
    ) -> None:
        super().__init__()
        _validate(channels, filters, blocks, downsamplings, dropout)
        _one_of("normalisation", normalisation, ("instance", "none"))
        _one_of("activation", activation, tuple(ACTIVATIONS))
        _one_of("boundary", boundary, get_args(Boundary))
        self.channels, self.downsamplings = channels, downsamplings
        self.residual, self.skip, self.activation = residual, skip, ACTIVATIONS[activation]
        widths = [filters * 2**level for level in range(downsamplings + 1)]

        def stage(layer: nn.Module, width: int) -> nn.Sequential:
            return nn.Sequential(layer, _norm(width, normalisation), nn.ReLU())

        self.head = stage(FirstConv2d(channels, filters, 7, boundary=boundary), filters)
        self.down = nn.Sequential(
            *(stage(SameConv2d(a, b, 3, stride=2, boundary=boundary), b) for a, b in pairwise(widths))
        )
        self.middle = nn.Sequential(
            *(ResidualBlock(widths[-1], normalisation, dropout, boundary) for _ in range(blocks))
        )
        self.up = nn.Sequential(
            *(stage(DoublingConv2d(b, a, boundary=boundary), a) for a, b in reversed(list(pairwise(widths))))
        )
        self.tail = LastConv2d(filters, channels, 7, boundary=boundary)
        if normalisation == "instance":
            self.apply(_cyclegan_weights)  # without a norm weights this small fade the signal out: torch's own stay

    def forward(self, x: Tensor) -> Tensor:
        """f(x): (B, C, H, W) -> (B, C, H, W)."""
        self.check_size(x.shape)
        x = x.to(self.tail.weight.dtype)
        if self.skip:
            with full_precision(x):
                head = self.head(x)
        else:
            head = self.head(x)
        h = self.up(self.middle(self.down(head)))
        with full_precision(x):
            out = self.tail(at_least_float32(h) + head if self.skip else at_least_float32(h))
            if self.residual:
                out = out + at_least_float32(x)
            return self.activation(out)

    def check_size(self, shape: tuple[int, ...]) -> None:
        """Refuse a shape that this network cannot map to itself."""
        if len(shape) != 4 or shape[1] != self.channels:
            raise DataError(f"this ResNet takes images (B, {self.channels}, H, W); it was given {tuple(shape)}.")
        factor = 2**self.downsamplings
        if shape[2] % factor or shape[3] % factor:
            raise DataError(
                f"a ResNet with {self.downsamplings} downsamplings needs height and width divisible by {factor}; "
                f"these images are {shape[2]}×{shape[3]}. Crop or pad them, or choose fewer downsamplings."
            )
        if min(shape[2:]) < max(2 * factor, 4):
            raise DataError(
                f"images of {shape[2]}×{shape[3]} are too small for a ResNet with {self.downsamplings} downsamplings; "
                f"it needs at least {max(2 * factor, 4)} pixels a side."
            )


def _cyclegan_weights(module: nn.Module) -> None:
    """Normal(0, 0.02) weights, no bias."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _norm(width: int, normalisation: Normalisation) -> nn.Module:
    return InstanceNorm2d(width, eps=1e-6, affine=True) if normalisation == "instance" else nn.Identity()


def _validate(channels: int, filters: int, blocks: int, downsamplings: int, dropout: float) -> None:
    for name, value, least in (
        ("channels", channels, 1),
        ("filters", filters, 1),
        ("blocks", blocks, 0),
        ("downsamplings", downsamplings, 0),
    ):
        if value < least:
            raise UsageError(f"ResNet: {name} must be at least {least}, not {value}.")
    if not 0 <= dropout < 1:
        raise UsageError(f"ResNet: dropout must lie in [0, 1), not {dropout}.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"ResNet: {name} must be one of {', '.join(allowed)}, not {value!r}.")
