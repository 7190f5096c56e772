"""What a report shows of mirror space, kept by the stage `evaluate`, so that a report runs no network.

    data       held-out images x
    mirror     g(x)
    sampled    ŷ, what the model in mirror space made

mirror_space.npz holds the first images of each, (K, C, H, W), by that name, and, where the rule could be asked,
`…_distances` (K,) and `…_residuals` (K, C′, H′, W′). f(ŷ) is in the file of samples. Runs of version 0.1 have no such
file.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from namm.constraints import Constraint
from namm.datasets.batches import Images, map_images, to_tensor
from namm.datasets.readers import read_arrays
from namm.errors import RunFolderError
from namm.experiments.engine.rule_facts import FIRST, facts_of, samples_shown
from namm.files import write_atomically
from namm.generative.sample_file import SampleFile
from namm.maps import MirrorMap
from namm.reading import REASON, damage_as
from namm.report.figures.samples import Method

FILE = "mirror_space.npz"
NAMES = {"data": "x", "mirror": "g(x)", "sampled": "ŷ"}
"""What a report calls what is kept."""


def write_mirror_space(
    folder: Path, mirror: MirrorMap, rule: Constraint, images: Images, samples: SampleFile, device: torch.device
) -> None:
    """Keep the first x, g(x) and ŷ in a stage's folder; a rule that fails on some costs its part alone."""
    rows = dict(samples_shown(samples))[FIRST]
    x = to_tensor(images[: len(rows)])
    kept: dict[str, NDArray[Any]] = {
        "data": x.numpy(),
        "mirror": map_images(mirror.to_mirror, x, device, "g"),
        "sampled": samples.mirror_images[rows].numpy(),
    }
    facts = facts_of(rule)
    for name in NAMES:
        y = torch.from_numpy(kept[name]).to(device)
        try:
            with torch.no_grad():
                found = {"distances": rule(y).cpu().numpy(), "residuals": facts.residual_pictures("", y)}
        except Exception:  # mirror images are no images: a user's code may raise anything
            continue
        kept |= {f"{name}_{what}": each for what, each in found.items() if each is not None and np.isfinite(each).all()}
    buffer = io.BytesIO()
    np.savez(buffer, **{name: each.astype(np.float32) for name, each in kept.items()})  # type: ignore[arg-type]
    write_atomically(folder / FILE, buffer.getvalue())


def read_mirror_space(folder: Path) -> tuple[Method, ...]:
    """x, g(x) and ŷ as they were kept; nothing where they were not."""
    if not (folder / FILE).exists():
        return ()
    with damage_as(RunFolderError, f"{folder / FILE} cannot be read ({REASON}): move it away."):
        kept = read_arrays(folder / FILE)
        return tuple(_shown(name, kept) for name in NAMES)


def _shown(name: str, kept: Mapping[str, NDArray[Any]]) -> Method:
    images, like = kept[name], kept["data"]
    distances, residuals = kept.get(f"{name}_distances", np.zeros(0)), kept.get(f"{name}_residuals")
    if images.ndim != 4 or images.shape[1:] != like.shape[1:] or not images.size:
        raise ValueError(f"{name} has the shape {images.shape}")
    if distances.shape not in ((0,), images.shape[:1]):
        raise ValueError(f"{len(images)} images have distances {distances.shape}")
    if residuals is not None and (residuals.ndim != 4 or len(residuals) != len(images) or not residuals.size):
        raise ValueError(f"{len(images)} images have residuals {residuals.shape}")
    for what, each in ((name, images), ("distances", distances), ("residuals", residuals)):
        if each is not None and not (each.dtype.kind == "f" and np.isfinite(each).all()):
            raise ValueError(f"{what} are no finite numbers")
    return Method(NAMES[name], images, distances, distances, residuals)
