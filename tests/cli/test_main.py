"""The `namm` command itself."""

import os
import subprocess
import sys

import pytest

import namm.cli
from namm.cli import COMMANDS, main, spin_briefly
from namm.errors import NammError, UsageError


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"namm {namm.__version__}\n"


def test_a_misspelt_command_gets_a_suggestion(capsys):
    assert main(["dmeo"]) == 2
    assert "there is no command 'dmeo'. Did you mean `namm demo`?" in capsys.readouterr().err
    assert main(["xyzzy"]) == 2
    assert "`namm --help` lists the commands" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (NammError("the disk is full."), 1, "namm: the disk is full."),
        (UsageError("n must be positive."), 2, "namm: n must be positive."),
        (KeyboardInterrupt(), 1, "namm: interrupted; the same command goes on where this one stopped."),
    ],
)
def test_errors_are_sentences_with_an_exit_code(error, code, text, monkeypatch, capsys):
    class Broken:
        @staticmethod
        def main(arguments):
            raise error

    monkeypatch.setattr(namm.cli, "import_module", lambda name: Broken)
    assert main(["demo"]) == code
    assert capsys.readouterr().err.strip() == text


def test_unknown_options_exit_with_2(capsys):
    assert main(["demo", "--sed", "3"]) == 2
    assert "--seed" in capsys.readouterr().err


def test_help_into_a_program_that_stops_reading_is_no_error():
    """`namm run burgers --help | head -1` ends without a traceback."""
    help_ = subprocess.Popen(
        [sys.executable, "-m", "namm", "run", "burgers", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    help_.stdout.close()
    assert help_.stderr.read() == b""
    assert help_.wait() == 0


@pytest.mark.parametrize(
    ("already", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "20000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_spin_briefly_unless_told_otherwise(already, after, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in already.items():
        monkeypatch.setenv(name, value)
    spin_briefly()
    assert {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ} == after
