"""Weights as views of one vector: an optimiser that visits hundreds of tensors takes longer than their update does.

Training changes the vector, and networks see their weights change. Between two steps the gradients of the weights are
gathered into that of the vector, where clipping and the optimiser find them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 128
"""Bytes; every weight begins at a multiple, where kernels read memory in wide pieces."""


class FlatWeights:
    """Trained weights, one after the other in one vector for each of their dtypes.

    Each keeps its shape, its layout and, until `release`, a place in the vector, with zeros between it and the next.

    Args:
        weights: All on one device.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = list(weights)
        self.vectors: list[nn.Parameter] = []
        places: dict[nn.Parameter, Tensor] = {}
        for dtype in dict.fromkeys(weight.dtype for weight in self.weights):
            places |= self._join([weight for weight in self.weights if weight.dtype == dtype])
        self._gradients = [places[weight] for weight in self.weights]

    def _join(self, weights: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Make a vector of them; where the gradient of each belongs."""
        step = max(1, ALIGNMENT // weights[0].element_size())
        sizes = [-(-weight.numel() // step) * step for weight in weights]
        vector = nn.Parameter(weights[0].new_zeros(sum(sizes)))
        vector.grad = torch.zeros_like(vector)
        self.vectors.append(vector)
        places = {}
        parts = zip(weights, vector.data.split(sizes), vector.grad.split(sizes), strict=True)
        for weight, values, gradient in parts:
            dense = torch.empty_like(weight)  # strides of its own if they leave no gaps, else contiguous ones
            own = values.as_strided(dense.shape, dense.stride())
            own.copy_(weight.data)
            weight.data, weight.grad = own, None
            places[weight] = gradient.as_strided(dense.shape, dense.stride())
        return places

    @torch.no_grad()
    def gather(self) -> None:
        """Take the gradients of the weights into those of the vectors, as zeros where there are none, and drop them."""
        given = [(place, weight.grad) for place, weight in zip(self._gradients, self.weights, strict=True)]
        torch._foreach_copy_(
            [place for place, gradient in given if gradient is not None],
            [gradient for _, gradient in given if gradient is not None],
        )
        for weight, (place, gradient) in zip(self.weights, given, strict=True):
            weight.grad = None
            if gradient is None:
                place.zero_()

    def release(self) -> None:
        """Give every weight memory of its own again."""
        for weight in self.weights:
            weight.data = weight.data.clone()
