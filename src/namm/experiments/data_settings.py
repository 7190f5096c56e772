"""The numbers of the data and of the rule they obey, as plain values; imports no torch.

The rule is not a setting of its own. It is derived from the data's (`data.rule`), so that data and rule agree by
construction: whoever changes Δt changes it for the simulator and for ℓ.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from namm.errors import UsageError

PLACE = {"place": True}
"""Marks a setting that says where a thing is, and not which: the thing may move, and nothing is done again."""

# The rules


@dataclass(frozen=True)
class Rule:
    """The numbers of a constraint."""


@dataclass(frozen=True)
class FluxRule(Rule):
    """All pixels add up to `total`."""

    total: float = 120.0
    """Sum of all pixels."""


@dataclass(frozen=True)
class BurgersRule(Rule):
    """Every column follows from the one before by Burgers' equation."""

    dt: float = 0.025
    """Inner time step Δt."""
    inner_steps: int = 5
    """Inner steps between neighbouring columns."""
    nu: float = 0.05
    """Viscosity ν."""
    length: float = 10.0
    """Distance between the first and the last grid point."""
    flipped: bool = True
    """Whether row 0 is the largest x."""
    step: Literal["crank-nicolson", "euler"] = "crank-nicolson"
    """The scheme that the images must follow."""


@dataclass(frozen=True)
class DivergenceRule(Rule):
    """The velocity's divergence on the staggered grid is zero."""

    extent: float = 2 * math.pi
    """Side of the periodic domain."""
    size: int = 64
    """Grid points along a side of one state; an image holds several states side by side."""


@dataclass(frozen=True)
class PeriodicRule(Rule):
    """The image is copies of one unit cell."""

    tiles: int = 2
    """Copies along a side."""
    across: int | None = None
    """Copies from left to right, where that is another number than from top to bottom."""


@dataclass(frozen=True)
class CountRule(Rule):
    """A counting network sees `count` objects."""

    count: int = 8
    """Objects in an image."""
    counter: str = ""
    """File of the counting network, as `namm train counter` writes it; that of a run is in its stage `data`."""


@dataclass(frozen=True)
class OwnRule(Rule):
    """One of the user's own."""

    constraint: str = ""
    """`module:name` of a function (B, C, H, W) -> (B,) or of a namm.Constraint."""
    folder: str = field(default="", metadata=PLACE)
    """Where the module was imported from."""
    source: str = ""
    """Hash of the module's source."""


# The data


