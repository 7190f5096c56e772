"""Images of any model, mended by a map: x̂ = f(g(x)).

The model need not know of the map: what it drew is brought to mirror space by g, and f, which was trained to come back
to the data from errors such as models make, brings it onto the rule. Whether that helped is judged by the same figures
as a run (`namm.evaluation.verdict`), with the images as they were in the place of the baseline.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from namm.constraints import Constraint
from namm.constraints.base import as_rule
from namm.datasets.batches import Images, check_images, map_images, to_tensor
from namm.errors import DataError, NammWarning, UsageError, is_out_of_memory
from namm.evaluation.mmd import read
from namm.evaluation.scores import DistanceSummary, Scores, compare, distance_summary, floor
from namm.evaluation.verdict import CLOSE, GAIN, NEAR_MMD, Figures, Verdict, judge, loses_images
from namm.formatting import format_number, html_table
from namm.generative.base import channel_statistics, evaluating
from namm.maps import Mirror
from namm.progress import ProgressBar

FEW = 16
"""Fewer images than this are measured, but not judged."""
SUBSETS, LARGEST = 10, 1000
"""Random subsets for √MMD², and images in each, where there are as many."""
FAR_MEAN, FAR_SPREAD = 1.5, 1.8
"""Standard deviations between two means, and ratio of two deviations, at which images have another range.

Images in [-1, 1] have twice the deviation of the same images in [0, 1].
"""
CHUNK = 256
"""Images read at a time."""


@dataclass(frozen=True)
class Repaired:
    """Images through g and f, and what that did to them.

    Attributes:
        images: f(g(x)) (N, C, H, W) in float32: a tensor where x is one, else an array.
        before, after: Of x and of f(g(x)): scores against `data`; ℓ alone where there are no data, nothing without a
            rule.
        data: What other real images score, the floor of every figure.
        verdict: On f(g(x)), with x as the baseline; None without data, or where there are too few images to judge.
    """

    images: Tensor | np.ndarray
    before: Scores | DistanceSummary | None = None
    after: Scores | DistanceSummary | None = None
    data: Scores | None = None
    verdict: Verdict | None = None

    def _repr_html_(self) -> str:
        parts = [("before", self.before), ("after", self.after), ("data", self.data), ("verdict", self.verdict)]
        tables = "".join(f"<h4>{name}</h4>{part._repr_html_()}" for name, part in parts if part is not None)
        return html_table("repaired images", [("shape", tuple(self.images.shape))]) + tables


def repair(
    x: Images,
    mirror: Mirror,
    *,
    rule: Constraint | Callable[[Tensor], Tensor] | None = None,
    data: Images | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Repaired:
    """Mend images of any model by a trained map, f(g(x)), in plain float32, and judge the result.

    Args:
        x: Images (N, C, H, W) in the units of the data: a tensor, an array or images on disk, read a few at a time.
        mirror: The map, trained on data that obey the rule.
        rule: ℓ, to be measured before and after.
        data: Real images (M, C, H, W) that no training has seen, to compare with.
        device: Where to compute, and where the map is moved; where it is by default.
        progress: Show a progress bar, where there is a terminal.

    Raises:
        DataError: x is not of the shape that the map was made for, or holds NaN or inf.
        UsageError: Data without a rule.

    Images far from the range that the map was trained on give a `NammWarning`.
    """
    law = None if rule is None else as_rule(rule)
    if law is None and data is not None:
        raise UsageError("repair compares with data by a rule: pass rule=, or leave data= out.")
    place = _place(mirror, x, device)
    with evaluating(mirror) if isinstance(mirror, nn.Module) else nullcontext():
        _check(x, mirror, data, place)
        mapped = _map(x, mirror, place, progress)
    images = torch.from_numpy(mapped).to(x.device) if isinstance(x, Tensor) else mapped
    if law is None:
        return Repaired(images)
    if data is None:
        was, is_now = (distance_summary(law, each, device=place) for each in (x, mapped))
        return Repaired(images, was, is_now)
    lowest = floor(data, law, subsets=SUBSETS, size=subset_size(x, data), device=place)
    before, after = (score(each, data, law, place) for each in (x, mapped))
    return Repaired(images, before, after, lowest, judge_scores(after, before, lowest, data))


# The figures


def subset_size(x: Images, data: Images) -> int:
    """Images in the subsets that √MMD² is measured over; the data are also compared with themselves, in halves."""
    return min(LARGEST, x.shape[0], data.shape[0] // 2)


def score(images: Images, data: Images, rule: Constraint, device: torch.device | None = None) -> Scores:
    """Images against the data, as `repair` measures them."""
    return compare(images, data, rule, subsets=SUBSETS, size=subset_size(images, data), device=device)


def judge_scores(after: Scores, before: Scores, lowest: Scores, data: Images) -> Verdict | None:
    """The verdict on mended images beside the same images as they were; None where there are too few of them."""
    if before.distance.n < FEW or data.shape[0] < 2 * FEW:
        warnings.warn(
            f"{before.distance.n} images and {data.shape[0]} real ones are too few for a verdict: bring at least {FEW} "
            f"and {2 * FEW}.",
            NammWarning,
            stacklevel=3,
        )
        return None
    ours, baseline, real = (Figures.from_row(asdict(each)) for each in (after, before, lowest))
    verdict = judge(ours, baseline, real)
    return verdict if verdict.works else replace(verdict, next_steps=(_next_step(ours, baseline, real),))


def _next_step(ours: Figures, baseline: Figures, real: Figures) -> str:
    """What the symptom calls for: the judge's own advice is about the training of a run."""
    if loses_images(baseline.total_variation, baseline.spread):
        return "train the model that drew these images longer: they had lost the data before they were mended."
    if baseline.distance <= real.distance:
        return "nothing: these images keep the rule as well as the data."
    if ours.distance - real.distance > GAIN * (baseline.distance - real.distance):
        return (
            "train f on these very images first (`namm repair --finetune`, or namm.finetune_map on g(x)), or move them "
            "to the nearest ones on the rule (namm.polish): f has not learned to mend such errors."
        )
    was_off = max(abs(baseline.total_variation - 1), abs(baseline.spread - 1)) > CLOSE
    if was_off and ours.mmd <= NEAR_MMD * baseline.mmd:
        return "train the model that drew these images longer: they resembled the data too little before, too."
    return (
        "move the images as they were to the nearest ones on the rule (namm.polish): the map changes them more than "
        "the rule asks. Was it trained on such data, in these units?"
    )


