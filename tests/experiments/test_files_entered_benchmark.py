"""Counting the files that a call enters: functions count, importing does not."""

import subprocess
import sys
from pathlib import Path

import files_entered
from namm.training.settings import Budget


def test_only_the_files_of_entered_functions_are_counted():
    assert files_entered.files_entered(lambda: Budget.parse("3 steps")) == {Path("training/settings.py")}
    assert files_entered.files_entered(lambda: None) == set()


def test_importing_a_file_is_not_entering_it():
    code = (
        "import files_entered\n"
        "print(files_entered.files_entered(lambda: __import__('namm.experiments.engine.experiment')))"
    )
    folder = str(Path(files_entered.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{code}"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_the_names_are_printed_where_they_are_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(files_entered, "demo_run", lambda folder: Budget.parse("3 steps"))
    assert files_entered.main(["--list"]) == 0
    names, last = capsys.readouterr().out.splitlines()
    assert names == "training/settings.py"
    assert last.startswith("1 files entered")
