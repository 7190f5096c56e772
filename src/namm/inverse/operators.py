"""What an instrument sees of an image: m = A(x) + n.

An `Operator` A maps images (B, C, H, W) to measurements (B, …), image by image, and is differentiable. A measurement
holds observed values and nothing else: a pixel that was not observed is absent, not zero. Operators compose,
(a @ b)(x) = a(b(x)), as long as b gives images:

    A = Columns(range(8)) @ GaussianBlur(1.5)

For a linear operator autograd gives the adjoint: ∇ₓ⟨A x, m⟩ = Aᵀ m.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.maps.layers import WRAPPED, Boundary
from namm.numerics import at_least_float32, full_precision
from namm.simulators.fluid import cut

REACH = 6  # standard deviations after which a Gaussian is zero in float32


class Operator(nn.Module, ABC):
    """A measurement process without its noise. Subclasses write `measure`."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor:
            """A(x), as `forward` computes it."""

    @abstractmethod
    def measure(self, x: Tensor) -> Tensor:
        """A(x): images (B, C, H, W) in float32 or float64 to measurements (B, …), differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        """A(x): (B, C, H, W) → (B, …), computed with autocast off, in float32 or better."""
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
            raise DataError(f"{self.name} needs floating-point images (B, C, H, W), not {_kind(x)}.")
        x = at_least_float32(x)
        with full_precision(x):
            measurement = self.measure(x)
        if not isinstance(measurement, Tensor) or measurement.ndim < 2 or len(measurement) != len(x):
            raise UsageError(
                f"{self.name} must return a tensor (B, …) with one measurement for each of {len(x)} images, not "
                f"{_kind(measurement)}."
            )
        return at_least_float32(measurement)

    def pixels(self, shape: tuple[int, ...]) -> Tensor | None:
        """Which pixel of an image `shape` (C, H, W) each measured value is, counted along the flat image.

        None where measured values are not single pixels.
        """
        return None

    @property
    def name(self) -> str:
        """What errors call this operator."""
        return type(self).__name__

    def __matmul__(self, other: object) -> Composition:
        if not isinstance(other, Operator):
            return NotImplemented
        return Composition(self, other)


class Composition(Operator):
    """(a @ b)(x) = a(b(x)); b must give images."""

    def __init__(self, outer: Operator, inner: Operator) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner

    def measure(self, x: Tensor) -> Tensor:
        """a(b(x))."""
        return self.outer(self.inner(x))

    def pixels(self, shape: tuple[int, ...]) -> Tensor | None:
        """The pixels that b picks of the image and a of those."""
        inner = self.inner.pixels(shape)
        outer = None if inner is None or inner.ndim != 3 else self.outer.pixels(tuple(inner.shape))
        return None if inner is None or outer is None else inner.flatten()[outer]

    @property
    def name(self) -> str:
        """Both names, the outer one first."""
        return f"{self.outer.name} @ {self.inner.name}"


class PixelOperator(Operator):
    """An operator whose values are pixels of the image, each at most once."""

    def pixels(self, shape: tuple[int, ...]) -> Tensor | None:
        """What is measured of an image whose pixels are their own numbers."""
        device = next((buffer.device for buffer in self.buffers()), torch.device("cpu"))
        numbers = torch.arange(math.prod(shape), dtype=torch.double, device=device).reshape(1, *shape)
        return self.measure(numbers)[0].long().cpu()


class Mask(PixelOperator):
    """The observed pixels as one vector, for inpainting: (B, C, H, W) → (B, number of True in the mask).

    `mask` is True where observed, (C, H, W), or (H, W) for all channels alike.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool or mask.ndim not in (2, 3) or not mask.any():
            raise UsageError(
                f"Mask needs booleans (H, W) or (C, H, W), at least one of them True, not {_kind(mask)} with "
                f"{int(mask.count_nonzero())} non-zero."
            )
        self.register_buffer("mask", mask)

    def measure(self, x: Tensor) -> Tensor:
        """The pixels under the mask, in the order of the image."""
        return x[:, self._fitted(x.shape[1:])]

    def fill(self, measurement: Tensor, shape: Sequence[int], value: float = math.nan) -> Tensor:
        """Images of `shape` (C, H, W) with the measurement (B, m) in its place and `value` elsewhere: to look at."""
        mask = self._fitted(shape)
        images = measurement.new_full((len(measurement), *shape), value)
        images[:, mask] = measurement
        return images

    def _fitted(self, shape: Sequence[int]) -> Tensor:
        if tuple(self.mask.shape) != tuple(shape)[-self.mask.ndim :]:
            raise DataError(f"a mask of shape {tuple(self.mask.shape)} does not fit images (C, H, W) = {tuple(shape)}.")
        return self.mask.expand(*shape)


class Columns(PixelOperator):
    """Some columns, such as the first states of a trajectory, `range(8)`: (B, C, H, W) → (B, C, H, columns)."""

    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.columns = _indices(columns, "Columns")

    def measure(self, x: Tensor) -> Tensor:
        """x[..., columns]."""
        return x[..., _within(self.columns, x.shape[-1], "columns")]


