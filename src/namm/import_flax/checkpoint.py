"""The authors' checkpoints as networks of ours: g and f from a NAMM state, the score network from an MDM state.

A state holds two copies of all weights: the raw ones, and what the official code calls EMA (a mixture of the last two
raw ones, no running average). `published` takes of each network the copy that the official code itself uses: for g the
EMA, on which its MDM is trained; for f the raw weights, which its sampling applies; for the score the EMA.

Sizes are read off the arrays' shapes. What shapes do not tell (activations, α, image height) is an argument with the
paper's value as default. Optimiser states are passed over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from namm.digests import sha256
from namm.errors import CheckpointError, NammError, UsageError
from namm.files import rename_durably, settle, write_json
from namm.generative import NCSNpp
from namm.import_flax.msgpack_file import read_flax_file
from namm.import_flax.networks import (
    ATTENTION,
    Arrays,
    State,
    count,
    icnn_state,
    ncsnpp_shape,
    ncsnpp_state,
    possible_heights,
    resnet_state,
)
from namm.maps import ICNN, MirrorMap, ResNet
from namm.maps.resnet import Activation

Copy = Literal["published", "ema", "raw"]
PUBLISHED: dict[str, Literal["ema", "raw"]] = {"fwd_params": "ema", "bwd_params": "raw", "params": "ema"}
N = TypeVar("N", bound=nn.Module)
NETWORK = "network"
"""Folder of an imported score network, beside `g` and `f` of an imported map."""


@dataclass(frozen=True)
class OfficialState:
    """The fields of a checkpoint file."""

    path: Path
    fields: Mapping[str, Any]

    @property
    def kind(self) -> Literal["map", "network"]:
        """`map` for a NAMM state, `network` for an MDM or DM state."""
        if any(name in self.fields for name in ("fwd_params", "bwd_params", "fwd_params_ema", "bwd_params_ema")):
            return "map"
        if any(name in self.fields for name in ("params", "params_ema")):
            return "network"
        names = ", ".join(sorted(self.fields)) or "none"
        raise CheckpointError(
            f"{self.path} is neither a NAMM state (fwd_params, bwd_params) nor a score model's (params); its fields "
            f"are: {names}."
        )

    @property
    def epoch(self) -> int | None:
        """Epochs trained, where the file says so."""
        epoch = self.fields.get("epoch")
        return int(epoch) if isinstance(epoch, int | np.generic | np.ndarray) and np.size(epoch) == 1 else None

    def arrays(self, network: str, copy: Copy) -> dict[str, np.ndarray]:
        """One copy of one network's weights, by flax path; `network` is `fwd_params`, `bwd_params` or `params`."""
        kind = "network" if network == "params" else "map"
        if self.kind != kind:
            raise CheckpointError(f"{self.path} holds a {self.kind}, not a {kind}.")
        which = PUBLISHED[network] if copy == "published" else copy
        field = f"{network}_ema" if which == "ema" else network
        if not isinstance(self.fields.get(field), dict) or not self.fields[field]:
            raise CheckpointError(
                f"{self.path} has no weights in the field {field!r}; is it a complete {self.kind} state?"
            )
        arrays = _flatten(self.fields[field])
        for name, array in arrays.items():
            real = isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size > 0
            if not real or not np.isfinite(array).all():
                raise CheckpointError(f"{self.path}: {field}/{name} is not an array of finite real numbers.")
        return arrays


def read_official(path: str | Path) -> OfficialState:
    """Read a legacy flax checkpoint of the official code."""
    return OfficialState(Path(path), read_flax_file(Path(path)))


def official_map(
    state: OfficialState,
    weights: Copy = "published",
    *,
    residual: bool | None = None,
    activation: Activation | None = None,
    strong_convexity: float = 0.9,
    negative_slope: float = 0.2,
) -> MirrorMap:
    """g and f of a NAMM state, in evaluation mode.

    Args:
        state: What `read_official` read.
        weights: Which copy to take.
        residual: Whether f adds its input. Default: yes for one channel, no for more, as in the paper's maps for
            64×64 images and for velocities; its map for galaxies has no.
        activation: Last activation of f. Default: softplus for one channel, none for more.
        strong_convexity: α of g.
        negative_slope: Slope of g's leaky ReLU.
    """
    forward, backward = state.arrays("fwd_params", weights), state.arrays("bwd_params", weights)
    with _checked(state.path, "g"):
        size, _, filters, channels = forward["final_conv2d/kernel"].shape
        build_g = partial(ICNN, channels, count(forward, "wz"), filters, size, strong_convexity, negative_slope)
        g = _filled(build_g, lambda _: icnn_state(forward), forward)
    with _checked(state.path, "f"):
        channels, filters = backward["Conv_0/kernel"].shape[2:]
        build_f = partial(
            ResNet,
            channels=channels,
            filters=filters,
            blocks=count(backward, "ResNetBlock"),
            downsamplings=count(backward, "ConvTranspose"),
            residual=channels == 1 if residual is None else residual,
            activation=activation or ("softplus" if channels == 1 else "none"),
        )
        f = _filled(build_f, lambda _: resnet_state(backward), backward)
    return MirrorMap(g, f).eval()


