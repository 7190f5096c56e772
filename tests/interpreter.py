"""Runs scripts with kernels on a CPU by triton's interpreter, each in a process of its own; see `interpreted`.

The interpreter alters the process that it is in, and importing torch takes seconds: this one imports it, once, and
forks for each script. A line of its input is a script, its arguments and a folder for what it prints; it answers with
the script's exit code.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType

import namm.generative
import namm.generative.networks.ncsnpp.kernels
import namm.simulators.burgers_kernels  # noqa: F401

SECONDS = 300


def main() -> None:
    for line in sys.stdin:
        script, arguments, folder = json.loads(line)
        pid = os.fork()
        if not pid:
            run(script, arguments, Path(folder))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(script: str, arguments: list[str], folder: Path) -> None:
    """Run a script as `python -c` would, and end this process."""
    signal.alarm(SECONDS)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = ModuleType("__main__")
    code = 1
    try:
        exec(script, vars(sys.modules["__main__"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
