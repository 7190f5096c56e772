"""The `namm` command. Each subcommand is a module of this package with a `main(arguments) -> exit code`.

Only the module of the command that was asked for is imported, and none of them imports torch before it has read its
arguments, so that help and mistakes are answered at once.
"""

import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from namm._version import __version__
from namm.cli.failures import explain
from namm.errors import NammWarning
from namm.experiments.engine.processes import one_voice

COMMANDS = {
    "demo": "the whole method on a CPU, in minutes, told as it goes",
    "run": "run an experiment, stage by stage, in a folder that remembers what is done",
    "sweep": "run an experiment with many settings, here, as processes or as Slurm jobs, and gather one table",
    "paper": "make a table or figure of the paper, running what is missing",
    "train": "train one thing of an experiment: map, models, finetuning; or the network that counts",
    "sample": "draw samples from a run's model into an HDF5 file",
    "assimilate": "sample the images behind noisy, partial observations",
    "evaluate": "compare a run's samples, or any images, with data",
    "export": "save a run's model and maps as a pipeline of diffusers",
    "list": "show the runs in a folder",
    "status": "show the stages of a run",
    "trust": "show the Python code of a run's rule, and allow it",
    "report": "write what a run found as one HTML file",
    "data": "draw a dataset into an HDF5 file",
    "import": "turn a checkpoint of the official code into networks of ours",
    "check": "measure a rule on images and show the worst of them",
}

DEBUG, TRUST = "--debug", "--trust"
TRUSTING = ("run", "train", "sweep", "sample", "assimilate", "evaluate", "export", "report")
"""Commands that may run the rule of a user's own that a run or a file of settings names."""


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 done, 1 failed, 2 wrong usage."""
    given = sys.argv[1:] if arguments is None else arguments
    debug, arguments = DEBUG in given, [argument for argument in given if argument != DEBUG]
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"namm {__version__}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean `namm {close[0]}`?" if close else " `namm --help` lists the commands."
        return _fail(f"there is no command {command!r}.{hint}", 2)
    return _run(command, rest, debug)


def spin_briefly() -> None:
    """Let OpenMP's threads, of a torch that is yet to be loaded, spin for microseconds and then sleep.

    By default they spin so long that a second busy process on the same cores makes both many times slower; without
    spinning, small operations wait for threads to wake up.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def _run(command: str, arguments: list[str], debug: bool) -> int:
    spin_briefly()
    trust = command in TRUSTING and TRUST in arguments
    if trust:
        arguments = [argument for argument in arguments if argument != TRUST]
    try:
        with one_voice(), sentences(), _accepting(trust):
            code: int = import_module(f"namm.cli.{command}").main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the output went to a program that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return _fail(*explain(error, command))
    return code


@contextmanager
def sentences() -> Iterator[None]:
    """Print our own warnings as sentences, without the line of code that they come from."""
    full = warnings.formatwarning

    def short(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
        if issubclass(category, NammWarning):
            return f"namm: warning: {message}\n"
        return full(message, category, *place, **more)

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = full


def _accepting(trust: bool) -> AbstractContextManager[None]:
    if not trust:
        return nullcontext()
    from namm.experiments.engine.trust import accepting

    return accepting()


def usage() -> str:
    """The help text of the command itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: namm COMMAND [options]        namm COMMAND --help",
            "",
            "Generative models that obey a rule.",
            "",
            *lines,
            "",
            f"{DEBUG}, with any command, shows where an error came from.",
            f"{TRUST}, with {', '.join(TRUSTING[:-1])} and {TRUSTING[-1]}, runs the Python code of a",
            "rule that a run or a file of settings names and that you have not run before; look at it first.",
        ]
    )


def _fail(message: str, code: int) -> int:
    print(f"namm: {message}", file=sys.stderr)
    return code
