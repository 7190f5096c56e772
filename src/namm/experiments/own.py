"""An experiment of the user's own: images in a file, a rule in a module, and the numbers to begin with.

The maps of the presets `demo` and `gpu` see standardised images, and choose σ_max and λ by trials before they are
trained (`namm.training.tune`). The paper gives both for its five rules; its preset takes, for a rule of the user's own,

    σ_max = 0.4 · standard deviation of the pixels
    λ     = 10 · σ_max / mean ℓ(x + σ_max z),   z ~ N(0, I)

so that other units of x or of ℓ lead to the same map.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from namm.errors import ConstraintError, UsageError
from namm.experiments import recipes
from namm.experiments.engine.experiment import PLACE, UNREPORTED, Data, Experiment, Rule
from namm.experiments.engine.settings import InverseSettings, Settings
from namm.formatting import format_number

if TYPE_CHECKING:
    from torch import Tensor

    from namm.constraints import Constraint, ConstraintReport
    from namm.datasets.user_files import OwnFile, OwnImages

MEASURED = 256
"""Images on which a rule is tried before anything else is done."""
NOISE, COST = 0.4, 10.0
"""σ_max in standard deviations of the data, and λ·ℓ there in σ_max."""
WEIGHTS = (1e-30, 1e30)
"""λ that float32 holds, with room for products."""
USUAL = (0.05, 5.0)
"""Standard deviations of pixels that networks with these rates learn from without trouble."""

Logger = Callable[[str], None]


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
        from namm.datasets.user_files import OwnImages

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
        "demo": _preset(recipes.demo(OwnData(), model="2 minutes")),
        "gpu": _preset(recipes.gpu(OwnData())),
        "paper": _preset(PAPER),
    },
)


# The numbers to begin with


def prepare(asked: Settings, given: Collection[str], log: Logger, *, from_file: bool = False) -> Settings:
    """`asked` with what its file and rule tell, and, where its file is looked at first, with numbers that suit them.

    Args:
        asked: What the user asks for.
        given: Names of the settings that the user gave: these stay, whatever is measured.
        log: Called with what was found and chosen.
        from_file: Whether a file names the rule, and not the user: it is then refused unless it is trusted.

    Everything that can be wrong with file and rule is refused here, before anything is computed.
    """
    from namm.datasets.batches import check_values
    from namm.datasets.user_files import content_hash, look
    from namm.evaluation import picture_for
    from namm.experiments.engine.build import device, placed
    from namm.experiments.engine.user_rule import blamed_on

    data, rule = _checked(asked.data, from_file)
    is_new = not data.content
    if not Path(data.file).exists() and not is_new:  # a run has its own copy, and goes on without the file
        return replace(asked, data=data)
    file = look(Path(data.file), data.key, data.layout)
    sizes: dict[str, Any] = {f"n_{split}": n for split, n in file.sizes(data.sizes).items()}
    layout = cast(Any, file.layout)
    data = replace(data, **sizes, layout=layout, shape=file.shape, content=content_hash(file.path))
    log(_described(data, file))
    some = data.build().images(data.seed, "train", 0, min(MEASURED, data.n_train))
    for note in check_values(some, "images"):
        log(note)
    spread = float(some.std(correction=0))
    if not asked.map.standardise and not USUAL[0] <= spread <= USUAL[1]:
        size = format_number(spread, ".2g")
        log(f"the pixels' standard deviation is {size}: maps learn best near 1, so scale the images")
    is_chosen = not is_new or asked.map.standardise or "map.sigma_max" in given
    sigma = asked.map.sigma_max if is_chosen else _rounded(NOISE * spread)
    with blamed_on(data.constraint):
        report = _tried(placed(rule), some.to(device()), sigma if asked.map.standardise else sigma / spread)
    report.require_obeyed()
    report.require_active()
    if asked.evaluate.kid_subsets or asked.evaluate.n_fid:
        picture_for(rule)(some[:2])  # refuses images that Inception cannot be shown
    settled = replace(asked, data=data)
    return _fitted(settled, given, sigma, report, log) if is_new else settled


def _checked(data: Any, from_file: bool) -> tuple[OwnData, "Constraint"]:
    """The data with absolute paths and the rule's hash, and the rule."""
    from namm.experiments.engine.rule_source import locate
    from namm.experiments.engine.user_rule import allow, require_trusted, rule_from

    if not isinstance(data, OwnData) or not data.file or not data.constraint:
        raise UsageError("an experiment of your own needs images and a rule: --data FILE --constraint module:name.")
    if ":" not in data.constraint:
        raise UsageError(
            f"--constraint takes module:name, not {data.constraint!r}; a rule of ours is written out with its numbers, "
            'such as "namm:TotalFlux(120)".'
        )
    source = locate(data.constraint, data.folder)
    if from_file:
        require_trusted(source, data.constraint)
    else:
        allow(source, data.constraint)
    rule = rule_from(data.constraint, source)
    is_here = source.file is not None and source.file.is_relative_to(os.getcwd())
    folder = os.getcwd() if is_here else data.folder
    return replace(data, file=str(Path(data.file).resolve()), folder=folder, source=source.code_hash), rule