class States(PixelOperator):
    """Some of the states laid out side by side in an image: (B, C, r·n, c·n) → (B, number of states, C, n, n).

    Args:
        states: Their numbers, row by row from 0; `(0, 7)` are the first and the last of eight.
        size: Points n along a side of a state.
    """

    def __init__(self, states: Sequence[int], size: int) -> None:
        super().__init__()
        self.states, self.size = _indices(states, "States"), size

    def measure(self, x: Tensor) -> Tensor:
        """The states, in the order asked for."""
        _require_multiple(x, self.size, self.name)
        every = cut(x, self.size).flatten(1, 2)
        return every[:, _within(self.states, every.shape[1], "states")]


class GaussianBlur(Operator):
    """Convolution with a Gaussian of unit sum, exact to rounding at any width: (B, C, H, W) → (B, C, H, W).

    Args:
        std: Standard deviation in pixels.
        boundary: `circular` (the default: images are periodic, and the sum of the pixels is kept), `zeros` (nothing
            comes from outside, so the image darkens towards its edge), or `cylinder`, where the top meets the bottom.
    """

    def __init__(self, std: float, boundary: Boundary = "circular") -> None:
        super().__init__()
        if not 0 < std < math.inf:
            raise UsageError(f"GaussianBlur: std must be positive and finite, not {std}.")
        if boundary not in (names := get_args(Boundary)):
            raise UsageError(f"GaussianBlur: boundary must be one of {', '.join(names)}, not {boundary!r}.")
        self.std, self.boundary = std, boundary

    def measure(self, x: Tensor) -> Tensor:
        """K x Kᵀ, one matrix K for each axis: any width fits any image."""
        rows, columns = (self._matrix(axis, x) for axis in (-2, -1))
        return rows @ x @ columns.mT

    def _matrix(self, axis: int, like: Tensor) -> Tensor:
        """K[i, j] = exp(−(i − j)²/2σ²)/Σ, over all periods where the axis has some: (size, size)."""
        size, reach = like.shape[axis], math.ceil(REACH * self.std)
        offsets = torch.arange(-reach, reach + 1, device=like.device)
        weights = torch.softmax(-(offsets.to(like.dtype) / self.std).square() / 2, 0)
        here = torch.arange(size, device=like.device)[:, None]
        there = here + offsets
        inside = (there >= 0) & (there < size) | (axis in WRAPPED[self.boundary])
        rows = here.expand_as(there)[inside], there[inside] % size
        return like.new_zeros(size, size).index_put(rows, weights.expand(size, -1)[inside], accumulate=True)


class Downsample(Operator):
    """The mean over blocks of `factor` by `factor` pixels: (B, C, H, W) → (B, C, H/factor, W/factor)."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        if factor < 1:
            raise UsageError(f"Downsample: factor must be at least 1, not {factor}.")
        self.factor = factor

    def measure(self, x: Tensor) -> Tensor:
        """The means."""
        _require_multiple(x, self.factor, self.name)
        return F.avg_pool2d(x, self.factor)


class Linear(Operator):
    """A `matrix` (m, C·H·W) on the flattened image: (B, C, H, W) → (B, m)."""

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        matrix = torch.as_tensor(matrix)
        if matrix.ndim != 2 or not matrix.is_floating_point() or not matrix.isfinite().all():
            raise UsageError(f"Linear needs a matrix of finite floating-point numbers (m, C·H·W), not {_kind(matrix)}.")
        self.register_buffer("matrix", matrix)

    def measure(self, x: Tensor) -> Tensor:
        """The matrix times each image."""
        pixels = x.flatten(1)
        if pixels.shape[1] != self.matrix.shape[1]:
            raise DataError(
                f"a matrix of {self.matrix.shape[1]} columns does not fit images of {pixels.shape[1]} values, "
                f"(C, H, W) = {tuple(x.shape[1:])}."
            )
        return pixels @ self.matrix.to(x.dtype).mT


class FunctionOperator(Operator):
    """An operator made by `operator` from a function."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        if not callable(fn):
            raise UsageError(f"operator needs a function (B, C, H, W) → (B, …), not {fn!r}.")
        self.fn = fn

    def measure(self, x: Tensor) -> Tensor:
        """fn(x)."""
        return self.fn(x)

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.fn, "__name__", type(self.fn).__name__))


def operator(fn: Callable[[Tensor], Tensor]) -> FunctionOperator:
    """Turn a differentiable function (B, C, H, W) → (B, …) into an `Operator`; a decorator too."""
    return FunctionOperator(fn)


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _indices(numbers: Sequence[int], kind: str) -> list[int]:
    chosen = [int(number) for number in numbers]
    if not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen):
        raise UsageError(f"{kind} needs at least one number, none negative and none twice, not {chosen}.")
    return chosen


def _within(chosen: list[int], size: int, kind: str) -> list[int]:
    if max(chosen) >= size:
        raise DataError(f"{kind} up to {max(chosen)} were asked for, and the image has {kind} 0 to {size - 1}.")
    return chosen


def _require_multiple(x: Tensor, size: int, name: str) -> None:
    if size < 1 or x.shape[-2] % size or x.shape[-1] % size:
        raise DataError(
            f"{name} needs a height and width divisible by {size}, and the images have {x.shape[-2]}×{x.shape[-1]}."
        )
