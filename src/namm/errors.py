"""Errors a user can act on: each names the value, the place and the remedy.

The command line prints the sentence alone, without a traceback, and exits with `exit_code`.
"""

import errno


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory has run out, in any of the ways that Python, NumPy and torch say it."""
    if isinstance(error, MemoryError | MemoryShortage) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SHORTAGE)