# The map, and the images that it can take


def _place(mirror: Mirror, x: Images, device: torch.device | str | None) -> torch.device:
    """Where the map is, once moved there where that was asked for; where the images are if it has no weights."""
    here = torch.device(getattr(x, "device", "cpu") if device is None else device)
    if not isinstance(mirror, nn.Module):
        return here
    if device is not None:
        mirror.to(device)
    return next((weight.device for weight in mirror.parameters()), here)


def _map(x: Images, mirror: Mirror, device: torch.device, progress: bool) -> np.ndarray:
    with ProgressBar("repair", x.shape[0], visible=progress) as bar:

        def there_and_back(rows: Tensor) -> Tensor:
            bar.advance(len(rows))
            return mirror.to_data(mirror.to_mirror(rows.float()))

        return map_images(there_and_back, x, device, "f∘g")


def _check(x: Images, mirror: Mirror, data: Images | None, device: torch.device) -> None:
    """Everything that can be wrong with the images, before any is mapped."""
    check_images(x, "the images to repair")
    if data is not None:
        check_images(data, "data")
        if tuple(data.shape[1:]) != tuple(x.shape[1:]):
            raise DataError(
                f"the images to repair are {tuple(x.shape[1:])} and the data {tuple(data.shape[1:])}: a map mends "
                "images of the shape of its data. Resize them, or check the order of their axes (N, C, H, W)."
            )
        if x.shape[0] < 2 or data.shape[0] < 4:
            raise DataError(
                f"{x.shape[0]} images cannot be compared with {data.shape[0]} real ones: at least two and four are "
                "needed. Leave data= out to measure ℓ alone."
            )
    if not all(callable(getattr(mirror, method, None)) for method in ("to_mirror", "to_data")):
        raise UsageError(
            f"a map has to_mirror (g) and to_data (f), and {str(mirror)[:80]!r} has not: pass the mirror of "
            "namm.train_map, namm.Run(folder).mirror or namm.MirrorMap.load(folder)."
        )
    _require_shape(x, mirror, device)
    for start in range(0, x.shape[0], CHUNK):
        read(x, slice(start, start + CHUNK), "images to repair")
    _warn_of_range(x, mirror, data)


