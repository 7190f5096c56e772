"""benchmarks/memory.py: memory grows by little more than the images that go in and come out."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "memory.py")


def test_memory_does_not_grow_with_the_file():
    command = [sys.executable, SCRIPT, "--only", "polish", "--n"]
    held = {}
    for n in (64, 1500):
        done = subprocess.run([*command, str(n)], capture_output=True, text=True, check=True)
        held[n] = int(re.search(r"polish: (\d+) MiB", done.stdout)[1])
    # The file and the result have 23 MiB each; float64 copies of all, and gradients, would be many times that.
    assert held[1500] - held[64] < 150
