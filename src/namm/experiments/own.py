"""An experiment of the user's own: images in a file, a rule in a module, and the numbers to begin with.

The paper gives σ_max and λ for its five rules. For a rule that nobody has seen they are measured, on the images:

    σ_max = 0.4 · standard deviation of the pixels
    λ     = 10 · σ_max / mean ℓ(x + σ_max z),   z ~ N(0, I)

In the demos of the five σ_max is 0.2 to 0.7 standard deviations and λ ℓ(x + σ_max z) 1 to 40 times σ_max; these are
about their geometric means, and other units of x or of ℓ lead to the same map.
"""

import hashlib
import inspect
import os
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from namm.constraints import Constraint, ConstraintReport, constraint
from namm.datasets.base import SPLITS
from namm.datasets.batches import check_values
from namm.datasets.own import HASH, OwnFile, OwnImages, content_hash, look
from namm.errors import ConstraintError, NammError, RunFolderError, UsageError, is_out_of_memory
from namm.experiments.data_settings import OwnData, OwnRule
from namm.experiments.engine.rule_source import Source, import_source, locate
from namm.experiments.engine.settings import Settings
from namm.experiments.engine.trust import allow, require_trusted
from namm.experiments.presets import require_name

MEASURED = 256
"""Images on which a rule is tried before anything else is done."""
NOISE, COST = 0.4, 10.0
"""σ_max in standard deviations of the data, and λ·ℓ there in σ_max."""
WEIGHTS = (1e-30, 1e30)
"""λ that float32 holds, with room for products."""
USUAL = (0.05, 5.0)
"""Standard deviations of pixels that networks with these rates learn from without trouble."""

Tell = Callable[[str], None]

# The rule


_files: dict[str, Path | None] = {}
"""Of the modules that rules were loaded from, by name."""


def load_rule(name: str, folder: str = "") -> Constraint:
    """The rule that `module:name` names, looked for in `folder`, in the current one and among what is installed.

    It is a `Constraint`, a class of them or a function that makes one without arguments, or a function x -> ℓ. Whoever
    calls this has chosen the rule: its source is recorded as trusted. One that a file names is for `known_rule`.
    """
    source = locate(name, folder)
    allow(source, name)
    return _loaded(name, source)


def known_rule(rule: OwnRule) -> Constraint:
    """The rule of a run; refused, before anything of it is run, where it is not trusted or not what it was."""
    source = locate(rule.constraint, rule.folder)
    if rule.source and _source_hash(source) != rule.source:
        raise RunFolderError(
            f"the module of the rule {rule.constraint} has changed since this run was made with it: put the old one "
            "back, or call `namm run` again, which redoes what depends on it."
        )
    require_trusted(source, rule.constraint)
    return _loaded(rule.constraint, source)


def _loaded(name: str, source: Source) -> Constraint:
    """The rule, its module imported."""
    attribute = name.partition(":")[2]
    imported = _import(source)
    _files[source.module] = source.file
    if not hasattr(imported, attribute):
        require_name(attribute, [each for each in dir(imported) if not each.startswith("_")], _called(source))
    found = getattr(imported, attribute)
    if _is_factory(found):
        found = _made(name, found)
    if not callable(found):
        raise UsageError(f"{name} is {found!r}; it must be a function (B, C, H, W) -> (B,) or a namm.Constraint.")
    rule = found if isinstance(found, Constraint) else constraint(found)
    with suppress(Exception):  # what cannot be copied is used as it is
        return deepcopy(rule)  # moving it to a GPU leaves the module's own where it is
    return rule


def _called(source: Source) -> str:
    return f"name in {source.module} called"


@contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Whatever goes wrong inside is said to be the rule's doing, with the line where it happened."""
    try:
        yield
    except NammError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        last = traceback.extract_tb(error.__traceback__)
        file = str(_files.get(name.partition(":")[0]))
        own = [frame for frame in last if frame.filename == file]
        place = (own or last)[-1]
        line = f"{Path(place.filename).name}, line {place.lineno}"
        said = " ".join(str(error).split())
        raise ConstraintError(f"the rule {name} raised {type(error).__name__}: {said} ({line}).") from error


def _import(source: Source) -> ModuleType:
    try:
        return import_source(source)
    except ModuleNotFoundError as error:
        beside = f": what lies beside {source.module} is found where an import statement names it"
        raise ConstraintError(f"importing {source.module} failed: {error}{beside if source.root else ''}.") from error
    except (Exception, SystemExit) as error:
        raise ConstraintError(f"importing {source.module} failed: {type(error).__name__}: {error}.") from error


