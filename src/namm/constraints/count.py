"""A number of objects, as a network counts them.

    ℓ(x) = |CNN(x) − c|

The network is a regression: two 3×3 convolutions, each with ReLU and 2×2 average pooling, then two dense layers. It is
trained once on images whose number of objects is known (`namm.training.counter`) and frozen. What it cannot tell apart
is the floor of the rule: data that hold exactly c objects have the mean distance that the counter errs by, and no
generator needs to go below it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from namm.constraints.base import Constraint
from namm.constraints.contract import ConstraintReport, StoredImages, finite_number
from namm.errors import CheckpointError, DataError, UsageError
from namm.numerics import at_least_float32, full_precision
from namm.reading import REASON, damage_as
from namm.weights_file import read_weights, require_finite, write_weights


class Counter(nn.Module):
    """Counts objects: images (B, channels, size, size) → real numbers (B,).

    `size` is a multiple of 4; the two convolutions have `filters`, the hidden dense layer `width` outputs.
    """

    def __init__(self, size: int = 128, channels: int = 1, filters: Sequence[int] = (32, 64), width: int = 256) -> None:
        super().__init__()
        if size < 4 or size % 4:
            raise UsageError(f"a Counter halves its images twice, so their size must be a multiple of 4, not {size}.")
        self.config: dict[str, Any] = {"size": size, "channels": channels, "filters": list(filters), "width": width}
        self.facts: dict[str, Any] = {}
        """What is known of it, as JSON values: how it was trained, how well it counts. Kept in its file."""
        self.first = nn.Conv2d(channels, filters[0], 3, padding=1)
        self.second = nn.Conv2d(filters[0], filters[1], 3, padding=1)
        self.hidden = nn.Linear(filters[1] * (size // 4) ** 2, width)
        self.number = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """How many objects each image holds: (B, C, H, W) → (B,)."""
        features = self.features(x)
        # A step of Adam moves every weight alike: unscaled, it would move a sum of thousands of them too far.
        pixels = features.shape[2:].numel()
        return self.number(self.hidden(features.flatten(1) / pixels).relu()).squeeze(1)

    def features(self, x: Tensor) -> Tensor:
        """What the convolutions see: (B, C, H, W) → (B, filters[1], H/4, W/4)."""
        c, size = self.config["channels"], self.config["size"]
        if x.ndim != 4 or tuple(x.shape[1:]) != (c, size, size):
            raise DataError(f"this counter was made for images (B, {c}, {size}, {size}), not {tuple(x.shape)}.")
        x = x.to(self.number.weight.dtype)
        for convolution in (self.first, self.second):
            x = functional.avg_pool2d(convolution(x).relu(), 2)
        return x

    def save(self, path: str | Path) -> None:
        """Write weights, sizes and facts to one safetensors file, whole or not at all."""
        write_weights(Path(path), self.state_dict(), {"counter": self.config, "facts": self.facts})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The counter that `save` wrote, on the CPU and in evaluation mode."""
        path = Path(path)
        if not path.exists():
            raise CheckpointError(
                f"there is no counter {path}: train one with `namm train counter -o counter.safetensors`."
            )
        with damage_as(CheckpointError, f"{path} is truncated or not a counter that namm saved ({REASON})."):
            tensors, about = read_weights(path, "the counter", "copy it anew, or delete it and train it again.")
            with torch.device("meta"):  # the header may ask for any size: memory is for weights that are there
                counter = cls(**about["counter"])
            counter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
            counter.facts = dict(about["facts"])
        require_finite(counter, str(path))
        return counter.eval()


class Count(Constraint):
    """ℓ(x) = |counter(x) − count|.

    Args:
        counter: A trained `Counter`, or any network from images (B, C, H, W) to numbers (B,). It is frozen, in place.
        count: Objects that every image must hold; 8 in the paper.
    """

    def __init__(self, counter: nn.Module, count: float = 8) -> None:
        super().__init__()
        number = finite_number(count)
        if number is None or number < 0 or not isinstance(counter, nn.Module):
            raise UsageError(f"Count needs a network and a number of objects ≥ 0, got {counter!r} and {count!r}.")
        self.counter = counter.requires_grad_(False).eval()
        self.count: float = number

    def distance(self, x: Tensor) -> Tensor:
        """|counter(x) − count|: (B, C, H, W) → (B,)."""
        return (self.counter(x) - self.count).abs()

    def residual(self, x: Tensor) -> Tensor:
        """Objects too many, negative for too few: (B, C, H, W) → (B, 1, 1, 1), which broadcasts against x."""
        x = at_least_float32(x)
        with full_precision(x):
            return cast(Tensor, self.counter(x) - self.count).reshape(-1, 1, 1, 1)

    def check(self, x: Tensor | StoredImages, *, batch_size: int = 256, noise: float = 0.1) -> "CountReport":
        """Measure the rule on data; the floor, which is the counter's own error, is judged against the count."""
        return CountReport(**asdict(super().check(x, batch_size=batch_size, noise=noise)), count=self.count)

    def train(self, mode: bool = True) -> Self:
        """Training mode for whatever holds this rule; the counter stays as it was trained."""
        super().train(mode)
        self.counter.eval()
        return self

    def extra_repr(self) -> str:
        """The count, for `repr`."""
        return f"count={self.count:g}"

    def __repr__(self) -> str:
        return f"Count({self.extra_repr()})"


@dataclass(frozen=True)
class CountReport(ConstraintReport):
    """What `Count.check` measured. Counters err on good data and may not notice noise: the count is the yardstick."""

    RATIO: ClassVar[str] = "floor / count: the counter's own error on good data"

    count: float = 0.0

    @property
    def floor_ratio(self) -> float:
        """Mean miscount over the count."""
        return self.mean / max(self.count, 1.0)

    def require_obeyed(self, limit: float = 0.1) -> ConstraintReport:
        """The report itself where the mean miscount is at most `limit` times the count; else a `DataError`."""
        if self.floor_ratio <= limit:
            return self
        raise DataError(
            f"the data break the constraint {self.name}: the counter is off {self.count:g} by {self.mean:.3g} on "
            f"average over {self.n} images, by {self.max:.3g} at image {self.worst}; "
            f"{limit * max(self.count, 1):.3g} is allowed. Count other objects, or train the counter on images like "
            "these, and longer."
        )