@dataclass(frozen=True)
class Data(ABC):
    """How many images, and what they are drawn from."""

    n_train: int = 10_000
    """Images to train on."""
    n_val: int = 1000
    """Held-out images to watch the training with."""
    n_test: int = 10_000
    """Held-out images to evaluate with."""
    seed: int = 0
    """Image i of a split depends on this seed, the split and i alone."""

    def __post_init__(self) -> None:
        for name, n in self.sizes.items():
            if n < 0:
                raise UsageError(f"n_{name} must be 0 or more, not {n}.")
        if not any(self.sizes.values()):
            raise UsageError("n_train, n_val and n_test are all 0: ask for some images.")

    @property
    def sizes(self) -> dict[str, int]:
        """Images per split."""
        return {"train": self.n_train, "val": self.n_val, "test": self.n_test}

    @property
    def is_counted(self) -> bool:
        """Whether the numbers of images are known; those of the user's own file are not before it is opened."""
        return True

    @property
    def recipe(self) -> dict[str, Any]:
        """What shapes an image besides the seed."""
        common = {f.name for f in fields(Data)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """The rule that these data obey."""


@dataclass(frozen=True)
class FluxData(Data):
    """Images of black holes, scaled to one total brightness."""

    n_train: int = 100_000
    n_val: int = 100
    size: int = 64
    """Pixels along a side."""
    total: float = 120.0
    """Sum of all pixels."""

    @property
    def rule(self) -> FluxRule:
        """The same total."""
        return FluxRule(total=self.total)


@dataclass(frozen=True)
class BurgersData(Data):
    """Trajectories of Burgers' equation: rows are space, columns time."""

    size: int = 64
    """Grid points, and columns."""
    dt: float = 0.025
    """Inner time step Δt."""
    inner_steps: int = 5
    """Inner steps between neighbouring columns."""
    nu: float = 0.05
    """Viscosity ν."""
    length: float = 10.0
    """Distance between the first and the last grid point."""
    correlation_length: float = 0.2
    """Of the initial states, on [−1, 1]."""
    flipped: bool = True
    """Whether row 0 is the largest x, as in the paper's images."""

    @property
    def rule(self) -> BurgersRule:
        """The same equation, grid and orientation."""
        return BurgersRule(
            dt=self.dt, inner_steps=self.inner_steps, nu=self.nu, length=self.length, flipped=self.flipped
        )


@dataclass(frozen=True)
class DivergenceData(Data):
    """Kolmogorov flow on [0, 2π]²: `rows` × `columns` states of u and v laid out as one image."""

    size: int = 64
    """Grid points along a side of one state."""
    rows: int = 2
    """States from top to bottom."""
    columns: int = 4
    """States from left to right."""
    reynolds: float = 1000.0
    """Reynolds number."""
    forcing: float = 1.0
    """Magnitude of the forcing."""
    wavenumber: int = 4
    """Of the forcing, and where the initial fields have their energy."""
    damping: float = 0.1
    """Linear drag."""
    max_speed: float = 3.0
    """Largest initial speed."""
    dt: float = 0.01
    """Inner time step Δt."""
    inner_steps: int = 20
    """Inner steps between neighbouring states."""
    start: float = 3.0
    """Time of the first state."""

    @property
    def rule(self) -> DivergenceRule:
        """The same grid."""
        return DivergenceRule(size=self.size)


@dataclass(frozen=True)
class PeriodicData(Data):
    """Random two-phase unit cells, tiled."""

    n_train: int = 30_000
    n_val: int = 300
    size: int = 64
    """Pixels along a side."""
    tiles: int = 2
    """Copies of the cell along a side."""
    scale: float = 0.7
    """Standard deviation of the Gaussian field."""
    length: float = 0.7
    """Its length scale, in cells."""
    mean: float = 0.5
    """Its mean."""
    threshold: float | None = 0.5
    """Where the two phases part; none keeps grey values."""

    @property
    def rule(self) -> PeriodicRule:
        """The same tiling."""
        return PeriodicRule(tiles=self.tiles)


@dataclass(frozen=True)
class CounterTraining:
    """How a run trains the network that counts, where it is given none: on images of two galaxies fewer to two more."""

    n_train: int = 10_000
    """Images per number of galaxies to train on."""
    n_val: int = 1000
    """Images per number to measure it with."""
    budget: str = "20 epochs"
    """How long: "N steps", "N epochs" or "N minutes"."""
    batch_size: int = 64
    """Images per step."""
    warmup_steps: int = 100
    """Steps in which the rate rises to its largest."""
    seed: int = 0
    """Of its images and of its training; runs that differ in other seeds are judged by one rule."""

    def __post_init__(self) -> None:
        if min(self.n_train, self.n_val) < 1:
            raise UsageError(
                f"counter_training: n_train and n_val must be 1 or more, not {self.n_train}, {self.n_val}."
            )


@dataclass(frozen=True)
class CountData(Data):
    """Images of `count` galaxies before a blurred background."""

    size: int = 128
    """Pixels along a side."""
    count: int = 8
    """Galaxies in an image."""
    background: float = 8.5
    """Standard deviation of the background before it is blurred."""
    blur: float = 4.0
    """Width of that blur in pixels."""
    peak: float = 10.0
    """Largest peak of a galaxy."""
    signal_to_noise: float = 15.0
    """Of the faintest galaxy, in decibels against the background's variance."""
    separation: float = 5.0
    """Smallest distance between two centres in pixels."""
    counter: str = ""
    """File of the network that counts them, as `namm train counter` writes it; without one a run trains its own."""
    counter_training: CounterTraining = field(default_factory=CounterTraining)
    """How, where no file is given."""

    @property
    def recipe(self) -> dict[str, Any]:
        """What shapes an image besides the seed: not the network that looks at it."""
        return {name: value for name, value in super().recipe.items() if not name.startswith("counter")}

    @property
    def labels(self) -> tuple[int, ...]:
        """Numbers of galaxies that the run's own counter learns to tell apart."""
        return tuple(range(max(1, self.count - 2), self.count + 3))

    @property
    def rule(self) -> CountRule:
        """The same count."""
        return CountRule(count=self.count, counter=self.counter)


@dataclass(frozen=True)
class OwnData(Data):
    """Images of the user's own, copied from a file."""

    n_train: int = 0
    """Images to train on; 0: as many as the file's own split has, or is left of a single array."""
    n_val: int = 0
    """Held-out images to watch the training with; 0: the file's own split, or a tenth."""
    n_test: int = 0
    """Held-out images to evaluate with; 0: the file's own split, or a tenth."""
    seed: int = 0
    """Decides which images are in which split, where the file has no splits."""
    file: str = field(default="", metadata=PLACE)
    """HDF5, NPY or NPZ file, or a folder of PNGs."""
    key: str | None = None
    """Name of the array in the file, where it holds several; not needed where they are train, val and test."""
    layout: Literal["NCHW", "NHWC"] | None = None
    """Order of the file's axes; our own files and PNGs know theirs."""
    content: str = ""
    """Hash of the file; found, not chosen."""
    shape: tuple[int, ...] = ()
    """(C, H, W) of an image; found."""
    constraint: str = ""
    """The rule: `module:name` of a function (B, C, H, W) -> (B,) or of a namm.Constraint."""
    folder: str = field(default="", metadata=PLACE)
    """Where the module was imported from; found."""
    source: str = ""
    """Hash of the module's code; found."""

    def __post_init__(self) -> None:
        if self.is_counted or min(self.sizes.values()) < 0:
            super().__post_init__()

    @property
    def is_counted(self) -> bool:
        """Whether the file has been opened."""
        return bool(self.content)

    @property
    def rule(self) -> OwnRule:
        """The rule that was named with the file."""
        return OwnRule(self.constraint, self.folder, self.source)
