"""An experiment of the user's own: images in a file, a rule in a module, and the numbers to begin with.

The paper gives σ_max and λ for its five rules. For a rule that nobody has seen they are measured, on the images:

    σ_max = 0.4 · standard deviation of the pixels
    λ     = 10 · σ_max / mean ℓ(x + σ_max z),   z ~ N(0, I)

In the demos of the five σ_max is 0.2 to 0.7 standard deviations and λ ℓ(x + σ_max z) 1 to 40 times σ_max; these are
about their geometric means, and other units of x or of ℓ lead to the same map.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from namm.errors import ConstraintError, UsageError
from namm.experiments import recipes
from namm.experiments.engine.data_settings import PLACE, Data, Rule
from namm.experiments.engine.experiment import UNREPORTED, Experiment
from namm.experiments.engine.settings import InverseSettings, Settings

if TYPE_CHECKING:
    from torch import Tensor

    from namm.constraints import Constraint, ConstraintReport
    from namm.datasets.own import OwnFile, OwnImages

MEASURED = 256
"""Images on which a rule is tried before anything else is done."""
NOISE, COST = 0.4, 10.0
"""σ_max in standard deviations of the data, and λ·ℓ there in σ_max."""
WEIGHTS = (1e-30, 1e30)
"""λ that float32 holds, with room for products."""
USUAL = (0.05, 5.0)
"""Standard deviations of pixels that networks with these rates learn from without trouble."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class OwnRule(Rule):
    """One of the user's own."""

    constraint: str = ""
    """`module:name` of a function (B, C, H, W) -> (B,) or of a namm.Constraint."""
    folder: str = field(default="", metadata=PLACE)
    """Where the module was imported from."""
    source: str = ""
    """Hash of the module's source."""

    def build(self) -> "Constraint":
        """The rule, refused where it is not trusted or not what it was."""
        from namm.experiments.engine.user_rule import known_rule

        return known_rule(self.constraint, self.folder, self.source)

    @property
    def named_code(self) -> str:
        """The rule itself."""
        return self.constraint


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

    def build(self) -> "OwnImages":
        """The images of a file that has been looked at."""
        from namm.datasets.own import OwnImages

        channels, height, width = self.shape
        return OwnImages(Path(self.file), self.key, self.layout, self.content, (channels, height, width), self.sizes)

    @property
    def rule(self) -> OwnRule:
        """The rule that was named with the file."""
        return OwnRule(self.constraint, self.folder, self.source)


def _preset(s: Settings) -> Settings:
    """A rule that nobody has seen may not compile as one graph, and images of any sign and channels are no pictures.

    What the paper's baseline was trained for suits the paper's data: here both sides get the same compute.
    """
    return replace(
        s,
        dm=replace(s.dm, equal_compute=True),
        evaluate=replace(s.evaluate, kid_subsets=0, n_fid=0),
        map=replace(s.map, train=replace(s.map.train, compile=False)),
        finetune=replace(s.finetune, train=replace(s.finetune.train, compile=False)),
    )


PAPER = recipes.paper(OwnData(), UNREPORTED.weight, epochs=(100, 300, 700, 1500), f=InverseSettings(activation="none"))

EXPERIMENT = Experiment(
    "own",
    OwnData,
    OwnRule,
    presets={
        "demo": _preset(recipes.demo(OwnData(), UNREPORTED.weight)),
        "gpu": _preset(recipes.gpu(OwnData(), UNREPORTED.weight)),
        "paper": _preset(PAPER),
    },
)


# The numbers to begin with


def prepare(asked: Settings, given: Collection[str], tell: Tell, *, from_file: bool = False) -> Settings:
    """`asked` with what its file and rule tell, and, where its file is looked at first, with numbers that suit them.

    Args:
        asked: What the user asks for.
        given: Names of the settings that the user gave: these stay, whatever is measured.
        tell: Called with what was found and chosen.
        from_file: Whether a file names the rule, and not the user: it is then refused unless it is trusted.

    Everything that can be wrong with file and rule is refused here, before anything is computed.
    """
    from namm.datasets.batches import check_values
    from namm.datasets.own import look
    from namm.evaluation import picture_for
    from namm.experiments.engine.build import device, placed
    from namm.experiments.engine.user_rule import blamed_on

    data, rule = _checked(asked.data, from_file)
    if not Path(data.file).exists() and data.content:  # a run has its own copy, and goes on without the file
        return replace(asked, data=data)
    found = look(Path(data.file), data.key, data.layout)
    measure, data = not data.content, _filled(data, found)
    tell(_described(data, found))
    some = _some(data)
    for note in check_values(some, "images"):
        tell(note)
    if not USUAL[0] <= _spread(some) <= USUAL[1]:
        tell(f"the pixels' standard deviation is {_spread(some):.2g}: maps learn best near 1, so scale the images")
    keeps = not measure or "map.sigma_max" in given
    sigma = asked.map.sigma_max if keeps else _rounded(NOISE * _spread(some))
    with blamed_on(data.constraint):
        report = _tried(placed(rule), some.to(device()), sigma / _spread(some))
    report.require_obeyed()
    report.require_active()
    if asked.evaluate.kid_subsets or asked.evaluate.n_fid:
        picture_for(rule)(some[:2])  # refuses images that Inception cannot be shown
    settled = replace(asked, data=data)
    return _fitted(settled, given, sigma, report, tell) if measure else settled