def official_network(
    state: OfficialState, weights: Copy = "published", *, height: int | None = None, attention: Sequence[int] = (16,)
) -> NCSNpp:
    """The score network of an MDM or DM state, in evaluation mode; it rescales its input as the published one does.

    Args:
        state: What `read_official` read.
        weights: Which copy to take.
        height: Image height, which decides where attention sits. Default: what the shapes allow, and among several the
            paper's: 64 for one channel, 128 for more.
        attention: Heights of feature maps with attention.
    """
    arrays = state.arrays("params", weights)
    with _checked(state.path, "the score network"):
        shape = ncsnpp_shape(arrays)
        if count(arrays, ATTENTION) == 1:
            attention = ()
        shape["height"] = _height(state.path, arrays, shape["channels"], attention, height)
        build = partial(NCSNpp, attention=list(attention), rescale_input=True, reference_frequencies=True, **shape)
        return _filled(build, lambda network: ncsnpp_state(arrays, network), arrays).eval()


def save_official(network: MirrorMap | NCSNpp, folder: str | Path, state: OfficialState, weights: Copy) -> list[Path]:
    """Write an imported map as `folder/g` and `folder/f`, a score network as `folder/network`, and where it came from.

    Existing folders are never overwritten; a map and a score network may share one.
    """
    folder = Path(folder)
    names = ["g", "f"] if isinstance(network, MirrorMap) else [NETWORK]
    taken = [folder / name for name in names if (folder / name).exists()]
    if taken:
        raise UsageError(f"{taken[0]} exists already and is not overwritten: choose another folder for --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".import-") as unfinished:
            if isinstance(network, MirrorMap):
                network.save(unfinished)
            else:
                network.save_pretrained(Path(unfinished) / NETWORK)
                settle((Path(unfinished) / NETWORK).iterdir())
            for name in names:
                rename_durably(Path(unfinished) / name, folder / name)
        source = {"file": state.path.name, "sha256": sha256(state.path), "epoch": state.epoch, "weights": weights}
        write_json(folder / f"imported-{state.kind}.json", source)
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be written ({error.strerror or error}).") from error
    return [folder / name for name in names]


def _height(path: Path, arrays: Arrays, channels: int, attention: Sequence[int], height: int | None) -> int:
    """An image height at which attention falls where the arrays have it."""
    chosen = height or (64 if channels == 1 else 128)
    possible = possible_heights(arrays, attention) if attention else [chosen]
    if chosen in possible:
        return chosen
    if possible and height is None:
        return possible[0]
    fits = " or ".join(map(str, possible)) or "no height at all"
    raise UsageError(
        f"{path}: with attention at height {', '.join(map(str, attention))} these weights fit images {fits} high, not "
        f"{chosen}; give --height and --attention as they were in training."
    )


def _filled(build: Callable[[], N], convert: Callable[[N], State], arrays: Arrays) -> N:
    """Build a network and load its converted weights, none left over.

    A few small arrays can ask for a huge network: the shapes are compared before it gets any memory.
    """
    with torch.device("meta"):
        outline = build()
    state = convert(outline)
    for name, expected in outline.state_dict().items():
        if name not in state:
            raise ValueError(f"nothing gives the weights {name}")
        if state[name].shape != expected.shape:
            raise ValueError(f"{name} should have shape {list(expected.shape)} and has {list(state[name].shape)}")
    given, used = sum(array.size for array in arrays.values()), sum(tensor.numel() for tensor in state.values())
    if given != used:
        raise ValueError(f"of its {given} weights only {used} have a place in the network")
    network = build()
    network.load_state_dict(state)
    return network


@contextmanager
def _checked(path: Path, what: str) -> Iterator[None]:
    """Turn what goes wrong with arrays of unexpected names or shapes into a `CheckpointError`."""
    try:
        yield
    except NammError:
        raise
    except Exception as error:  # whatever arrays of wrong names, types and shapes lead to
        why = f"the array {error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: {what} is not a network of the official code: {why}.") from error


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested maps by slash-joined path."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= _flatten(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves
