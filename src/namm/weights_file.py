"""Weights in a file that says whether it is whole: safetensors, with a digest in its header.

Everything that is not a tensor is JSON in the header, beside the SHA-256 of both. It is compared whenever the file is
read, so that no flipped bit ever becomes a weight. Version 0.1 kept a digest of the tensors alone, as `digest`, and
none at all of models and counters.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from namm.digests import SIGNATURE
from namm.errors import CheckpointError
from namm.files import write_atomically
from namm.reading import reason, require_plain

ENTRY = "namm"
"""The header's one entry: safetensors writes several in any order, and equal content shall have equal bytes."""
OLD_DIGEST = "digest"
LOOKS_LIKE_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
"""In a header where no entry is called a digest, it is one whose name was damaged."""


def write_weights(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and what is known of them, JSON values, to one file, whole or not at all."""
    own = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    header = json.dumps({**about, SIGNATURE: _digest(own, about)})
    write_atomically(path, save(own, metadata={ENTRY: header}))


def read_weights(path: Path, what: str, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_weights` wrote to `path`; trouble with the disk stays an `OSError`.

    Args:
        path: The file.
        what: It is called in errors: "the checkpoint".
        remedy: How they end: what to do.
    """
    if require_plain(path) == 0:
        raise CheckpointError(f"{what} {path} is truncated or not one of ours (it is empty): {remedy}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            about = dict(json.loads(header.get(ENTRY, "{}")))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        kept = {name: about.pop(name) for name in (SIGNATURE, OLD_DIGEST) if name in about}
    except (SafetensorError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{what} {path} is truncated or not one of ours ({reason(error)}): {remedy}") from error
    found = {SIGNATURE: lambda: _digest(tensors, about), OLD_DIGEST: lambda: _digest(tensors)}
    has_lost_digest = not kept and LOOKS_LIKE_DIGEST.search(" ".join(header.values()))
    if has_lost_digest or any(value != found[name]() for name, value in kept.items()):
        raise CheckpointError(f"{what} {path} is corrupt (its content does not match its digest): {remedy}")
    return tensors, about


def require_finite(module: nn.Module, place: str) -> None:
    """Refuse a network, read from `place`, whose parameters are not finite or whose buffers hold NaN."""
    numbers = {name: tensor.isfinite() for name, tensor in module.named_parameters()}
    numbers |= {name: ~tensor.isnan() for name, tensor in module.named_buffers()}
    for name, good in numbers.items():
        if not good.all():
            raise CheckpointError(
                f"{place} holds no usable weights: {int((~good).sum())} of the {good.numel()} numbers in {name} are "
                "not finite. The training that wrote them diverged, or something else made the file: train anew with a "
                "smaller learning rate, or take another file."
            )


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of names, types, shapes and bytes, and of what is known of them."""
    digest = hashlib.sha256(b"" if about is None else json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
