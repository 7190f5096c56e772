"""`namm completion`: the scripts, run by the shells that they are for."""

import re
import shlex
import shutil
import subprocess

import pytest

from namm.cli import COMMANDS, main

TRY = """
source {script}
COMP_WORDS=({words}) COMP_CWORD={place}
_namm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script of a shell in a file."""
    folder = tmp_path_factory.mktemp("scripts")

    def write(shell, capsys):
        path = folder / shell
        if not path.exists():
            assert main(["completion", shell]) == 0
            path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.fixture
def complete(script, tmp_path, capsys):
    """What bash offers for the last of some words, in a folder with two runs."""
    for name in ("first", "sec ond$(touch mark)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    (tmp_path / "runs" / "no run").mkdir()

    def ask(*words):
        quoted = " ".join(map(shlex.quote, ["namm", *words]))
        text = TRY.format(script=script("bash", capsys), words=quoted, place=len(words))
        done = subprocess.run(
            ["bash", "--norc", "-eu", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert not done.stderr
        return [line for line in done.stdout.splitlines() if line]

    yield ask
    assert not (tmp_path / "mark").exists()


pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["s"], ["sweep", "sample", "status", "studio"]),
        (["run", "b"], ["burgers"]),
        (["run", "burgers", "--until", "m"], ["map", "mdm", "mvae"]),
        (["run", "burgers", "--map.train.bu"], ["--map.train.budget"]),
        (["run", "burgers", "--data.corr"], ["--data.correlation", "--data.correlation-length"]),
        (["run", "burgers", "--dr"], ["--dry-run"]),
        (["sample", "first", "--sampler", "d"], ["ddim", "dpm-solver"]),
        (["train", "f"], ["finetune", "few"]),
        (["train", "map", "fl"], ["flux"]),
        (["status", ""], ["first", r"sec\ ond\$\(touch\ mark\)"]),
        (["studio", "f"], ["first"]),
        (["evaluate", "first", "s"], [r"sec\ ond\$\(touch\ mark\)"]),
        (["repair", "first", "--la"], ["--layout"]),
        (["repair", "first", "x.npy", "--layout", ""], ["NCHW", "NHWC"]),
        (["run", "burgers", "--device", ""], ["cpu", "cuda"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["run", "burgers", "--out", ""], []),  # files, which bash knows
    ],
)
def test_bash(complete, words, offered):
    assert complete(*words) == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_runs_are_offered_where_the_usage_names_one(command, capsys):
    main([command, "--help"])
    usage, _, _ = capsys.readouterr().out.partition("\n\n")
    assert COMMANDS[command].takes_run == bool(re.search(r"\bRUN\b", usage))


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_those_that_all_of_the_help_lists(complete, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    call = {
        "run": ["burgers"],
        "train": ["map", "burgers"],
        "sweep": ["burgers"],
        "data": ["burgers"],
        "paper": ["table1"],
        "check": ["m:n"],
        "certify": ["x.npy", "--constraint", "m:n"],
        "evaluate": ["x.npy", "--against", "y.npy", "--constraint", "m:n"],
    }.get(command, [])
    assert main([command, *call, "--help-all"]) == 0
    listed = [line.lstrip("|│ ") for line in capsys.readouterr().out.splitlines()]
    known = {name for line in listed if line[:1] == "-" for name in re.findall(r"(?<![^\s,])--[a-z][a-z0-9.-]*", line)}
    known = {name for name in known if not re.match(r"--(.*\.)?no-", name)}
    assert known
    assert known <= {*complete(command, "-")}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_its_script(script, shell, capsys):
    path = script(shell, capsys)
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    subprocess.run([shell, "-n", path], check=True)


def test_fish_completes(script, tmp_path, capsys):
    if shutil.which("fish") is None:
        pytest.skip("there is no fish here")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").touch()

    def ask(line):
        text = f"source {script('fish', capsys)}; complete -C {shlex.quote(line)}"
        done = subprocess.run(["fish", "-N", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
        return [each.split("\t")[0] for each in done.stdout.splitlines()]

    assert ask("namm stat") == ["status"]
    assert "mine" in ask("namm status m")
    assert ask("namm run --until ma") == ["map"]
    assert ask("namm run burgers --map.train.bu") == ["--map.train.budget"]
