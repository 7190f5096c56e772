"""A rule of the user's own: from `module:name` to the object that measures, where its code may be run.

A run's settings name a Python module. Whoever made the run chose it, so nothing of it is run before its source
(`namm.experiments.engine.rule_source`) is found in this user's own record of trusted rules:

- a rule that the user names (`--constraint module:name`, `namm check module:name`) is run, and recorded;
- a rule that a run's folder or a file of settings names must be in the record, or is refused;
- `--trust` and `namm trust RUN` put it there.

The record is `$NAMM_TRUST`, or `namm/trusted.json` in `$XDG_STATE_HOME`, by default `~/.local/state`: never in a
run's folder. What was allowed is also handed on to child processes, in the environment, for machines that see another
home, or one that cannot be written.

Imports no torch before a rule is loaded.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from namm.errors import (
    ConstraintError,
    NammError,
    RunFolderError,
    UntrustedRuleError,
    UsageError,
    is_out_of_memory,
)
from namm.experiments.engine.folder import now
from namm.experiments.engine.processes import is_main
from namm.experiments.engine.rule_source import Source, import_source, locate
from namm.experiments.engine.rule_text import is_written_out, rule_from_text
from namm.experiments.presets import require_name
from namm.files import locked, write_json
from namm.reading import REASON, damage_as, load_json

if TYPE_CHECKING:
    from namm.constraints import Constraint

TRUST_VARIABLE, INHERITED = "NAMM_TRUST", "NAMM_TRUSTED"
"""Variables of the environment: the record's path, and the fingerprints that a parent process allowed."""

_accepting: ContextVar[bool] = ContextVar("accepting", default=False)
_files: dict[str, Path | None] = {}
"""Files of the modules that rules were loaded from, by name."""


def load_rule(name: str, folder: str = "") -> "Constraint":
    """The rule that `module:name` names, looked for in `folder`, in the current one and among what is installed.

    It is a `Constraint`, a class of them or a function that makes one without arguments, or a function x -> ℓ; or one
    of ours that is written out with its numbers (`namm.experiments.engine.rule_text`). Whoever calls this has chosen
    the rule: its source is recorded as trusted. One that a file names is for `known_rule`.
    """
    source = locate(name, folder)
    allow(source, name)
    return rule_from(name, source)


def known_rule(name: str, folder: str = "", known_hash: str = "") -> "Constraint":
    """The rule of a run; refused, before anything of it is run, where it is not trusted or not what it was."""
    source = locate(name, folder)
    if known_hash and source.code_hash != known_hash:
        raise RunFolderError(
            f"the module of the rule {name} has changed since this run was made with it: put the old one back, or call "
            "`namm run` again, which redoes what depends on it."
        )
    require_trusted(source, name)
    return rule_from(name, source)


def rule_from(name: str, source: Source) -> "Constraint":
    """Import the module of `source` and make its rule, without asking whether it is trusted."""
    from namm.constraints import Constraint, constraint

    if is_written_out(name):
        return rule_from_text(name)
    attribute = name.partition(":")[2]
    module = _import(source)
    _files[source.module] = source.file
    if not hasattr(module, attribute):
        public = [each for each in dir(module) if not each.startswith("_")]
        require_name(attribute, public, f"name in {source.module} called")
    rule = getattr(module, attribute)
    is_class = isinstance(rule, type) and issubclass(rule, Constraint)
    is_factory = not isinstance(rule, Constraint | type) and _takes(rule) and not _takes(rule, "images")
    if is_class and not _takes(rule):
        raise UsageError(
            f"{name} is a class that cannot be made without arguments {inspect.signature(rule)}: name an object of "
            "it instead."
        )
    if is_class or is_factory:
        with blamed_on(name):
            rule = rule()
    if not callable(rule):
        raise UsageError(f"{name} is {rule!r}; it must be a function (B, C, H, W) -> (B,) or a namm.Constraint.")
    rule = rule if isinstance(rule, Constraint) else constraint(rule)
    with suppress(Exception):  # what cannot be copied is used as it is
        return deepcopy(rule)  # moving it to a GPU leaves the module's own where it is
    return rule