def _tried(rule: "Constraint", some: "Tensor", noise: float) -> "ConstraintReport":
    """The rule's check, after one call of everything that a run will ask of it in its last stages."""
    import torch

    two = some[:2].clone()
    with torch.no_grad():
        rule(two)
        residual = rule.residual(two) if rule.has_residual else two
        projected = rule.project(two) if rule.has_project else two
    if not isinstance(residual, torch.Tensor) or residual.shape[:1] != two.shape[:1]:
        raise ConstraintError(
            f"the residual of {rule.name} must be a tensor with one entry per image on its first axis."
        )
    if not isinstance(projected, torch.Tensor) or projected.shape != two.shape:
        got = tuple(projected.shape) if isinstance(projected, torch.Tensor) else type(projected).__name__
        raise ConstraintError(
            f"project of {rule.name} turned images {tuple(two.shape)} into {got}: it must return images of that shape."
        )
    return rule.check(some, noise=noise)


def _checked(data: Any, from_file: bool) -> tuple[OwnData, "Constraint"]:
    """The data with absolute paths and the rule's hash, and the rule."""
    from namm.experiments.engine.rule_source import locate
    from namm.experiments.engine.trust import allow, require_trusted
    from namm.experiments.engine.user_rule import rule_from, source_hash

    if not isinstance(data, OwnData) or not data.file or not data.constraint:
        raise UsageError("an experiment of your own needs images and a rule: --data FILE --constraint module:name.")
    if ":" not in data.constraint:
        raise UsageError(
            f"--constraint takes module:name, not {data.constraint!r}; for a rule of ours write a module of two lines: "
            "from namm import TotalFlux; rule = TotalFlux(120.0)."
        )
    source = locate(data.constraint, data.folder)
    if from_file:
        require_trusted(source, data.constraint)
    else:
        allow(source, data.constraint)
    rule = rule_from(data.constraint, source)
    inside = source.file is not None and source.file.is_relative_to(os.getcwd())
    folder, code = os.getcwd() if inside else data.folder, source_hash(source)
    return replace(data, file=str(Path(data.file).resolve()), folder=folder, source=code), rule


def _filled(data: OwnData, found: "OwnFile") -> OwnData:
    from namm.datasets.own import content_hash

    n = found.sizes(data.sizes)
    return replace(
        data,
        n_train=n["train"],
        n_val=n["val"],
        n_test=n["test"],
        layout=cast(Any, found.layout),
        shape=found.shape,
        content=content_hash(found.path),
    )


def _described(data: OwnData, found: "OwnFile") -> str:
    """What there is in the file, and how it is split."""
    from namm.datasets.base import SPLITS

    counts = ", ".join(f"{n} for {split}" for split, n in data.sizes.items())
    shared = [split for split in SPLITS if found.sharing(split) != [split]]
    lacks = "has no splits" if len(shared) == len(SPLITS) else f"has no {' and no '.join(shared[1:])}"
    how = f": it {lacks}, and is split at random (data.seed {data.seed})" if shared else ": its own splits"
    layout = f" ({data.layout})" if data.layout else ""
    return f"{found.path.name} holds images of {'×'.join(map(str, data.shape))}{layout}, {counts}{how}"


def _some(data: OwnData) -> "Tensor":
    return data.build().images(data.seed, "train", 0, min(MEASURED, data.n_train))


def _spread(some: "Tensor") -> float:
    return float(some.std(correction=0))


def _fitted(asked: Settings, given: Collection[str], sigma: float, report: "ConstraintReport", tell: Tell) -> Settings:
    """σ_max, λ and the size of the evaluation's subsets, where they were not given."""
    weight = asked.map.weights.constraint if "map.weights.constraint" in given else _weight(report, sigma)
    most = min(asked.data.n_train, asked.data.n_test)
    subset = asked.evaluate.subset if "evaluate.subset" in given else min(asked.evaluate.subset, most)
    noisy = f"{report.noisy_mean:.2g} with noise of σ_max = {sigma:g}"
    tell(
        f"{report.name}: ℓ is {report.mean:.2g} on the data and {noisy}; λ = {weight:g}"
        + (f"; √MMD² over subsets of {subset} images" if subset < asked.evaluate.subset else "")
    )
    later = asked.finetune.sigma_max if "finetune.sigma_max" in given else sigma
    weights = asked.finetune.weights
    if "finetune.weights.constraint" not in given:
        weights = replace(weights, constraint=weight)
    return replace(
        asked,
        map=replace(asked.map, sigma_max=sigma, weights=replace(asked.map.weights, constraint=weight)),
        finetune=replace(asked.finetune, sigma_max=later, weights=weights),
        evaluate=replace(asked.evaluate, subset=subset),
    )


def _weight(report: "ConstraintReport", sigma: float) -> float:
    """λ, refused where float32 cannot hold it."""
    weight = _rounded(COST * sigma / report.noisy_mean)
    if WEIGHTS[0] <= weight <= WEIGHTS[1]:
        return weight
    raise ConstraintError(
        f"ℓ of {report.name} is {report.noisy_mean:.2g} on images with noise of σ_max = {sigma:g}, which asks for "
        f"λ = {weight:g}, and float32 cannot train with that: multiply ℓ by {1 / report.noisy_mean:.0e} in the rule, "
        "so that it is near 1 there."
    )


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