def _described(data: OwnData, file: "OwnFile") -> str:
    """What there is in the file, and how it is split."""
    from namm.datasets.base import SPLITS

    counts = ", ".join(f"{n} for {split}" for split, n in data.sizes.items())
    shared = [split for split in SPLITS if file.sharing(split) != [split]]
    lacks = "has no splits" if len(shared) == len(SPLITS) else f"has no {' and no '.join(shared[1:])}"
    how = f": it {lacks}, and is split at random (data.seed {data.seed})" if shared else ": its own splits"
    layout = f" ({data.layout})" if data.layout else ""
    return f"{file.path.name} holds images of {'×'.join(map(str, data.shape))}{layout}, {counts}{how}"


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


def _fitted(asked: Settings, given: Collection[str], sigma: float, report: "ConstraintReport", log: Logger) -> Settings:
    """σ_max, λ and the size of the evaluation's subsets, where they were not given.

    A map of standardised images chooses the first two by trials, in its own stage.
    """
    usual = _weight(report, sigma)
    most = min(asked.data.n_train, asked.data.n_test)
    subset = asked.evaluate.subset if "evaluate.subset" in given else min(asked.evaluate.subset, most)
    clean, noisy = (format_number(mean, ".2g") for mean in (report.mean, report.noisy_mean))
    smaller = f"; √MMD² over subsets of {subset} images" if subset < asked.evaluate.subset else ""
    asked = replace(asked, evaluate=replace(asked.evaluate, subset=subset))
    maps, later = asked.map, asked.finetune
    if maps.standardise:
        log(f"{report.name}: ℓ is {clean} on the data and {noisy} with noise of {sigma:g} of their spread{smaller}")
        tuned = not {"map.sigma_max", "map.weights.constraint", "map.noise"} & set(given)
        if "finetune.sigma_max" not in given:
            later = replace(later, sigma_max=maps.sigma_max / 4)
        if "finetune.weights.constraint" not in given:
            later = replace(later, weights=replace(later.weights, constraint=maps.weights.constraint))
        return replace(asked, map=replace(maps, tune=tuned and maps.weights.relative), finetune=later)
    weight = maps.weights.constraint if "map.weights.constraint" in given else usual
    log(f"{report.name}: ℓ is {clean} on the data and {noisy} with noise of σ_max = {sigma:g}; λ = {weight:g}{smaller}")
    if "finetune.sigma_max" not in given:
        later = replace(later, sigma_max=sigma)
    if "finetune.weights.constraint" not in given:
        later = replace(later, weights=replace(later.weights, constraint=weight))
    maps = replace(maps, sigma_max=sigma, weights=replace(maps.weights, constraint=weight))
    return replace(asked, map=maps, finetune=later)


def _weight(report: "ConstraintReport", sigma: float) -> float:
    """λ, refused where float32 cannot hold it."""
    weight = _rounded(COST * sigma / report.noisy_mean)
    if WEIGHTS[0] <= weight <= WEIGHTS[1]:
        return weight
    raise ConstraintError(
        f"ℓ of {report.name} is {format_number(report.noisy_mean, '.2g')} on images with noise of σ_max = {sigma:g}, "
        f"which asks for λ = {weight:g}, and float32 cannot train with that: multiply ℓ by {1 / report.noisy_mean:.0e} "
        "in the rule, so that it is near 1 there."
    )


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