def _takes(function: Any, *arguments: Any) -> bool:
    """Whether `function` can be called with these arguments, as far as Python can tell."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _import(source: Source) -> ModuleType:
    try:
        return import_source(source)
    except ModuleNotFoundError as error:
        beside = f": what lies beside {source.module} is found where an import statement names it"
        raise ConstraintError(f"importing {source.module} failed: {error}{beside if source.root else ''}.") from error
    except (Exception, SystemExit) as error:
        raise ConstraintError(f"importing {source.module} failed: {type(error).__name__}: {error}.") from error


@contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Report whatever goes wrong inside as the rule's doing, with the line where it happened."""
    try:
        yield
    except NammError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        file = str(_files.get(name.partition(":")[0]))
        place = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        line = f"{Path(place.filename).name}, line {place.lineno}"
        message = " ".join(str(error).split())
        raise ConstraintError(f"the rule {name} raised {type(error).__name__}: {message} ({line}).") from error


# Trust


@contextmanager
def accepting() -> Iterator[None]:
    """Inside this context every rule is allowed, as the user asked by `--trust`."""
    token = _accepting.set(True)
    try:
        yield
    finally:
        _accepting.reset(token)


def is_trusted(source: Source) -> bool:
    """Whether this user has run or allowed exactly this source; what is part of namm always is."""
    return source.is_ours or source.fingerprint in _inherited() or source.fingerprint in read_trusted()


def _inherited() -> list[str]:
    return list(filter(None, os.environ.get(INHERITED, "").split(",")))


def require_trusted(source: Source, rule: str) -> None:
    """Refuse a source that this user has neither run nor allowed."""
    if _accepting.get():
        allow(source, rule)
    elif not is_trusted(source):
        raise UntrustedRuleError(
            f"the rule {rule} is Python code that you have neither run nor allowed before, and it has not been run: "
            f"{describe(source)}. Look at it; then add --trust to this command, or call `namm trust RUN` first."
        )


def describe(source: Source) -> str:
    """Where the code of a source is, in one line."""
    if source.root is None:
        return f"the installed module {source.module}" + (f" ({source.file})" if source.file else "")
    others = [str(file.path) for file in source.files.values() if file.content is not None and file.path != source.file]
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"{source.file}" + (f", with {', '.join(others[:3])}{more}" if others else "")


def allow(source: Source, rule: str) -> None:
    """Trust `source` in this process and its children, and record it; a record that cannot be written is warned of."""
    if source.is_ours or source.fingerprint in _inherited():
        return
    os.environ[INHERITED] = ",".join([*_inherited(), source.fingerprint])
    try:
        if source.fingerprint not in read_trusted():
            record_trusted(source, rule)
    except NammError as error:
        if is_main():
            print(f"namm: warning: {error} The rule {rule} is trusted for this call alone.", file=sys.stderr)


def record_path() -> Path:
    """Where this user's record is."""
    if given := os.environ.get(TRUST_VARIABLE):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~")) / ".local" / "state"
    return home / "namm" / "trusted.json"


def read_trusted() -> Mapping[str, Any]:
    """What was recorded, by fingerprint."""
    path = record_path()
    sentence = f"{path}, the record of the rules that you trust, cannot be read ({REASON}): mend it or move it away."
    with damage_as(UntrustedRuleError, sentence):
        try:
            return dict(load_json(path)["sources"])
        except FileNotFoundError:
            return {}


def record_trusted(source: Source, rule: str) -> None:
    """Add `source` to the record."""
    path = record_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock"), str(path), wait=True):
            files = [str(file.path) for file in source.files.values() if file.content is not None]
            entry = {"rule": rule, "files": sorted(files) or [describe(source)], "recorded": now()}
            write_json(path, {"sources": {**read_trusted(), source.fingerprint: entry}}, mode=0o600)
    except OSError as error:
        raise NammError(f"{path}, the record of the rules that you trust, cannot be written ({error}).") from error
