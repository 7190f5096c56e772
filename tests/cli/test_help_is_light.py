"""Help, mistakes and looking around answer without loading what only computing needs."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "h5py", "diffusers", "accelerate")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "check"),
        (["run", "--help"], 0, "--until STAGE"),
        (["run", "burgers", "--help"], 0, "--map.train.budget"),
        (["run", "burgers", "--help-all"], 0, "--vae.beta"),
        (["sample", "--help"], 0, "--polish"),
        (["completion", "zsh"], 0, "compdef _namm namm"),
        (["run", "burgers", "--until", "mpa"], 2, "Did you mean 'map'?"),
        (["run", "burgers", "--map.train.bugdet", "3 steps"], 2, "--map.train.budget"),
        (["run"], 2, "usage: namm run"),
        (["data", "--help"], 0, "unit-cells"),
        (["data", "burgers", "--help"], 0, "--n-train"),
        (["check", "--help"], 0, "module:name"),
        (["check", "burgers", "--help"], 0, "--step"),
        (["list", "--help"], 0, "usage: namm list"),
        (["list"], 0, "no runs"),
        (["status", "--help"], 0, "stale"),
    ],
)
def test_without_torch(tmp_path, arguments, code, said):
    script = (
        "import sys; from namm.cli import main; code = main(sys.argv[1:]); "
        f"loaded = sorted(set({HEAVY!r}) & set(sys.modules)); "
        "sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "loaded" not in done.stderr
    assert said in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_help_into_a_pipe_that_closes_ends_quietly():
    command = f"{sys.executable} -m namm run burgers --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: namm run")
    assert "Traceback" not in done.stderr
