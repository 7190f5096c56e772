"""What tells one training from another, short enough to be kept in its folder and compared when it is resumed."""

import hashlib
from typing import Any

from torch import nn

from namm.datasets.batches import Images, to_tensor


def describe_network(network: nn.Module) -> dict[str, Any]:
    """Class, number of parameters and, where it has one, configuration."""
    config = {k: v for k, v in dict(getattr(network, "config", {})).items() if not k.startswith("_")}
    parameters = sum(p.numel() for p in network.parameters())
    return {"class": type(network).__name__, "parameters": parameters, **config}


def weights_digest(module: nn.Module) -> str:
    """A hash of everything in the state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def fingerprint(images: Images) -> str:
    """Shape and a hash of 64 evenly spread images: enough to notice that the data are others."""
    n = images.shape[0]
    rows = sorted({round(k * (n - 1) / 63) for k in range(64)})
    content = to_tensor(images[rows]).cpu().contiguous().numpy().tobytes()
    return f"{tuple(images.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
