"""Errors a user can act on: each names the value, the place and the remedy.

The command line prints the sentence that `explain` makes of an error, without a traceback, and exits with the code
beside it: 1 failed or interrupted, 2 wrong usage.
"""

import errno
import re


class NammError(Exception):
    """Base of every error that `namm` raises on purpose."""

    exit_code = 1


class UsageError(NammError):
    """The call itself is wrong: an unknown name, a setting out of range."""

    exit_code = 2


class ConstraintError(NammError):
    """A constraint breaks its contract: shape, sign, type, NaN or gradient."""


class DataError(NammError):
    """Data that cannot be used: wrong rank, size, NaN, or they break their own constraint."""


class CheckpointError(NammError):
    """A checkpoint is missing, truncated or corrupt."""


class RunFolderError(NammError):
    """A run folder is foreign, unwritable, locked, or belongs to other settings."""


class FolderInUseError(RunFolderError):
    """Another process is at work in a run folder."""


class UntrustedRuleError(RunFolderError):
    """A run names Python code that this user has neither run nor allowed."""


class TrainingError(NammError):
    """Training cannot go on: the loss is not finite, or an objective is misused."""


class VerdictError(NammError):
    """A run stops because what it has made so far is not worth going on with."""


class MemoryShortage(NammError):
    """The memory of the machine or of its GPU is too small for what was asked."""


class Interrupted(NammError):
    """Work was asked to stop (SIGTERM or Ctrl-C) and saved its state first."""


class NammWarning(UserWarning):
    """Data or settings that can be used but seldom should be; the command line prints the sentence alone."""


SHORTAGE = ("out of memory", "not enough memory", "DefaultCPUAllocator", "ALLOC_FAILED", "bad allocation")
"""What allocators say that have no error of their own: torch's for the CPU, CUDA's libraries."""
LONGEST = 1000
"""Characters of a message; libraries can say more than anybody reads."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory has run out, in any of the ways that Python, NumPy and torch say it."""
    if isinstance(error, MemoryError | MemoryShortage) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SHORTAGE)


def explain(error: BaseException, *, resumes: bool) -> tuple[str, int]:
    """One sentence and the exit code for any error; `resumes` says whether the same command, called again, goes on."""
    if isinstance(error, NammError):
        return _shortened(str(error)), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted; the same command {'goes on where this one stopped' if resumes else 'starts again'}.", 1
    first_line = _shortened(str(error).strip().partition("\n")[0])
    if is_out_of_memory(error):
        return (
            f"memory has run out ({first_line or 'the machine has no more'}): ask for smaller batches "
            "(batch_size), networks or images, or free what other programs hold.",
            1,
        )
    if isinstance(error, OSError) and error.strerror:
        return _about_files(error), 1
    remedy = ""
    if any(word in str(error) for word in ("CUDA", "cuDNN", "CUBLAS", "NVIDIA")):
        remedy = " The GPU or its driver failed: see `nvidia-smi`, or go without it by setting CUDA_VISIBLE_DEVICES=-1."
    message = f"{type(error).__name__}: {first_line}".rstrip(" .:")
    return f"{message}.{remedy} --debug shows where it happened.", 1


def _about_files(error: OSError) -> str:
    place = f" ({error.filename})" if error.filename else ""
    message = f"{str(error.strerror)[:1].lower()}{str(error.strerror)[1:]}{place}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{message}: free some; nothing that was complete is lost."
    if not error.filename:
        return f"{message}. --debug shows where it happened."
    return f"{message}: choose another file or folder, or change its permissions."


def _shortened(text: str) -> str:
    text = re.sub(r"\s*\n\s*", " ", text.strip())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … (--debug shows all)"
