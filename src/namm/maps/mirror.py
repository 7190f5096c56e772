"""The pair of maps: g from data to mirror space, f back (paper Sec. 3.1).

`MirrorMap` joins any two networks that keep the image shape; `IdentityMap` has the same two methods and does nothing,
so that a model on plain data is the special case of a mirrored one. The networks see images standardised per channel,
u = (x − mean) / scale, so that mirror space is in standard deviations of the data; mean 0 and scale 1, which change
nothing, are those of the paper:

    to_mirror(x) = g((x − mean) / scale),     to_data(y) = mean + scale f(y)
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from namm.digests import require_sealed, require_signed, seal, signed
from namm.errors import CheckpointError, UsageError
from namm.files import write_json
from namm.maps.icnn import ICNN
from namm.maps.resnet import ResNet
from namm.maps.rulenet import RuleNet
from namm.numerics import at_least_float32
from namm.reading import REASON, damage_as, load_json, require_plain
from namm.weights_file import require_finite

NETWORKS: dict[str, type[ICNN] | type[ResNet] | type[RuleNet]] = {"ICNN": ICNN, "ResNet": ResNet, "RuleNet": RuleNet}
CONFIG, STATISTICS = "config.json", "standardisation.json"
"""File of a network's configuration; file of mean and scale beside the networks, where they have any."""
WEIGHTS = "diffusion_pytorch_model.safetensors"
"""What diffusers calls the file of a network's weights."""
REMEDY = (
    "copy it anew, or delete the map's folder: the command that trained it writes it again, from its last checkpoint."
)
DEPTHS, DEEPEST = {"layers", "blocks", "downsamplings"}, 256
"""Settings that repeat a part of a network, and how often that is believed of a file."""


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
        f: Inverse map, mirror space to data; `ResNet` in the paper, `RuleNet` for rules of any reach.
        mean: Mean of each image channel, or 0 for all.
        scale: Standard deviation of each image channel, or 1 for all.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, g: nn.Module, f: nn.Module, mean: Sequence[float] | None = None, scale: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.g = g
        self.f = f
        self.register_buffer("mean", torch.zeros(1, 1, 1), persistent=False)
        self.register_buffer("scale", torch.ones(1, 1, 1), persistent=False)
        if (mean is None) != (scale is None):
            raise UsageError("a standardisation needs both mean and scale.")
        if mean is not None and scale is not None:
            self.standardise_by(torch.tensor(mean), torch.tensor(scale))

    def standardise_by(self, mean: Tensor, scale: Tensor) -> Self:
        """Let the networks see (x − mean) / scale; both (C,)."""
        if not (torch.isfinite(mean).all() and torch.isfinite(scale).all() and (scale > 0).all()):
            raise UsageError(f"a standardisation needs finite means and positive scales, not {mean} and {scale}.")
        self.mean, self.scale = (each.float().reshape(-1, 1, 1).to(self.mean.device) for each in (mean, scale))
        return self

    @property
    def standardisation(self) -> dict[str, list[float]]:
        """Mean and scale as plain numbers; empty where they change nothing."""
        if bool((self.mean == 0).all() and (self.scale == 1).all()):
            return {}
        return {"mean": self.mean.flatten().tolist(), "scale": self.scale.flatten().tolist()}

    def standardise(self, x: Tensor) -> Tensor:
        """(x − mean) / scale, in float32 or better."""
        x = at_least_float32(x)
        return (x - self.mean.to(x.dtype)) / self.scale.to(x.dtype)

    def unstandardise(self, u: Tensor) -> Tensor:
        """mean + scale u, in float32 or better."""
        u = at_least_float32(u)
        return self.mean.to(u.dtype) + self.scale.to(u.dtype) * u

    def to_mirror(self, x: Tensor) -> Tensor:
        """y = g((x − mean) / scale)."""
        y: Tensor = self.g(self.standardise(x))
        return y

    def to_data(self, y: Tensor) -> Tensor:
        """x = mean + scale f(y)."""
        return self.unstandardise(self.f(y))

    def repair(self, x: Tensor) -> Tensor:
        """f(g(x)): images of any model, mended by the map."""
        return self.to_data(self.to_mirror(x))

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
                    "Save its state_dict with safetensors instead, and `standardisation` with it."
                )
            network.save_pretrained(Path(folder) / side)  # type: ignore[operator]
            forget_origin(Path(folder) / side / CONFIG)
            seal(Path(folder) / side)
        (Path(folder) / STATISTICS).unlink(missing_ok=True)
        if self.standardisation:
            write_json(Path(folder) / STATISTICS, signed(self.standardisation))

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote, in evaluation mode."""
        g, f = (_load_network(Path(folder) / side) for side in ("g", "f"))
        return cls(g, f, **_load_statistics(Path(folder) / STATISTICS)).eval()


class IdentityMap(nn.Module):
    """Mirror space is data space; has no weights."""

    def to_mirror(self, x: Tensor) -> Tensor:
        """x itself, in float32 or better."""
        return at_least_float32(x)

    def to_data(self, y: Tensor) -> Tensor:
        """y itself, in float32 or better."""
        return at_least_float32(y)


def _built(folder: Path, kind: type[ICNN] | type[ResNet] | type[RuleNet]) -> nn.Module:
    """The network of a configuration and of the weights beside it, where each asks for exactly the other.

    A network is built before its weights are read: a few digits in its configuration can ask for all memory, or for
    layers without end. And weights that a file lacks would be left undefined. diffusers' own reader is not asked: it
    prefers an index, where there is one, that may name any file.
    """
    config = {name: value for name, value in kind.load_config(folder).items() if not name.startswith("_")}
    for name in DEPTHS & config.keys():
        if not isinstance(config[name], int) or config[name] > DEEPEST:
            raise ValueError(f"{name} is {config[name]}, and at most {DEEPEST} is believed")
    with torch.device("meta"):  # without memory
        outline: Any = kind.from_config(config)
    asked = {name: list(tensor.shape) for name, tensor in outline.state_dict().items()}
    require_plain(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        there = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if wrong := sorted(name for name in asked.keys() | there.keys() if asked.get(name) != there.get(name)):
        name = wrong[0]
        raise ValueError(
            f"its configuration asks for {name} of shape {asked.get(name)}, and its file has {there.get(name)}"
        )
    with torch.random.fork_rng(devices=[]):  # nobody's random numbers depend on what was read
        network: nn.Module = kind.from_config(config)
    network.load_state_dict(load_file(folder / WEIGHTS))
    return network.eval()


def _load_statistics(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with damage_as(CheckpointError, f"{path} cannot be read ({REASON}): save the map anew."):
        values = require_signed(path, load_json(path), REMEDY, CheckpointError)
        if set(values) != {"mean", "scale"}:
            raise ValueError(f"it holds {', '.join(sorted(map(str, values)))[:80]}")
        found = {name: [float(each) for each in values[name]] for name in ("mean", "scale")}
        if len(found["mean"]) != len(found["scale"]) or not all(map(math.isfinite, found["mean"] + found["scale"])):
            raise ValueError("mean and scale must be finite numbers, as many of each")
        return found


def _load_network(folder: Path) -> nn.Module:
    config = folder / CONFIG
    if not config.is_file():
        raise CheckpointError(f"{config} does not exist: {folder.parent} is not a saved mirror map.")
    with damage_as(CheckpointError, f"{config} cannot be read ({REASON}): save the map anew."):
        name = load_json(config).get("_class_name")
    if not isinstance(name, str) or name not in NETWORKS:
        raise CheckpointError(f"{config} names the network {name!r}; known are {', '.join(NETWORKS)}.")
    require_sealed(folder, REMEDY)
    with damage_as(CheckpointError, f"{folder} cannot be loaded as a {name}: {REASON}."):
        network = _built(folder, NETWORKS[name])
    require_finite(network, str(folder))
    return network


def forget_origin(config: Path) -> None:
    """Drop from a network's config where on this machine it was read from: that is nobody else's business."""
    content = json.loads(config.read_text())
    if content.pop("_name_or_path", None):
        write_json(config, content)
