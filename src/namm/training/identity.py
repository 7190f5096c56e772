"""What tells one training from another, short enough to be kept in its folder and compared when it is resumed."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from namm.datasets.batches import Images, to_tensor


def describe_network(network: nn.Module) -> dict[str, Any]:
    """Class, number of parameters and, where it has one, configuration."""
    config = getattr(network, "config", {})
    config = {k: v for k, v in config.items() if not k.startswith("_")} if isinstance(config, Mapping) else {}
    parameters = sum(p.numel() for p in network.parameters())
    return {"class": type(network).__name__, "parameters": parameters, **config}


def name_of(thing: object) -> str:
    """Its name or repr, without an address in memory, which would be another one next time."""
    return re.sub(r" at 0x[0-9a-f]+", "", getattr(thing, "__qualname__", repr(thing)))


def weights_digest(module: nn.Module) -> str:
    """A hash of everything in the state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + raw.numpy().tobytes())
    return digest.hexdigest()[:16]


def fingerprint(images: Images) -> str:
    """Shape and a hash of 64 evenly spread images: enough to notice that the data are others."""
    n = images.shape[0]
    rows = sorted({round(k * (n - 1) / 63) for k in range(64)})
    content = to_tensor(images[rows]).float().cpu().contiguous().numpy().tobytes()
    return f"{tuple(images.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
