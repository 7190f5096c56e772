"""The forward mirror map g: gradient of a strongly convex, input-convex network (paper Sec. 3.1).

The potential is a convolutional network of L layers that is convex in x, because every weight that acts on a hidden
state is non-negative and every activation convex and non-decreasing (λ is a leaky ReLU, ⋆ a correlation on the torus):

    z₀ = λ(a₀),   a₀ = (Q₀ ⋆ x)² + R₀ ⋆ x + b₀
    z_l = λ(a_l),  a_l = W_l ⋆ z_{l−1} + (Q_l ⋆ x)² + R_l ⋆ x + b_l          l = 1 … L,  W_l ≥ 0
    P(x) = Σ_pixels,channels (V ⋆ z_L) / (width · channels)                    V ≥ 0

    g(x) = (1 − α) ∇P(x) + α x,   so that   ⟨g(a) − g(b), a − b⟩ ≥ α ‖a − b‖².

∇P is written out, not asked of autograd. On the torus Σ_pixels V ⋆ z = v · Σ_pixels z, v the sums of V's kernels, so

    δ_L = λ'(a_L) v / (width · channels),     δ_{l−1} = λ'(a_{l−1}) (W_lᵀ ⋆ δ_l),
    ∇P  = Σ_l Q_lᵀ ⋆ (2 (Q_l ⋆ x) δ_l) + R_lᵀ ⋆ δ_l.

All products with x are one matrix product over k×k neighbourhoods, all products back to x another. The division by
width · channels, and not by the number of pixels, is the published normalisation: trained weights depend on it. b
enters g only through the step function λ', whose derivative is zero almost everywhere, so b is not trained.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from namm.errors import DataError, UsageError
from namm.maps.layers import circular_conv2d, circular_conv2d_transpose
from namm.numerics import full_precision


class ICNN(ModelMixin, ConfigMixin):
    """g(x) = (1 − α) ∇P(x) + α x, in the weights' own precision whatever autocast says.

    Args:
        channels: Image channels C.
        layers: Hidden layers L; the network has L + 1 activations.
        filters: Channels F of every hidden state.
        kernel_size: Odd width k of every kernel; boundaries are periodic.
        strong_convexity: α in (0, 1].
        negative_slope: Slope of the leaky ReLU below zero, in [0, 1].
    """

    @register_to_config
    def __init__(
        self,
        channels: int = 1,
        layers: int = 3,
        filters: int = 32,
        kernel_size: int = 3,
        strong_convexity: float = 0.9,
        negative_slope: float = 0.2,
    ) -> None:
        super().__init__()
        _validate(channels, layers, filters, kernel_size, strong_convexity, negative_slope)
        self.strong_convexity = strong_convexity
        self.negative_slope = negative_slope
        self.kernel_size = kernel_size
        k = kernel_size
        self.quadratic = nn.Parameter(torch.empty((layers + 1) * filters, channels, k, k))
        self.linear = nn.Parameter(torch.empty((layers + 1) * filters, channels, k, k))
        self.bias = nn.Parameter(torch.zeros((layers + 1) * filters), requires_grad=False)
        self.hidden = nn.Parameter(torch.empty(layers, filters, filters, k, k))
        self.output = nn.Parameter(torch.empty(channels, filters, k, k))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Free kernels LeCun normal, non-negative kernels U(0, 1e-3), bias zero."""
        fan_in = self.quadratic[0].numel()
        for free in (self.quadratic, self.linear):
            nn.init.normal_(free, std=fan_in**-0.5)
        for non_negative in (self.hidden, self.output):
            nn.init.uniform_(non_negative, 0.0, 1e-3)
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def project_weights(self) -> None:
        """Set negative entries of the kernels that must not be negative to zero; to be called after every update."""
        self.hidden.clamp_(min=0)
        self.output.clamp_(min=0)

    def forward(self, x: Tensor) -> Tensor:
        """g(x): (B, C, H, W) -> (B, C, H, W)."""
        x = x.to(self.quadratic.dtype)
        return torch.lerp(self.potential_gradient(x), x, self.strong_convexity)

    def potential(self, x: Tensor) -> Tensor:
        """P(x): (B, C, H, W) -> (B,)."""
        x = x.to(self.quadratic.dtype)
        with full_precision(x):
            quadratic, linear = self._input_products(x)
            z = F.leaky_relu(self._states(quadratic, linear)[-1], self.negative_slope)
            return circular_conv2d(z, self.output).sum((1, 2, 3)) / (x.shape[-1] * x.shape[1])

    def potential_gradient(self, x: Tensor) -> Tensor:
        """∇P(x): (B, C, H, W) -> (B, C, H, W)."""
        x = x.to(self.quadratic.dtype)
        with full_precision(x):
            quadratic, linear = self._input_products(x)
            deltas = self._deltas(self._states(quadratic, linear), scale=x.shape[-1] * x.shape[1])
            back = torch.cat([2 * quadratic * deltas, deltas], dim=1)
            return overlap_add(F.conv_transpose2d(back, self._input_weight()), self.kernel_size)

    def _input_products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Q_l ⋆ x and R_l ⋆ x of all layers side by side: twice (B, (L + 1) F, H, W)."""
        self._check(x)
        quadratic, linear = F.conv2d(neighbourhoods(x, self.kernel_size), self._input_weight()).chunk(2, dim=1)
        return quadratic, linear

    def _states(self, quadratic: Tensor, linear: Tensor) -> list[Tensor]:
        """[a₀ … a_L], each (B, F, H, W)."""
        from_input = (quadratic.square() + linear + self.bias[:, None, None]).chunk(len(self.hidden) + 1, dim=1)
        states = [from_input[0]]
        for kernel, term in zip(self.hidden, from_input[1:], strict=True):
            states.append(circular_conv2d(F.leaky_relu(states[-1], self.negative_slope), kernel) + term)
        return states

    def _deltas(self, states: list[Tensor], scale: float) -> Tensor:
        """[δ₀ … δ_L] side by side: (B, (L + 1) F, H, W)."""
        above, below = (
            states[0].new_ones(()),
            states[0].new_full((), self.negative_slope),
        )  # numbers would be float32
        slopes = [torch.where(a > 0, above, below) for a in states]
        deltas = [slopes[-1] * (self.output.sum((0, 2, 3)) / scale)[:, None, None]]
        for kernel, slope in zip(reversed(list(self.hidden)), reversed(slopes[:-1]), strict=True):
            deltas.append(slope * circular_conv2d_transpose(deltas[-1], kernel))
        return torch.cat(deltas[::-1], dim=1)

    def _input_weight(self) -> Tensor:
        """Q and R as one 1×1 kernel over neighbourhoods: (2 (L + 1) F, k² C, 1, 1)."""
        both = torch.cat([self.quadratic, self.linear])
        return both.permute(0, 2, 3, 1).flatten(1)[..., None, None]

    def _check(self, x: Tensor) -> None:
        channels = self.output.shape[0]
        if x.ndim != 4 or x.shape[1] != channels:
            raise DataError(f"this ICNN takes images (B, {channels}, H, W); it was given {tuple(x.shape)}.")
        if min(x.shape[-2:]) < self.kernel_size:
            raise DataError(
                f"images of {x.shape[-2]}×{x.shape[-1]} are smaller than the kernel ({self.kernel_size}); "
                "use larger images or a smaller kernel_size."
            )


def project_weights(network: nn.Module) -> Callable[[], None]:
    """What to call after every update of `network`: the ICNNs in it set their negative weights back to zero."""
    icnns = [module for module in network.modules() if isinstance(module, ICNN)]

    def project() -> None:
        for icnn in icnns:
            icnn.project_weights()

    return project


def neighbourhoods(x: Tensor, k: int) -> Tensor:
    """The k×k neighbours of every pixel on the torus: (B, C, H, W) -> (B, k² C, H, W)."""
    return torch.cat([x.roll(shift, dims=(-2, -1)) for shift in _shifts(k)], dim=1)


def overlap_add(u: Tensor, k: int) -> Tensor:
    """Adjoint of `neighbourhoods`: (B, k² C, H, W) -> (B, C, H, W)."""
    parts = u.chunk(k * k, dim=1)
    rolled = [part.roll((-i, -j), dims=(-2, -1)) for part, (i, j) in zip(parts, _shifts(k), strict=True)]
    return torch.stack(rolled).sum(0)


def _shifts(k: int) -> list[tuple[int, int]]:
    reach = k // 2
    return [(reach - i, reach - j) for i in range(k) for j in range(k)]


def _validate(channels: int, layers: int, filters: int, k: int, alpha: float, slope: float) -> None:
    for name, value in (("channels", channels), ("layers", layers), ("filters", filters), ("kernel_size", k)):
        if value < 1:
            raise UsageError(f"ICNN: {name} must be at least 1, not {value}.")
    if k % 2 == 0:
        raise UsageError(f"ICNN: kernel_size must be odd so that a pixel has a centre, not {k}.")
    if not 0 < alpha <= 1:
        raise UsageError(f"ICNN: strong_convexity must lie in (0, 1], not {alpha}.")
    if not 0 <= slope <= 1:
        raise UsageError(f"ICNN: negative_slope must lie in [0, 1] for the network to be convex, not {slope}.")
