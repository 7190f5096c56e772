"""What was seen of held-out images: the paper's two assimilation tasks, and other observations by name.

    burgers       the first states, 8 of 64 columns in the paper, scaled with the size of the image
    divergence    the first and the last state of a Kolmogorov flow

Truths are images of the split `test`, which no training has seen. Each has a number there, and the noise on its
measurement depends on (seed, number) alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from namm.datasets import open_store
from namm.datasets.readers import map_array
from namm.errors import DataError, UsageError
from namm.experiments.burgers import BurgersData
from namm.experiments.divergence import DivergenceData
from namm.experiments.engine.experiment import Data
from namm.experiments.engine.run_parts import RunParts, Shape
from namm.experiments.engine.stages.data import images_file
from namm.inverse import Columns, Downsample, GaussianBlur, GaussianNoise, Mask, Operator, States
from namm.numerics import generator
from namm.reading import REASON, damage_as

NOISE = 0.2
"""The paper's, as a standard deviation."""
OBSERVATIONS = {
    "columns": "columns:8 (the first eight) or columns:0,5,9",
    "states": "states:first,last or states:0,7",
    "mask": "mask:0.3 (that share of the pixels, at random) or mask:FILE.npy (True where observed)",
    "blur": "blur:1.5 (standard deviation in pixels)",
    "downsample": "downsample:4 (means over blocks)",
}
MASK_SEED = 0


@dataclass(frozen=True, eq=False)
class Task:
    """Held-out images x, `truth` (M, C, H, W), and what was seen of them: m = A(x) + noise, `measurement` (M, …)."""

    observed: str
    """Name of the observation, such as "columns:8"."""
    operator: Operator
    noise: GaussianNoise
    numbers: range
    """Numbers of the truths in the split `test`."""
    truth: Tensor
    measurement: Tensor

    @property
    def measured(self) -> int:
        """Values in a measurement."""
        return self.measurement[0].numel()

    @property
    def truth_chi2(self) -> float:
        """Mean χ² per measured value of the truths themselves: about 1, and what samples should come to."""
        residual = self.measurement - self.operator.cpu()(self.truth)
        return float(self.noise.chi2(residual).mean()) / self.measured


def make_task(trained: RunParts, observed: str | None, std: float, numbers: range, seed: int = 0) -> Task:
    """Observe the truths of these numbers in a run's split `test`, with noise of that standard deviation and seed.

    `observed` names an observation; None is the paper's task for this experiment.
    """
    observed = observed or papers_observation(trained.settings.data)
    operator, noise = named_operator(observed, trained.settings.data, trained.shape), GaussianNoise(std)
    with open_store(images_file(trained.folder("data"))) as store:
        there = store.sizes["test"]
        if not 0 <= numbers.start < numbers.stop <= there:
            raise UsageError(
                f"truths {numbers.start} to {numbers.stop - 1} were asked for, and the run has {there} held-out images "
                f"(data.n_test)."
            )
        truth = store["test"][numbers.start : numbers.stop]
    seen = operator(truth)
    shaken = [noise.sample(row[None], generator(seed, "measurement", k)) for row, k in zip(seen, numbers, strict=True)]
    return Task(observed, operator, noise, numbers, truth, seen + torch.cat(shaken))


def other_numbers(trained: RunParts, taken: range, count: int) -> range:
    """The last `count` images of the split `test`, to choose settings on; refused where they are among `taken`."""
    there = trained.settings.data.sizes["test"]
    if there - count < taken.stop:
        raise UsageError(
            f"{len(taken)} truths to judge by and {count} others to choose settings on were asked for, and the run has "
            f"{there} held-out images (data.n_test)."
        )
    return range(there - count, there)


def papers_observation(data: Data) -> str:
    """What the paper observes of such data."""
    if isinstance(data, BurgersData):
        return f"columns:{max(1, data.size // 8)}"
    if isinstance(data, DivergenceData):
        return "states:first,last"
    raise UsageError(
        "the paper assimilates Burgers' equation and the Kolmogorov flow only: say what was observed of these images "
        f"with --observe. There are {'; '.join(OBSERVATIONS.values())}."
    )


def named_operator(name: str, data: Data, shape: Shape) -> Operator:
    """The operator of that name; refused where it does not fit images of `shape` (C, H, W)."""
    kind, _, value = name.partition(":")
    if kind not in _MAKERS or not value:
        raise UsageError(f"the observation {name!r} is not known. There are {'; '.join(OBSERVATIONS.values())}.")
    try:
        operator = _MAKERS[kind](value, data, shape)
        operator(torch.zeros(1, *shape))
    except ValueError:
        raise UsageError(f"the observation {name!r} cannot be read: write {OBSERVATIONS[kind]}.") from None
    except (UsageError, DataError) as error:
        size = "×".join(map(str, shape))
        raise UsageError(f"the observation {name!r} does not fit the run's images, {size}: {error}") from None
    return operator


def _states(value: str, data: Data, shape: Shape) -> Operator:
    if not isinstance(data, DivergenceData):
        raise UsageError("states are laid out in the images of the Kolmogorov flow only.")
    names = {"first": "0", "last": str(data.rows * data.columns - 1)}
    return States(_numbers(",".join(names.get(each.strip(), each) for each in value.split(","))), data.size)


def _mask(value: str, data: Data, shape: Shape) -> Operator:
    if value.endswith(".npy"):
        with damage_as(UsageError, f"the mask {value} cannot be read ({REASON})."):
            mapped = map_array(Path(value))
            return Mask(torch.from_numpy(np.array(mapped)))
    share = float(value)
    if not 0 < share <= 1:
        raise UsageError(f"the share of the pixels that are observed must lie between 0 and 1, not {value}.")
    drawn = torch.rand(shape[1:], generator=generator(MASK_SEED, "mask"))
    return Mask(drawn <= drawn.flatten().kthvalue(max(1, round(share * drawn.numel()))).values)


def _numbers(value: str) -> Sequence[int]:
    return [int(each) for each in value.split(",")]


_MAKERS: dict[str, Callable[[str, Data, Shape], Operator]] = {
    "columns": lambda value, data, shape: Columns(_numbers(value) if "," in value else range(int(value))),
    "states": _states,
    "mask": _mask,
    "blur": lambda value, data, shape: GaussianBlur(float(value)),
    "downsample": lambda value, data, shape: Downsample(int(value)),
}
