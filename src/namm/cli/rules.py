"""Rules by name, as commands take them: one of ours with its numbers, or `module:name` of the user's own."""

import importlib
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namm.errors import ConstraintError, UsageError
from namm.experiments.data_settings import BurgersRule, CountRule, DivergenceRule, FluxRule, PeriodicRule, Rule
from namm.experiments.presets import require_name

if TYPE_CHECKING:
    from namm.constraints import Constraint

RULES: dict[str, type[Rule]] = {
    "flux": FluxRule,
    "burgers": BurgersRule,
    "divergence": DivergenceRule,
    "periodic": PeriodicRule,
    "count": CountRule,
}


def rule_settings(name: str, file: Path | None) -> Rule:
    """The numbers of the rule `name`: those that `file` was drawn with, where it is one of ours and says so.

    A rule of the user's own has none that we know.
    """
    if ":" in name:
        return Rule()
    kind = RULES[require_name(name, RULES, "constraint")]
    said = {} if file is None else recipe(file)
    return kind(**{f.name: said[f.name] for f in fields(kind) if f.name in said})


def recipe(file: Path) -> dict[str, Any]:
    """What a file of ours says that it was made from; nothing for any other."""
    import h5py

    try:
        with h5py.File(file, "r") as opened:
            said = {name: value.item() if hasattr(value, "item") else value for name, value in opened.attrs.items()}
    except OSError:
        return {}  # what is wrong with the file is said when it is read
    return said if "namm_version" in said else {}


def named_rule(name: str, rule: Rule) -> "Constraint":
    """ℓ of that name, with these numbers where it is one of ours."""
    if ":" in name:
        return load_rule(name)
    from namm.experiments.build import constraint

    return constraint(rule)


def load_rule(name: str) -> "Constraint":
    """The rule that `module:name` names: a `Constraint`, a class of them that needs no arguments, or a function."""
    from namm.constraints import Constraint, constraint

    module, _, attribute = name.partition(":")
    found = _import(module, attribute)
    if isinstance(found, type) and issubclass(found, Constraint):
        try:
            found = found()
        except TypeError as error:
            raise UsageError(
                f"{name} is a class that cannot be made without arguments ({error}): name an object of it instead."
            ) from error
    if isinstance(found, Constraint):
        return found
    if not callable(found):
        raise UsageError(f"{name} is {found!r}; it must be a function (B, C, H, W) -> (B,) or a namm.Constraint.")
    return constraint(found)


def _import(module: str, attribute: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise ConstraintError(f"importing {module} failed: {error}.") from error
        raise UsageError(
            f"there is no module {module!r}, neither here ({os.getcwd()}) nor installed: "
            "CONSTRAINT is module:name, without .py."
        ) from error
    except Exception as error:
        raise ConstraintError(f"importing {module} failed: {type(error).__name__}: {error}.") from error
    names = [n for n in vars(imported) if not n.startswith("_")]
    return getattr(imported, require_name(attribute, names, f"name in {module} called"))
