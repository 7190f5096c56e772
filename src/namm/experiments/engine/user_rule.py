"""A rule of the user's own: from `module:name` to the object that measures, and whose fault it is when it fails."""

import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

from namm.constraints import Constraint, constraint
from namm.datasets.own import HASH
from namm.errors import ConstraintError, NammError, RunFolderError, UsageError, is_out_of_memory
from namm.experiments.engine.rule_source import Source, import_source, locate
from namm.experiments.engine.trust import allow, require_trusted
from namm.experiments.presets import require_name

_files: dict[str, Path | None] = {}
"""Files of the modules that rules were loaded from, by name."""


def load_rule(name: str, folder: str = "") -> Constraint:
    """The rule that `module:name` names, looked for in `folder`, in the current one and among what is installed.

    It is a `Constraint`, a class of them or a function that makes one without arguments, or a function x -> ℓ. Whoever
    calls this has chosen the rule: its source is recorded as trusted. One that a file names is for `known_rule`.
    """
    source = locate(name, folder)
    allow(source, name)
    return rule_from(name, source)


def known_rule(name: str, folder: str = "", known_hash: str = "") -> Constraint:
    """The rule of a run; refused, before anything of it is run, where it is not trusted or not what it was."""
    source = locate(name, folder)
    if known_hash and source_hash(source) != known_hash:
        raise RunFolderError(
            f"the module of the rule {name} has changed since this run was made with it: put the old one back, or call "
            "`namm run` again, which redoes what depends on it."
        )
    require_trusted(source, name)
    return rule_from(name, source)


def rule_from(name: str, source: Source) -> Constraint:
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


def source_hash(source: Source) -> str:
    """A hash of the code of a rule's module, comments aside; empty for one without a file."""
    return "" if source.code is None else hashlib.sha256(source.code).hexdigest()[:HASH]
