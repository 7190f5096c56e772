"""Settings as plain values and back: to YAML, to JSON, to a key.

A settings file mirrors the dataclasses: a mapping per dataclass, a list per tuple. What a file leaves out is taken from
the preset it names. Reading is strict: a key that no dataclass has, or a value of another type, is refused with its
place in the file and the nearest name, because a setting that is silently ignored is the most expensive mistake.
"""

import hashlib
import json
import types
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from namm.errors import UsageError
from namm.experiments.engine.experiment import PLACE
from namm.experiments.presets import Preset, preset, require_name
from namm.files import differences
from namm.reading import REASON, damage_as, read_text
from namm.training.settings import LATER

HEADER = "# Settings of a run of namm. `namm run --config THIS_FILE` uses them again.\n"
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
LARGEST = 64 * 1024
"""Characters of a settings file. A real one has about five thousand."""
DEEPEST = 16
"""Nesting of a settings file. A real one has four levels."""
LARGEST_NUMBER = 2**63
"""Whole numbers are smaller: seeds have at most 63 bits."""


def plain(value: Any) -> Any:
    """A dataclass as nested dicts, lists and numbers; a whole number where a real one belongs becomes real."""
    if not is_dataclass(value):
        return list(value) if isinstance(value, tuple) else value
    hints = get_type_hints(type(value))
    return {f.name: _canonical(getattr(value, f.name), hints[f.name]) for f in fields(value)}


def identity(value: Any) -> Any:
    """Plain values of a dataclass, without the settings that only say where something is."""
    places = {f.name for f in fields(value) if f.metadata == PLACE}
    return {name: setting for name, setting in plain(value).items() if name not in places}


def _canonical(value: Any, hint: Any) -> Any:
    if isinstance(value, tuple):
        item = get_args(hint)[0]
        return [_canonical(entry, item) for entry in value]
    wants_float = hint is float or float in get_args(hint)
    return float(value) if wants_float and isinstance(value, int) else plain(value)


NEW: dict[str, tuple[Any, ...]] = {
    "polish": (False,),
    "radius": (2.0,),
    "kind": ("resnet", "ncsnpp"),
    "modes": (64,),
    "templates": (4,),
    "hidden": (64,),
    "relative": (False,),
    "squared": (0.0,),
    "repair": (False,),
    "standardise": (False,),
    "tune": (False,),
    "width": (256,),
    "depth": (8,),
    "heads": (4,),
    "patch": (4,),
    "schedule": ("vp",),
    "times": ("uniform",),
    **{name: (plain(value),) for name, value in LATER.items()},
}
"""Settings that version 0.1 did not have, and the values, one per part that has the name, that mean what it did."""


def without_new_defaults(values: Any) -> Any:
    """Plain values as version 0.1 would have written them, where they mean the same: the keys of its stages stand."""
    if not isinstance(values, Mapping):
        return values
    kept = {name: value for name, value in values.items() if value not in NEW.get(name, ())}
    return {name: without_new_defaults(value) for name, value in kept.items()}


def as_meant_by_0_1(content: dict[str, Any]) -> dict[str, Any]:
    """A whole file of version 0.1 with what its map, network, diffusion and trainings did; any other file as it is.

    What a file leaves out is taken from the preset, and presets may have other ones now.
    """
    return _with_trainings_of_0_1(_with_model_of_0_1(_with_map_of_0_1(content)))


def _with_map_of_0_1(content: dict[str, Any]) -> dict[str, Any]:
    maps = content.get("map")
    if not isinstance(maps, Mapping) or not isinstance(f := maps.get("f"), Mapping):
        return content
    if "kind" in f or not {"filters", "normalisation", "downsamplings"} <= f.keys():
        return content
    content = dict(content)
    content["map"] = {**maps, "f": {**f, "kind": "resnet"}, "standardise": False, "tune": False}
    for part in ("map", "finetune"):
        if isinstance(found := content.get(part), Mapping) and isinstance(found.get("weights"), Mapping):
            content[part] = {**found, "weights": {**found["weights"], "relative": False}}
    return content


MODEL_0_1: dict[str, tuple[set[str], dict[str, str]]] = {
    "network": ({"filters", "multipliers", "unshuffle"}, {"kind": "ncsnpp"}),
    "diffusion": ({"beta_min", "beta_max", "t_min"}, {"schedule": "vp", "times": "uniform"}),
}
"""Parts of the model: settings by which a whole one is known, and what version 0.1 did without saying so."""


