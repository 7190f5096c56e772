"""Checkpoints that survive a crash: one file each, complete or absent, checked when read.

A checkpoint is a safetensors file; everything that is not a tensor (step, seconds, losses) is JSON in its header,
beside a digest of the tensors. It is written to a temporary file, flushed to disk and renamed, so that a reader sees
the whole of it or nothing; a file that is damaged later is known by its digest and passed over for the one before.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from namm.errors import CheckpointError
from namm.files import write_atomically

PATTERN = "step-*.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name and whatever else describes the moment, as JSON values."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def copy(self) -> "Checkpoint":
        """One that later changes of the tensors do not reach."""
        return Checkpoint({name: tensor.detach().clone() for name, tensor in self.tensors.items()}, dict(self.facts))


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint file, atomically."""
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.tensors.items()
    }
    header = json.dumps({"facts": checkpoint.facts, "digest": _digest(tensors)})
    # One entry, because safetensors writes several in any order, and equal checkpoints shall have equal bytes.
    write_atomically(path, save(tensors, metadata={"namm": header}))


def read(path: Path) -> Checkpoint:
    """Read one checkpoint file; a damaged one is a `CheckpointError`, trouble with the disk stays an `OSError`."""
    if path.stat().st_size == 0:
        raise CheckpointError(f"the checkpoint {path} is truncated or not one of ours (it is empty).")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["namm"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts, digest = header["facts"], header["digest"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} is truncated or not one of ours ({error}).") from error
    if digest != _digest(tensors):
        raise CheckpointError(f"the checkpoint {path} is corrupt: its content does not match its digest.")
    return Checkpoint(tensors, facts)


class CheckpointFolder:
    """The last `keep` checkpoints of a training, named by step."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob(PATTERN))

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """Write the checkpoint of `step` and drop the oldest beyond `keep`."""
        path = self.folder / f"step-{step:09d}.safetensors"
        write(path, checkpoint)
        for old in self.paths()[: -self.keep]:
            old.unlink()
        return path

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; a damaged one is reported and the one before it tried."""
        paths = self.paths()
        for path in reversed(paths):
            try:
                return read(path)
            except CheckpointError as error:
                warnings.warn(f"{error} Going back to the one before it.", stacklevel=2)
                path.rename(path.with_suffix(".damaged"))
        if paths:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be read: look at the disk, or delete the "
                "folder of the training to start over."
            )
        return None


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
