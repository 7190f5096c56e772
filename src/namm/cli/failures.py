"""What a person is told when a command fails: one sentence and an exit code, whatever it was that failed.

0 done, 1 failed or interrupted, 2 wrong usage.
"""

import errno
import re

from namm.errors import NammError, is_out_of_memory

RESUMING = ("assimilate", "data", "demo", "paper", "run", "sample", "sweep", "train")
"""Commands that, called again, go on with what they had begun."""
LONGEST = 1000
"""Characters of a message; libraries can say more than anybody reads."""


def explain(error: BaseException, command: str) -> tuple[str, int]:
    """The sentence and the exit code for `error`."""
    if isinstance(error, NammError):
        return _shortened(str(error)), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        again = "goes on where this one stopped" if command in RESUMING else "starts again"
        return f"interrupted; the same command {again}.", 1
    if is_out_of_memory(error):
        return (
            f"memory has run out ({_first_line(error) or 'the machine has no more'}): ask for smaller batches "
            "(batch_size), networks or images, or free what other programs hold.",
            1,
        )
    if isinstance(error, OSError) and error.strerror:
        return _about_files(error), 1
    said = f"{type(error).__name__}: {_first_line(error)}".rstrip(" .:")
    return f"{said}.{_remedy(error)} --debug shows where it happened.", 1


def _about_files(error: OSError) -> str:
    place = f" ({error.filename})" if error.filename else ""
    what = f"{str(error.strerror)[:1].lower()}{str(error.strerror)[1:]}{place}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}: free some; nothing that was complete is lost."
    if not error.filename:
        return f"{what}. --debug shows where it happened."
    return f"{what}: choose another file or folder, or change its permissions."


def _remedy(error: BaseException) -> str:
    if any(word in str(error) for word in ("CUDA", "cuDNN", "CUBLAS", "NVIDIA")):
        return " The GPU or its driver failed: see `nvidia-smi`, or go without it by setting CUDA_VISIBLE_DEVICES=-1."
    return ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _shortened(lines[0].strip()) if lines else ""


def _shortened(text: str) -> str:
    text = re.sub(r"\s*\n\s*", " ", text.strip())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … (--debug shows all)"
