"""Help, mistakes and looking around answer without loading what only computing needs."""

import json
import subprocess
import sys

import pytest

from namm.cli import COMMANDS

HEAVY = ("torch", "matplotlib", "h5py", "diffusers", "accelerate", "scipy", "numpy")
CALLS = [
    (["--help"], 0, "check"),
    (["--version"], 0, "namm "),
    (["dmo"], 2, "Did you mean `namm demo`?"),
    *(([name, "--help"], 0, f"namm {name}") for name in COMMANDS),
    (["run", "--help"], 0, "--until STAGE"),
    (["run", "burgers", "--help"], 0, "--map.train.budget"),
    (["run", "burgers", "--help-all"], 0, "--vae.beta"),
    (["sample", "--help"], 0, "--polish"),
    (["completion", "zsh"], 0, "compdef _namm namm"),
    (["run", "burgers", "--until", "mpa"], 2, "Did you mean 'map'?"),
    (["run", "burgers", "--map.train.bugdet", "3 steps"], 2, "--map.train.budget"),
    (["run"], 2, "usage: namm run"),
    (["train", "--help"], 0, "at equal compute"),
    (["train", "mdm", "burgers", "--help"], 0, "--mdm.train.budget"),
    (["train", "counter", "--help"], 0, "--n-train"),
    (["sample", "--help"], 0, "--batch-size"),
    (["sample", "nowhere"], 2, "there is no run 'nowhere'"),
    (["export", "--help"], 0, "NAMMPipeline.from_pretrained"),
    (["export", "nowhere"], 2, "--out"),
    (["evaluate", "--help"], 0, "--against"),
    (["evaluate", "nowhere"], 2, "there is no run 'nowhere'"),
    (["report", "nowhere"], 2, "there is no run 'nowhere'"),
    (["data", "--help"], 0, "unit-cells"),
    (["data", "--help"], 0, "galaxies"),
    (["data", "burgers", "--help"], 0, "--n-train"),
    (["check", "--help"], 0, "module:name"),
    (["check", "burgers", "--help"], 0, "--step"),
    (["list", "--help"], 0, "usage: namm list"),
    (["list"], 0, "no runs"),
    (["status", "--help"], 0, "stale"),
    (["paper"], 2, "usage: namm paper ITEM"),
    (["paper", "--help"], 0, "fig10"),
    (["paper", "table1", "--help"], 0, "--experiments"),
    (["paper", "tabel1"], 2, "Did you mean 'table1'?"),
    (["paper", "--seeds", "1"], 2, "comes first"),
    (["paper", "table1", "--experiments", "burger"], 2, "Did you mean 'burgers'?"),
    (["paper", "table1", "--preset", "gup"], 2, "Did you mean 'gpu'?"),
    (["paper", "table1", "--seeds", "1", "1"], 2, "each once"),
    (["paper", "table1", "--on", "moon"], 2, "slurm"),
    (["paper", "table1", "--slurm", "partition=gpu"], 2, "add --on slurm"),
    (["paper", "table1", "--on", "slurm", "--slurm", "gpu"], 2, "KEY=VALUE"),
    (["paper", "table1", "--on", "local", "--jobs", "0"], 2, "--jobs takes whole numbers of 1 or more"),
    (["paper", "table1", "--jobs", "2"], 2, "add --on local or --on slurm"),
]
PROGRAM = f"""
import contextlib, io, json, os, sys
from namm.cli import main
for arguments in json.load(sys.stdin):
    before, said = set(sys.modules), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments)
    loaded = sorted((set(sys.modules) - before) & set({HEAVY!r}))
    print(json.dumps([code, said.getvalue(), loaded, os.listdir()]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each call answers, what it was the first to load and what it leaves; all in one new process.

    The calls that must load nothing load nothing, so that each begins as in a process of its own.
    """
    calls = json.dumps([arguments for arguments, *_ in CALLS])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=calls,
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("empty"),
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("k", range(len(CALLS)), ids=[" ".join(arguments) for arguments, *_ in CALLS])
def test_without_torch(answers, k):
    _, code, said = CALLS[k]
    answered, printed, loaded, left = answers[k]
    assert (answered, loaded, left) == (code, [], []), printed
    assert said in printed


def test_help_into_a_pipe_that_closes_ends_quietly():
    command = f"{sys.executable} -m namm run burgers --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: namm run")
    assert "Traceback" not in done.stderr
