"""What a training keeps in its folder: what it is, and checkpoints that survive a crash.

    settings.json            what was asked for; another training never writes here
    metrics.jsonl            one line per `log_every` steps and per validation
    checkpoints/step-*       the last few states, complete with optimiser and all averages
    milestones/step-*        averaged weights along the way
    result.json              steps, images, compute seconds, last losses; written last

A checkpoint is a file of `namm.weights_file`; everything that is not a tensor (step, seconds, losses) is JSON in its
header. It is written to a temporary file, flushed to disk and renamed, so that a reader sees the whole of it or
nothing; a file that is damaged later is known by its digest and passed over for the one before.
"""

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from namm.datasets.batches import Images, to_tensor
from namm.errors import CheckpointError
from namm.weights_file import read_weights, write_weights

PATTERN, DAMAGED = "step-*.safetensors", ".damaged"
"""Names of checkpoints, and the suffix of those that cannot be read and are set aside."""


# What tells one training from another


def describe_network(network: nn.Module) -> dict[str, Any]:
    """Class, number of parameters and, where it has one, configuration."""
    config = getattr(network, "config", {})
    config = {k: v for k, v in config.items() if not k.startswith("_")} if isinstance(config, Mapping) else {}
    parameters = sum(p.numel() for p in network.parameters())
    return {"class": type(network).__name__, "parameters": parameters, **config}


def name_of(thing: object) -> str:
    """The name or repr of an object, without its address in memory, which would be another one next time."""
    return re.sub(r" at 0x[0-9a-f]+", "", getattr(thing, "__qualname__", repr(thing)))


def weights_digest(module: nn.Module) -> str:
    """Hash of all weights and buffers, by name: the same for the same network wherever and whenever it is computed."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + raw.numpy().tobytes())
    return digest.hexdigest()[:16]


def fingerprint(images: Images) -> str:
    """Shape and hash of 64 evenly spread images: enough to notice that the data are others."""
    n = images.shape[0]
    rows = sorted({round(k * (n - 1) / 63) for k in range(64)})
    content = to_tensor(images[rows]).float().cpu().contiguous().numpy().tobytes()
    return f"{tuple(images.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


# Checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name and whatever else describes the moment, as JSON values."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def copy(self) -> "Checkpoint":
        """A copy that later changes of the tensors do not reach."""
        return Checkpoint({name: tensor.detach().clone() for name, tensor in self.tensors.items()}, dict(self.facts))


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint file, atomically."""
    write_weights(path, checkpoint.tensors, {"facts": checkpoint.facts})


def read(path: Path) -> Checkpoint:
    """Read one checkpoint file; a damaged one is a `CheckpointError`, trouble with the disk stays an `OSError`."""
    tensors, about = read_weights(path, "the checkpoint", "look at the disk; without this file, the others are used.")
    if not isinstance(about.get("facts"), dict):
        raise CheckpointError(f"the checkpoint {path} is not one of ours (it holds no facts): delete it.")
    return Checkpoint(tensors, about["facts"])


class CheckpointFolder:
    """The last `keep` checkpoints of a training, named by step."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def paths(self) -> list[Path]:
        """The checkpoint files, oldest first."""
        return sorted(self.folder.glob(PATTERN))

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """Write the checkpoint of `step` and drop the oldest beyond `keep`."""
        path = self.folder / f"step-{step:09d}.safetensors"
        write(path, checkpoint)
        self.prune()
        return path

    def prune(self) -> None:
        """Drop the oldest checkpoints beyond `keep`; a killed process may have left more."""
        for old in self.paths()[: -self.keep]:
            old.unlink()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; a damaged one is reported and the one before it tried."""
        paths = self.paths()
        for path in reversed(paths):
            try:
                return read(path)
            except CheckpointError as error:
                warnings.warn(f"{error} Going back to the one before it.", stacklevel=2)
                path.rename(path.with_suffix(DAMAGED))
        if damaged := list(self.folder.glob(f"{Path(PATTERN).stem}{DAMAGED}")):
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self.folder} can be read: look at the disk, or delete the "
                "folder of the training to start over."
            )
        return None