def _require_shape(x: Images, mirror: Mirror, device: torch.device) -> None:
    """Refuse images of another shape than the networks were made for, as far as they know it, or that they refuse."""
    given = dict(zip(("channels", "height", "width"), x.shape[1:], strict=True))
    made_for: dict[str, int] = {}
    for network in (getattr(mirror, side, None) for side in ("g", "f")):
        config: Any = getattr(network, "config", {})
        made_for |= {name: config[name] for name in given if name in config}
    if wrong := [f"{given[name]} instead of {n} in {name}" for name, n in made_for.items() if given[name] != n]:
        raise DataError(
            f"the map was made for images of another shape than {tuple(x.shape[1:])}: {', '.join(wrong)}. Resize them, "
            "or check the order of their axes (N, C, H, W)."
        )
    try:
        with torch.no_grad():
            mirror.to_data(mirror.to_mirror(to_tensor(x[:1]).to(device).float()))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"the map cannot take images of shape {tuple(x.shape[1:])} ({error}).") from error


def _warn_of_range(x: Images, mirror: Mirror, data: Images | None) -> None:
    """Warn of images whose channels are far from those that the map knows: its own statistics, else the data's."""
    known: dict[str, list[float]] = getattr(mirror, "standardisation", {})
    if known:
        centre, scale = (torch.tensor(known[name], dtype=torch.float64) for name in ("mean", "scale"))
    elif data is not None:
        centre, scale = channel_statistics(data, tuple(data.shape[1:]))  # type: ignore[arg-type]
    else:
        return
    mean, deviation = channel_statistics(x, tuple(x.shape[1:]))  # type: ignore[arg-type]
    names, slack = ("the images", "the map's data"), 1 if x.shape[0] >= FEW else 2
    difference = another_range(names, (mean, deviation), (centre, scale), slack)
    if difference is not None:
        warnings.warn(
            f"{difference}: the map mends images in the units of its data. Rescale those of a model with another "
            "range, such as [-1, 1], first; if they are rescaled, the model has not learned how bright or varied the "
            "data are.",
            NammWarning,
            stacklevel=4,
        )


def another_range(
    names: tuple[str, str], images: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor], slack: float = 1
) -> str | None:
    """How the first channel of images that are far from those known differs from them; None where none is far.

    Args:
        names: What either kind is called in that phrase.
        images, known: Mean and standard deviation of their channels, (C,) each. A known deviation of 1 also stands for
            a channel that never varies, and is compared with nothing.
        slack: Few images need more: they are not like all.
    """
    (mean, deviation), (centre, scale) = images, known
    ratio = torch.maximum(deviation / scale, scale / deviation)
    off = (mean - centre).abs() > slack * FAR_MEAN * scale
    off |= (ratio > slack * FAR_SPREAD) & (scale != 1)
    off &= scale > 0
    if not off.any():
        return None
    channel = int(off.nonzero()[0])
    has, other = (
        f"{format_number(float(m[channel]))} and {format_number(float(s[channel]))}" for m, s in (images, known)
    )
    return f"channel {channel} of {names[0]} has mean and standard deviation {has}, where {names[1]} have {other}"