def _with_model_of_0_1(content: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(mdm := content.get("mdm"), Mapping):
        return content
    parts = dict(mdm)
    for name, (known, meant) in MODEL_0_1.items():
        part = parts.get(name)
        if isinstance(part, Mapping) and known <= part.keys() and next(iter(meant)) not in part:
            parts[name] = {**part, **meant}
    return {**content, "mdm": parts}


TRAINING_0_1 = {"budget", "batch_size", "learning_rate", "betas", "schedule", "clip", "ema_decay", "precision"}
"""Settings of a training by which a whole one is known."""


def _with_trainings_of_0_1(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return content
    whole = content.keys() >= TRAINING_0_1
    given = {name: _with_trainings_of_0_1(value) for name, value in content.items()}
    return {**({name: plain(value) for name, value in LATER.items()} if whole else {}), **given}


def digest(value: Any) -> str:
    """A hash of plain values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_yaml(chosen: Preset) -> str:
    """The text of a settings file."""
    content = {"experiment": chosen.experiment, "preset": chosen.name, **plain(chosen.settings)}
    return HEADER + yaml.safe_dump(content, sort_keys=False)


def read_yaml(path: Path) -> Preset:
    """The settings in a file."""
    return from_yaml(read_settings(path), str(path))


def read_settings(path: Path) -> str:
    """The text of a settings file."""
    with damage_as(UsageError, f"the settings file {path} cannot be read: {REASON}."):
        return read_text(path, LARGEST)


def from_yaml(text: str, place: str = "settings") -> Preset:
    """The settings in the text of a file that `place` names in errors."""
    content = plain_yaml(text, place)
    if not isinstance(content, Mapping) or "experiment" not in content:
        raise UsageError(f"{place} does not say which experiment it is for: add a line `experiment: NAME`.")
    content = as_meant_by_0_1(dict(content))
    try:
        base = preset(*(str(content.pop(key, "demo")) for key in ("experiment", "preset")))
        return replace(base, settings=_update(base.settings, content, ""))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def plain_yaml(text: str, place: str = "settings") -> Any:
    """The value of a YAML text without tags, aliases or deep nesting: no more in memory than was written out."""
    if len(text) > LARGEST:
        raise UsageError(f"{place} has {len(text)} characters, and settings have at most {LARGEST}: shorten it.")
    with damage_as(UsageError, f"{place} is not YAML: {REASON}."):
        return yaml.load(text, _Loader)


def changes(before: str, after: str) -> str:
    """Where two settings files differ, for people."""
    try:
        old, new = plain_yaml(before), plain_yaml(after)
    except UsageError:
        old = new = None
    changed = differences(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else []
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    return "; ".join(changed[:4]) + more if changed else "the file was written otherwise"


class _Loader(yaml.SafeLoader):
    """Refuses what settings have no use for and a trap has.

    Aliases, of which a few lines stand for gigabytes; deep nesting; numbers of thousands of digits; and a key that is
    given twice, of which YAML would quietly take the last.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "settings have no aliases: write the value out", mark)
        if self.depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"it is nested more than {DEEPEST} deep", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                continue  # refused below
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int:
        """A whole number that a setting can have."""
        value = None
        with suppress(ValueError):  # Python refuses to read more than 4300 digits
            value = self.construct_yaml_int(node)
        if value is None or abs(value) >= LARGEST_NUMBER:
            raise yaml.constructor.ConstructorError(None, None, "a number has too many digits", node.start_mark)
        return int(value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


def _update(base: Any, content: Any, place: str) -> Any:
    """The dataclass `base` with the fields that `content` names set to what it says."""
    where = place or "the file"
    if not isinstance(content, Mapping):
        raise UsageError(f"{where} must be a mapping of settings, not {content!r}.")
    hints = get_type_hints(type(base))
    changes = {}
    for key, value in content.items():
        require_name(str(key), [f.name for f in fields(base)], "setting", f" in {place!r}" if place else "")
        old, here = getattr(base, key), f"{place}.{key}" if place else key
        changes[key] = _update(old, value, here) if is_dataclass(old) else _convert(value, hints[key], here)
    try:
        return replace(base, **changes)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _convert(value: Any, hint: Any, place: str) -> Any:
    """`value` as the type that `hint` asks for."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and types.NoneType in get_args(hint):
            return None
        hint = next(each for each in get_args(hint) if each is not types.NoneType)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if isinstance(value, str):
            return require_name(value, arguments, f"choice for {place} called")
        if value not in arguments:
            raise UsageError(f"{place} must be one of {', '.join(map(str, arguments))}, not {value!r}.")
        return value
    if origin is tuple:
        any_length = arguments[-1:] == (Ellipsis,)
        if not isinstance(value, list) or not (any_length or len(value) == len(arguments)):
            count = "" if any_length else f" of {len(arguments)} values"
            raise UsageError(f"{place} must be a list{count}, not {value!r}.")
        return tuple(_convert(entry, arguments[0], f"{place}[{i}]") for i, entry in enumerate(value))
    if hint is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)  # YAML takes 1e-3 for text
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise UsageError(f"{place} must be {KINDS.get(hint, hint.__name__)}, not {value!r}.")
