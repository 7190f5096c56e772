"""How many of our files a reader meets who follows one run: those whose functions it enters.

    python benchmarks/files_entered.py [--list]

The run is `namm run burgers --preset demo`, shrunk to seconds as `namm demo --quick` shrinks it: the same functions,
fewer steps. Prints the number of files by folder, or with `--list` their names, and, last, how many they are against
the bound that we keep.
"""

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import namm

ROOT = Path(namm.__file__).parent
BOUND = 60
"""Files that one run may visit."""


def files_entered(call: Callable[[], object]) -> set[Path]:
    """The files of `namm`, relative to it, that have a function which `call` enters, in any thread."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        # Importing a file runs its module and its classes, which have no fast locals, and enters no function of it.
        if event == "call" and frame.f_code.co_flags & CO_OPTIMIZED:
            entered.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {Path(name).relative_to(ROOT) for name in entered if Path(name).is_relative_to(ROOT)}


def demo_run(folder: Path) -> None:
    """One run from its data to its report, as the command makes it."""
    from namm.cli import main
    from namm.experiments.demo import shrunk
    from namm.experiments.engine.settings_file import to_yaml
    from namm.experiments.presets import preset

    (folder / "quick.yaml").write_text(to_yaml(shrunk(preset("burgers", "demo"))))
    code = main(["run", "--config", str(folder / "quick.yaml"), "--out", str(folder / "run"), "--force"])
    if code:
        raise SystemExit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files' names")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = files_entered(lambda: demo_run(Path(folder)))
    if options.list:
        print(*sorted(path.as_posix() for path in found), sep="\n")
    else:
        for where, count in sorted(Counter(path.parent.as_posix() for path in found).items()):
            print(f"{where:<32}{count}")
    print(f"{len(found)} files entered, {len(found) / BOUND:.2f} of the bound {BOUND}")
    return int(len(found) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
