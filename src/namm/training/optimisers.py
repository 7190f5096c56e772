"""The optimisers of a training: Adam, AdamW and Muon, on weights that lie in a few vectors (`FlatWeights`).

With the gradient G of a weight W, the rate η and the decay λ (`weight_decay`):

    adam     W ← W − η m̂ / (√v̂ + ε),                m, v: moving averages of G and G² with β₁, β₂
    adamw    W ← (1 − η λ) W, then Adam's step      decay besides the gradient, not in it (Loshchilov and Hutter, 2019)
    muon     M ← μ M + (1 − μ) G                    momentum, μ = 0.95
             D = μ M + (1 − μ) G                    Nesterov's: where the momentum will be
             W ← (1 − η λ) W − η s O(D)             O(U Σ Vᵀ) ≈ U Vᵀ: all directions of D move alike (Jordan, 2024)

Of a matrix of r × c, U Vᵀ has entries of root mean square 1/√max(r, c). With s = 0.2 √max(r, c) (Liu et al., 2025) an
update is then as large as one of Adam's usually is: rates and decays of AdamW serve for Muon as they are.

O comes from five Newton–Schulz iterations, products of matrices only:

    X ← D / ‖D‖_F,   then five times   A = X Xᵀ,  X ← a X + (b A + c A²) X,   (a, b, c) = (3.4445, −4.7750, 2.0315)

Each takes every singular value σ of X to a σ + b σ³ + c σ⁵ and leaves the singular vectors. Values above 0.0015 ‖D‖_F
end between 0.68 and 1.21: the coefficients are made to lift small ones fast, not to converge.

Which weights are matrices. That of a linear layer or a convolution (out × in × window, flattened to out × rest) with at
least 16 channels on either side. Layers that read or write images usually have fewer; they, biases, gains, embeddings
and parameters that belong to no such layer are updated as by AdamW. Decay is for weights of two axes or more: biases
and gains have none.

All matrices of one shape lie in one vector and are made orthogonal by one batched product. These products, and every
update, come after the part of a step that is recorded as a CUDA graph (`Trainer._gradients`): the rate, a number of
Python's, is another one in every step. Processes that share a batch have the same gradients, and each makes the same
update by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from namm.errors import UsageError
from namm.numerics import at_least_float32, uses_bf16
from namm.training.settings import TrainSettings
from namm.training.state import FlatWeights

MOMENTUM = 0.95
"""μ of Muon."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
LEAST_NORM = 1e-12
"""Norm from which on a matrix is made orthogonal; gradients of zero stay zero."""
RMS = 0.2
"""Root mean square of the entries of Muon's updates, in units of the rate."""
SMALLEST = 16
"""Channels that a matrix has at least on either side."""


@dataclass(frozen=True)
class Kind:
    """How a weight is updated. Weights of one kind share a vector.

    Attributes:
        decay: λ.
        matrix: Rows and columns of a weight that Muon updates; None for all others.
    """

    decay: float = 0.0
    matrix: tuple[int, int] | None = None


def kinds(settings: TrainSettings, module: nn.Module, weights: Sequence[nn.Parameter]) -> list[Kind]:
    """The kind of each of the `weights` of `module`."""
    if settings.optimiser == "adam":
        return [Kind()] * len(weights)
    inner = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear | _ConvNd)}
    found = []
    for weight in weights:
        orthogonal = settings.optimiser == "muon" and id(weight) in inner and is_matrix(weight)
        shape = (len(weight), weight[0].numel()) if orthogonal else None
        found.append(Kind(settings.weight_decay if weight.ndim > 1 else 0.0, shape))
    if settings.optimiser == "muon" and not any(kind.matrix for kind in found):
        raise UsageError(
            f"muon has nothing to work on: no linear layer or convolution that is trained has at least {SMALLEST} "
            "channels on either side. Take the optimiser adamw, or a wider network."
        )
    return found


def is_matrix(weight: Tensor) -> bool:
    """Whether a layer's weight is wide enough on either side, and lies row by row in memory."""
    return min(weight.shape[:2]) >= SMALLEST and weight.stride(0) == weight[0].numel()


def build(settings: TrainSettings, flat: FlatWeights, device: torch.device) -> list[torch.optim.Optimizer]:
    """The optimisers that together update all of `flat`, whose weights have the kinds of `kinds`."""
    rates: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas}
    if settings.optimiser == "adam":
        return [torch.optim.Adam(flat.vectors, **rates, fused=True)]
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for vector, kind, count in zip(flat.vectors, flat.kinds, flat.counts, strict=True):
        assert isinstance(kind, Kind)
        group = {"params": [vector], "weight_decay": kind.decay}
        if kind.matrix is None:
            others.append(group)
        else:
            matrices.append({**group, "shape": (count, *kind.matrix)})
    half = device.type == "cuda" and uses_bf16(settings.precision, device)
    muon = [Muon(matrices, settings.learning_rate, torch.bfloat16 if half else torch.float32)] if matrices else []
    adamw = [torch.optim.AdamW(others, **rates, fused=True)] if others else []
    return [*muon, *adamw]


class Muon(torch.optim.Optimizer):
    """Momentum that is made orthogonal, for vectors of matrices.

    Args:
        groups: One vector each, as `params`; `shape`, (n, rows, columns) of the matrices that lie in it at equal
            distances, and `weight_decay`.
        lr: η, which may be changed in the `param_groups`.
        dtype: The iterations' precision; vectors in float64 keep theirs.
    """

    MOMENTS = ("momentum",)

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, dtype: torch.dtype) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices from the gradients of their vectors."""
        vectors = [group["params"][0] for group in self.param_groups]
        gradients = [vector.grad for vector in vectors]
        for vector in vectors:
            if "momentum" not in self.state[vector]:
                self.state[vector]["momentum"] = torch.zeros_like(vector)
        momenta = [self.state[vector]["momentum"] for vector in vectors]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        torch._foreach_mul_(vectors, [1 - group["lr"] * group["weight_decay"] for group in self.param_groups])
        for group, vector, direction in zip(self.param_groups, vectors, directions, strict=True):
            shape = group["shape"]
            update = orthogonalised(matrices_in(direction, shape), self.dtype)
            matrices_in(vector, shape).sub_(update, alpha=group["lr"] * RMS * max(shape[1:]) ** 0.5)


def matrices_in(vector: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The n matrices in a vector, at equal distances, as a view (n, rows, columns)."""
    n, rows, columns = shape
    return vector.view(n, -1)[:, : rows * columns].unflatten(1, (rows, columns))


def orthogonalised(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """U Vᵀ of each matrix U Σ Vᵀ, roughly: (n, rows, columns) -> the same, in `dtype` or float64."""
    x = at_least_float32(matrices)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(LEAST_NORM)
    if x.dtype == torch.float32:
        x = x.to(dtype)
    flat = x.shape[1] <= x.shape[2]
    x = x if flat else x.mT  # the smaller product of the two
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if flat else x.mT
