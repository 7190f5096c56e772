"""`namm import`: a checkpoint of the official code as networks of ours."""  # noqa: N999 - the command's name

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from namm.cli.options import parse
from namm.errors import UsageError

if TYPE_CHECKING:
    from namm.generative import NCSNpp
    from namm.import_flax import OfficialState
    from namm.maps import MirrorMap


@dataclass(frozen=True)
class Import:
    """Turn a checkpoint of the official (JAX) code into networks of ours.

    A map is written as OUT/g and OUT/f, for MirrorMap.load; a score network as OUT/network, for NCSNpp.from_pretrained.
    Sizes are read off the weights; what they do not tell is an option.
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """Legacy flax checkpoint (msgpack): a NAMM state or a score model's."""
    out: Path = Path("imported")
    """Folder to write; what is there already is never overwritten."""
    weights: Literal["published", "ema", "raw"] = "published"
    """Which copy: `published` is what the official sampling uses, g and score EMA, f raw."""
    residual: Literal["paper", "yes", "no"] = "paper"
    """Map: whether f adds its input; in the paper's maps of one channel (galaxies excepted), not in those of two."""
    activation: Literal["paper", "softplus", "sigmoid", "tanh", "none"] = "paper"
    """Map: f's last activation; in the paper softplus for one channel, none for two."""
    strong_convexity: float = 0.9
    """Map: α of g."""
    negative_slope: float = 0.2
    """Map: slope of g's leaky ReLU below zero."""
    height: int | None = None
    """Network: image height; without it what the weights tell, else 64 for one channel and 128 for two."""
    attention: tuple[int, ...] = (16,)
    """Network: heights of feature maps with attention."""


def main(arguments: list[str]) -> None:
    """Import one checkpoint file."""
    if not arguments:
        raise UsageError("which file? namm import FILE --out FOLDER; `namm import --help` lists the options.")
    options = parse(Import, arguments, "namm import")

    from namm.import_flax import read_official, save_official

    state = read_official(options.file)
    network, notes = _map(state, options) if state.kind == "map" else _network(state, options)
    folders = save_official(network, options.out, state, options.weights)
    epoch = "" if state.epoch is None else f", epoch {state.epoch}"
    print(f"imported the {state.kind} of {options.file} ({options.weights} weights{epoch})")
    for line in (*notes, *(f"written to {folder}" for folder in folders)):
        print(f"  {line}")


def _map(state: "OfficialState", options: Import) -> "tuple[MirrorMap, list[str]]":
    """g and f, and what a reader should know of them."""
    from namm.import_flax import official_map

    mirror = official_map(
        state,
        options.weights,
        residual=None if options.residual == "paper" else options.residual == "yes",
        activation=None if options.activation == "paper" else options.activation,
        strong_convexity=options.strong_convexity,
        negative_slope=options.negative_slope,
    )
    return mirror, [_sizes("g", mirror.g), _sizes("f", mirror.f)]


def _network(state: "OfficialState", options: Import) -> "tuple[NCSNpp, list[str]]":
    """The score network, and what a reader should know of it."""
    from namm.import_flax import official_network
    from namm.import_flax.networks import possible_heights

    network = official_network(state, options.weights, height=options.height, attention=options.attention)
    notes = [_sizes("network", network)]
    others = set(possible_heights(state.arrays("params", options.weights), options.attention)) - {network.height}
    if others and options.height is None:
        fits = ", ".join(map(str, sorted(others)))
        notes.append(f"images are taken to be {network.height} high; the weights also fit {fits}: --height chooses")
    return network, notes


def _sizes(name: str, network: Any) -> str:
    """A network's settings and number of weights, on one line."""
    settings = ", ".join(f"{key} {value}" for key, value in network.config.items() if not key.startswith("_"))
    return f"{name}: {sum(p.numel() for p in network.parameters()):,} weights, {settings}"
