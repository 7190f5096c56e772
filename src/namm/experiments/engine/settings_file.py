"""Settings as plain values and back: to YAML, to JSON, to a key.

A settings file mirrors the dataclasses: a mapping per dataclass, a list per tuple. What a file leaves out is taken from
the preset it names. Reading is strict: a key that no dataclass has, or a value of another type, is refused with its
place in the file and the nearest name, because a setting that is silently ignored is the most expensive mistake.
"""

import difflib
import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from namm.errors import UsageError
from namm.experiments.engine.data_settings import PLACE
from namm.experiments.presets import Preset, preset, require_name
from namm.files import differences

HEADER = "# Settings of a run of namm. `namm run --config THIS_FILE` uses them again.\n"


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


def digest(value: Any) -> str:
    """A hash of plain values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_yaml(chosen: Preset) -> str:
    """The text of a settings file."""
    content = {"experiment": chosen.experiment, "preset": chosen.name, **plain(chosen.settings)}
    return HEADER + yaml.safe_dump(content, sort_keys=False)


def read_yaml(path: Path) -> Preset:
    """The settings in a file."""
    try:
        return from_yaml(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the settings file {path} cannot be read: {error}.") from error


def from_yaml(text: str, place: str = "settings") -> Preset:
    """The settings in the text of a file that `place` names in errors."""
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"{place} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping) or "experiment" not in content:
        raise UsageError(f"{place} does not say which experiment it is for: add a line `experiment: NAME`.")
    content = dict(content)
    try:
        base = preset(*(str(content.pop(key, "demo")) for key in ("experiment", "preset")))
        return replace(base, settings=_update(base.settings, content, ""))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def changes(before: str, after: str) -> str:
    """Where two settings files differ, for people."""
    try:
        old, new = yaml.safe_load(before), yaml.safe_load(after)
    except yaml.YAMLError:
        old = new = None
    found = differences(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else []
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return "; ".join(found[:4]) + more if found else "the file was written otherwise"


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would quietly take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        if doubles := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {doubles[0]!r} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _update(base: Any, content: Any, place: str) -> Any:
    """The dataclass `base` with the fields that `content` names set to what it says."""
    if not isinstance(content, Mapping):
        raise UsageError(f"{_at(place)} must be a mapping of settings, not {content!r}.")
    hints = get_type_hints(type(base))
    known = [f.name for f in fields(base)]
    changes = {}
    for key, value in content.items():
        here = f"{place}.{key}" if place else str(key)
        _require_known(str(key), known, place)
        old = getattr(base, key)
        changes[key] = _update(old, value, here) if is_dataclass(old) else _convert(value, hints[key], here)
    try:
        return replace(base, **changes)
    except UsageError as error:
        raise UsageError(f"{_at(place)}: {error}") from error


def _require_known(key: str, known: list[str], place: str) -> None:
    if key in known:
        return
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
    inside = f" in {place!r}" if place else ""
    raise UsageError(f"there is no setting {key!r}{inside}. {hint}")


def _convert(value: Any, hint: Any, place: str) -> Any:
    """`value` as the type that `hint` asks for."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _choice(value, arguments, place)
    if origin is tuple:
        return _tuple(value, arguments, place)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        hint = next(argument for argument in arguments if argument is not type(None))
        return _convert(value, hint, place)
    return _scalar(value, hint, place)


def _scalar(value: Any, hint: type, place: str) -> Any:
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 1e-3 for text
        except (TypeError, ValueError):
            pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UsageError(f"{place} must be {kinds.get(hint, hint.__name__)}, not {value!r}.")


def _choice(value: Any, allowed: tuple[Any, ...], place: str) -> Any:
    if value in allowed:
        return value
    if isinstance(value, str):
        require_name(value, allowed, f"choice for {place} called")
    raise UsageError(f"{place} must be one of {', '.join(map(str, allowed))}, not {value!r}.")


def _tuple(value: Any, arguments: tuple[Any, ...], place: str) -> tuple[Any, ...]:
    any_length = arguments[-1:] == (Ellipsis,)
    if not isinstance(value, list) or not (any_length or len(value) == len(arguments)):
        count = "" if any_length else f" of {len(arguments)} values"
        raise UsageError(f"{place} must be a list{count}, not {value!r}.")
    return tuple(_convert(entry, arguments[0], f"{place}[{i}]") for i, entry in enumerate(value))


def _at(place: str) -> str:
    return place or "the file"
