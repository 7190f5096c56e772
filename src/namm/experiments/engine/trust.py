"""Which rules of others may be run: those whose source this user has run or allowed before.

A run's settings name a Python module. Whoever made the run chose it, so nothing of it is run before its source
(`namm.experiments.engine.rule_source`) is found in this user's own record:

- a rule that the user names (`--constraint module:name`, `namm check module:name`) is run, and recorded;
- a rule that a run's folder or a file of settings names must be in the record, or is refused;
- `--trust` and `namm trust RUN` put it there.

The record is `$NAMM_TRUST`, or `namm/trusted.json` in `$XDG_STATE_HOME`, by default `~/.local/state`: never in a
run's folder. What was allowed is also handed on to child processes, in the environment, for machines that see another
home, or one that cannot be written.

Imports no torch.
"""

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from namm.errors import NammError, UntrustedRuleError
from namm.experiments.engine.folder import now
from namm.experiments.engine.processes import is_main
from namm.experiments.engine.rule_source import Source
from namm.files import open_lock, write_json

RECORD, INHERITED = "NAMM_TRUST", "NAMM_TRUSTED"
"""Variables of the environment: the record's path, and the fingerprints that a parent process allowed."""

_accepting: ContextVar[bool] = ContextVar("accepting", default=False)


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
    inherited = os.environ.get(INHERITED, "").split(",")
    return source.is_ours or source.fingerprint in inherited or source.fingerprint in read_record()


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
    inherited = os.environ.get(INHERITED)
    if source.is_ours or source.fingerprint in (inherited or "").split(","):
        return
    os.environ[INHERITED] = ",".join(filter(None, [inherited, source.fingerprint]))
    try:
        if source.fingerprint not in read_record():
            record(source, rule)
    except NammError as error:
        if is_main():
            print(f"namm: warning: {error} The rule {rule} is trusted for this call alone.", file=sys.stderr)


# The record


def record_path() -> Path:
    """Where this user's record is."""
    if given := os.environ.get(RECORD):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~")) / ".local" / "state"
    return home / "namm" / "trusted.json"


def read_record() -> Mapping[str, Any]:
    """What was recorded, by fingerprint."""
    path = record_path()
    try:
        found = json.loads(path.read_text())
        return dict(found["sources"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UntrustedRuleError(
            f"{path}, the record of the rules that you trust, cannot be read ({error}): mend it or move it away."
        ) from error


def record(source: Source, rule: str) -> None:
    """Add `source` to the record."""
    path = record_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_lock(path.with_name(f".{path.name}.lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = [str(file.path) for file in source.files.values() if file.content is not None]
            entry = {"rule": rule, "files": sorted(files) or [describe(source)], "recorded": now()}
            write_json(path, {"sources": {**read_record(), source.fingerprint: entry}}, mode=0o600)
    except OSError as error:
        raise NammError(f"{path}, the record of the rules that you trust, cannot be written ({error}).") from error
