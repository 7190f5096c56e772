"""Errors a user can act on: each names the value, the place and the remedy.

The command line prints the sentence alone, without a traceback, and exits with `exit_code`.
"""


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


class TrainingError(NammError):
    """Training cannot go on: the loss is not finite, or an objective is misused."""


class Interrupted(NammError):
    """Training was asked to stop (SIGTERM or Ctrl-C) and saved its state first."""
