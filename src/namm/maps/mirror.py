"""The pair of maps: g from data to mirror space, f back (paper Sec. 3.1).

`MirrorMap` joins any two networks that keep the image shape; `IdentityMap` has the same two methods and does nothing,
so that a model on plain data is the special case of a mirrored one.
"""

import json
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from torch import Tensor, nn

from namm.errors import CheckpointError, UsageError
from namm.maps.icnn import ICNN
from namm.maps.resnet import ResNet
from namm.numerics import at_least_float32

NETWORKS: dict[str, type[ICNN] | type[ResNet]] = {"ICNN": ICNN, "ResNet": ResNet}


@runtime_checkable
class Mirror(Protocol):
    """What a generative model needs of a map: the way there and the way back."""

    def to_mirror(self, x: Tensor) -> Tensor:
        """g."""

    def to_data(self, y: Tensor) -> Tensor:
        """f."""


class MirrorMap(nn.Module):
    """g and f as one module.

    Args:
        g: Forward map, data (B, C, H, W) to mirror space; `ICNN` in the paper, a residual `ResNet` in its ablation.
        f: Inverse map, mirror space to data; `ResNet` in the paper.
    """

    def __init__(self, g: nn.Module, f: nn.Module) -> None:
        super().__init__()
        self.g = g
        self.f = f

    def to_mirror(self, x: Tensor) -> Tensor:
        """y = g(x)."""
        y: Tensor = self.g(x)
        return y

    def to_data(self, y: Tensor) -> Tensor:
        """x = f(y)."""
        x: Tensor = self.f(y)
        return x

    @property
    def can_save(self) -> bool:
        """Whether both networks are of a kind that `load` can build again."""
        return all(isinstance(network, tuple(NETWORKS.values())) for network in (self.g, self.f))

    def save(self, folder: str | Path) -> None:
        """Write `folder/g` and `folder/f`, each weights as safetensors and a JSON config."""
        for side, network in (("g", self.g), ("f", self.f)):
            if not isinstance(network, tuple(NETWORKS.values())):
                raise UsageError(
                    f"{side} is a {type(network).__name__}; only {' and '.join(NETWORKS)} save themselves. "
                    "Save its state_dict with safetensors instead."
                )
            network.save_pretrained(Path(folder) / side)  # type: ignore[operator]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote, in evaluation mode."""
        return cls(*(_load_network(Path(folder) / side) for side in ("g", "f"))).eval()


class IdentityMap(nn.Module):
    """Mirror space is data space; has no weights."""

    def to_mirror(self, x: Tensor) -> Tensor:
        """x itself, in float32 or better."""
        return at_least_float32(x)

    def to_data(self, y: Tensor) -> Tensor:
        """y itself, in float32 or better."""
        return at_least_float32(y)


def _load_network(folder: Path) -> nn.Module:
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{config} does not exist: {folder.parent} is not a saved mirror map.")
    try:
        name = json.loads(config.read_text()).get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{config} cannot be read ({error}): save the map anew.") from error
    if name not in NETWORKS:
        raise CheckpointError(f"{config} names the network {name!r}; known are {', '.join(NETWORKS)}.")
    try:
        network: nn.Module = NETWORKS[name].from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded as a {name}: {error}") from error
    return network