def _is_factory(found: Any) -> bool:
    """Whether it is made to be called without arguments, and not with images."""
    if isinstance(found, type):
        return issubclass(found, Constraint)
    if isinstance(found, Constraint) or not callable(found):
        return False
    try:
        takes = inspect.signature(found)
    except (TypeError, ValueError):
        return False
    return _binds(takes) and not _binds(takes, None)


def _binds(signature: inspect.Signature, *arguments: Any) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _made(name: str, factory: Callable[[], Any]) -> Any:
    if not _binds(inspect.signature(factory)):
        raise UsageError(
            f"{name} is a class that cannot be made without arguments {inspect.signature(factory)}: name an object of "
            "it instead."
        )
    with blamed_on(name):
        return factory()


def _source_hash(source: Source) -> str:
    """A hash of the code of a rule's module, comments aside; empty for one without a file."""
    return "" if source.code is None else hashlib.sha256(source.code).hexdigest()[:HASH]


# The experiment


def images(data: OwnData) -> OwnImages:
    """The images of a file that has been looked at."""
    channels, height, width = data.shape
    return OwnImages(Path(data.file), data.key, data.layout, data.content, (channels, height, width), data.sizes)


def prepare(asked: Settings, given: Collection[str], tell: Tell, *, from_file: bool = False) -> Settings:
    """`asked` with what its file and rule tell, and, where its file is looked at first, with numbers that suit them.

    Args:
        asked: What the user asks for.
        given: Names of the settings that the user gave: these stay, whatever is measured.
        tell: Called with what was found and chosen.
        from_file: Whether a file names the rule, and not the user: it is then refused unless it is trusted.

    Everything that can be wrong with file and rule is refused here, before anything is computed.
    """
    from namm.evaluation import picture_for
    from namm.experiments.engine.build import device, placed  # which imports this module

    data, rule = _checked(asked.data, from_file)
    if not Path(data.file).exists() and data.content:  # a run has its own copy, and goes on without the file
        return replace(asked, data=data)
    found = look(Path(data.file), data.key, data.layout)
    measure, data = not data.content, _filled(data, found)
    tell(_described(data, found))
    some = _some(images(data), data)
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


def _tried(rule: Constraint, some: Tensor, noise: float) -> ConstraintReport:
    """The rule's check, after one call of everything that a run will ask of it in its last stages."""
    two = some[:2].clone()
    with torch.no_grad():
        rule(two)
        residual = rule.residual(two) if rule.has_residual else two
        projected = rule.project(two) if rule.has_project else two
    if not isinstance(residual, Tensor) or residual.shape[:1] != two.shape[:1]:
        raise ConstraintError(
            f"the residual of {rule.name} must be a tensor with one entry per image on its first axis."
        )
    if not isinstance(projected, Tensor) or projected.shape != two.shape:
        got = tuple(projected.shape) if isinstance(projected, Tensor) else type(projected).__name__
        raise ConstraintError(
            f"project of {rule.name} turned images {tuple(two.shape)} into {got}: it must return images of that shape."
        )
    return rule.check(some, noise=noise)


def _checked(data: Any, from_file: bool) -> tuple[OwnData, Constraint]:
    """The data with absolute paths and the rule's hash, and the rule."""
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
    rule = _loaded(data.constraint, source)
    inside = source.file is not None and source.file.is_relative_to(os.getcwd())
    folder, code = os.getcwd() if inside else data.folder, _source_hash(source)
    return replace(data, file=str(Path(data.file).resolve()), folder=folder, source=code), rule


def _filled(data: OwnData, found: OwnFile) -> OwnData:
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


def _described(data: OwnData, found: OwnFile) -> str:
    """What there is in the file, and how it is split."""
    counts = ", ".join(f"{n} for {split}" for split, n in data.sizes.items())
    shared = [split for split in SPLITS if found.sharing(split) != [split]]
    lacks = "has no splits" if len(shared) == len(SPLITS) else f"has no {' and no '.join(shared[1:])}"
    how = f": it {lacks}, and is split at random (data.seed {data.seed})" if shared else ": its own splits"
    layout = f" ({data.layout})" if data.layout else ""
    return f"{found.path.name} holds images of {'×'.join(map(str, data.shape))}{layout}, {counts}{how}"


def _some(own: OwnImages, data: OwnData) -> Tensor:
    return own.images(data.seed, "train", 0, min(MEASURED, data.n_train))


def _spread(some: Tensor) -> float:
    return float(some.std(correction=0))


def _fitted(asked: Settings, given: Collection[str], sigma: float, report: ConstraintReport, tell: Tell) -> Settings:
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


def _weight(report: ConstraintReport, sigma: float) -> float:
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
