"""Rules by name, as commands take them: one of ours with its numbers, or `module:name` of the user's own."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namm.experiments.engine.data_settings import Rule
from namm.experiments.presets import EXPERIMENTS, find, require_name

if TYPE_CHECKING:
    from namm.constraints import Constraint


def rule_settings(name: str, file: Path | None) -> Rule:
    """The numbers of the rule `name`: those that `file` was drawn with, where it is one of ours and says so.

    A rule of the user's own has none that we know.
    """
    if ":" in name:
        return Rule()
    kind = find(require_name(name, EXPERIMENTS, "constraint")).rule
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
    """ℓ of that name, with these numbers where it is one of ours, where models run."""
    from namm.experiments.engine.build import constraint, placed
    from namm.experiments.engine.user_rule import load_rule

    return placed(load_rule(name) if ":" in name else constraint(rule))
