"""The `namm` command. Each subcommand is a module of this package with a `main(arguments)`.

Only the module of the command that was asked for is imported, and none of them imports torch before it has read its
arguments, so that help and mistakes are answered at once. Options are read by tyro, whose import alone takes longer
than all of `namm --help`: hence the table here.
"""

import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

from namm._version import __version__
from namm.errors import NammWarning, UsageError, explain
from namm.experiments.engine.processes import rank_zero_output


class Command(NamedTuple):
    """What a command does, and whether it goes on with what it had begun, may run a user's own rule, and computes.

    `takes_run` says whether names of runs may follow it.
    """

    summary: str
    resumes: bool = False
    trusts: bool = False
    computes: bool = False
    takes_run: bool = False


COMMANDS = {
    "demo": Command("the whole method on a CPU, in minutes, told as it goes", resumes=True, computes=True),
    "run": Command("run an experiment, stage by stage, in a folder that remembers what is done", True, True, True),
    "sweep": Command("run an experiment with many settings, and gather one table", True, True, True),
    "paper": Command("make a table or figure of the paper, running what is missing", resumes=True, computes=True),
    "train": Command("train one thing of an experiment, or the network that counts", True, True, True),
    "sample": Command("draw samples from a run's model into an HDF5 file", True, True, True, True),
    "repair": Command("mend any model's images by a run's map, f(g(x)), and judge them", False, True, True, True),
    "assimilate": Command("sample the images behind noisy, partial observations", True, True, True, True),
    "evaluate": Command("compare a run's samples, or any images, with data", False, True, True, True),
    "export": Command("save a run's model and maps as a pipeline of diffusers", trusts=True, takes_run=True),
    "list": Command("show the runs in a folder"),
    "status": Command("show the stages of a run", takes_run=True),
    "trust": Command("show the Python code of a run's rule, and allow it", takes_run=True),
    "report": Command("write what a run found as one HTML file", trusts=True, takes_run=True),
    "studio": Command(
        "play with a finished run on a local page: samples, mirror space, observations", False, True, True, True
    ),
    "data": Command("draw a dataset into an HDF5 file", resumes=True, computes=True),
    "import": Command("turn a checkpoint of the official code into networks of ours"),
    "check": Command("measure a rule on images and show the worst of them", computes=True),
    "certify": Command("say of every image how far it is from a rule, in float64", computes=True),
    "completion": Command("print a script that completes commands, runs and options in a shell"),
}
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
DEBUG, TRUST, DEVICE = "--debug", "--trust", "--device"


class ExitEarly(Exception):
    """Nothing is left to do: help, or what is wrong with the arguments, has been printed."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = DEBUG in arguments
    command, *rest = [argument for argument in arguments if argument != DEBUG] or ["--help"]
    if command in (*HELP, HELP_ALL):
        print(usage())
        return 0
    if command == "--version":
        print(f"namm {__version__}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean `namm {close[0]}`?" if close else " `namm --help` lists the commands."
        return _fail(f"there is no command {command!r}.{hint}", 2)
    spin_briefly()
    try:
        return _run(command, rest)
    except BrokenPipeError:  # the output went to a program that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return _fail(*explain(error, resumes=COMMANDS[command].resumes))


def spin_briefly() -> None:
    """Let OpenMP's threads, of a torch that is yet to be loaded, spin for microseconds and then sleep.

    By default they spin so long that a second busy process on the same cores makes both many times slower; without
    spinning, small operations wait for threads to wake up.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def _run(command: str, arguments: list[str]) -> int:
    about = COMMANDS[command]
    with ExitStack() as stack:
        stack.enter_context(rank_zero_output())
        stack.enter_context(warnings_as_sentences())
        if about.trusts and TRUST in arguments:
            from namm.experiments.engine.user_rule import accepting

            stack.enter_context(accepting())
            arguments = [argument for argument in arguments if argument != TRUST]
        if about.computes:
            device, arguments = _without_device(arguments)
            if device is not None and not {*HELP, HELP_ALL} & {*arguments}:
                if ("--on", "slurm") in pairwise(arguments) or "--on=slurm" in arguments:
                    raise UsageError(
                        f"{DEVICE} is not for --on slurm, which gives each job its devices: --slurm gpus_per_node=1."
                    )
                from namm.experiments.engine.device import computing_on

                stack.enter_context(computing_on(device))
        try:
            exit_code = import_module(f"namm.cli.{command}").main(arguments)
        except ExitEarly as early:
            exit_code = early.exit_code
    sys.stdout.flush()
    return exit_code or 0


def _without_device(arguments: list[str]) -> tuple[str | None, list[str]]:
    """What --device says, None where it is not there, and the other arguments."""
    found, rest, queue = None, [], [*arguments]  # `list` is a command
    while queue:
        option, equals, value = queue.pop(0).partition("=")
        if option != DEVICE:
            rest.append(option + equals + value)
            continue
        if found is not None:
            raise UsageError(f"{DEVICE} is given twice.")
        if not equals and not queue:
            raise UsageError(f"{DEVICE} needs a value: cpu, cuda, or cuda:N for the GPU N.")
        found = value if equals else queue.pop(0)
    return found, rest


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
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


def usage() -> str:
    """The help text of the command itself."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return f"""usage: namm COMMAND [options]        namm COMMAND --help

Generative models that obey a rule.

{lines}

With any command:
  {HELP[1]} lists the options that people use, {HELP_ALL} says everything of all of them,
  {DEBUG} shows where an error came from.
With those that compute: {DEVICE} cpu, cuda, or cuda:1 for the second GPU.
With those that take a run or its rule: {TRUST} runs the Python code of a rule that a run or a file
  of settings names and that you have not run before; look at it first."""


def _fail(message: str, code: int) -> int:
    print(f"namm: {message}", file=sys.stderr)
    return code
