"""Weights as views of one vector: an optimiser that visits hundreds of tensors takes longer than their update does.

Training changes the vector, and networks see their weights change. Between two steps the gradients of the weights are
gathered into that of the vector, where clipping and the optimiser find them. A weight without a gradient counts as one
whose gradient is zero. Whoever else changes a weight meanwhile must do so in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from namm.errors import TrainingError

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
        self._places: list[tuple[int, int, tuple[int, ...]]] = []  # of each weight: which vector, where, its strides
        dtypes = list(dict.fromkeys(weight.dtype for weight in self.weights))
        lengths = [0] * len(dtypes)
        for weight in self.weights:
            k, step = dtypes.index(weight.dtype), max(1, ALIGNMENT // weight.element_size())
            strides = torch.empty_like(weight, device="meta").stride()  # its own if they leave no gaps, else contiguous
            self._places.append((k, lengths[k], strides))
            lengths[k] += -(-weight.numel() // step) * step
        device = self.weights[0].device
        self.vectors = [
            nn.Parameter(torch.zeros(length, dtype=dtype, device=device))
            for dtype, length in zip(dtypes, lengths, strict=True)
        ]
        self._whole_gradients = [torch.zeros_like(vector) for vector in self.vectors]
        for vector, gradient in zip(self.vectors, self._whole_gradients, strict=True):
            vector.grad = gradient
        for weight, own in zip(self.weights, self.views([vector.data for vector in self.vectors]), strict=True):
            own.copy_(weight.data)
            weight.data, weight.grad = own, None
        self._gradients = self.views(self._whole_gradients)
        self._addresses = [weight.data_ptr() for weight in self.weights]

    def views(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """What vectors like these hold for each weight, in its shape."""
        return [
            vectors[k].as_strided(weight.shape, strides, vectors[k].storage_offset() + start)
            for weight, (k, start, strides) in zip(self.weights, self._places, strict=True)
        ]

    @torch.no_grad()
    def gather(self) -> None:
        """Take the gradients of the weights into those of the vectors, as zeros where there are none, and drop them."""
        for whole in self._whole_gradients:
            whole.zero_()  # what lies between weights too: clipping by a norm that is not finite spoils it
        places, gradients = [], []
        for place, weight in zip(self._gradients, self.weights, strict=True):
            if weight.grad is not None:
                places.append(place)
                gradients.append(weight.grad)
                weight.grad = None
        torch._foreach_copy_(places, gradients)

    def require_in_place(self) -> None:
        """Refuse weights that somebody has given other memory: the optimiser would not see them any more."""
        if [weight.data_ptr() for weight in self.weights] != self._addresses:
            raise TrainingError(
                "a weight was replaced during the training, as `weight.data = …` does; change weights in place, for "
                "example with `weight.clamp_(min=0)`."
            )

    def release(self) -> None:
        """Give every weight memory of its own again."""
        for weight in self.weights:
            weight.data = weight.data.clone()
