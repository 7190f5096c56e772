"""`namm report` as a person calls it."""

import webbrowser

import pytest

from namm.cli import main

SHORT = ["--data.size", "8", "--data.n-train", "8", "--data.n-val", "4", "--data.n-test", "0"]


@pytest.fixture
def namm(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_partial_run_is_said_to_be_one_and_the_path_comes_last(namm, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert namm("run", "periodic", "--until", "data", *SHORT)[0] == 0
    code, out, _ = namm("report", "periodic")
    assert code == 0
    assert "its report is partial" in out
    assert out.splitlines()[-1] == "runs/periodic/partial-report.html"
    assert "This report is partial." in (tmp_path / "runs/periodic/partial-report.html").read_text()
    assert not opened
    assert namm("report", "--open", "runs/periodic")[0] == 0
    assert opened == [(tmp_path / "runs/periodic/partial-report.html").as_uri()]
    assert namm("run", "periodic", "--until", "data", *SHORT)[0] == 0  # the run goes on as before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no run 'nowhere'"),
        (["--open"], "RUN"),
        (["a", "b"], "Unrecognized options: b"),
        (["a", "--opne"], "--open"),
    ],
)
def test_wrong_usage_is_answered_with_exit_code_2(namm, tmp_path, arguments, message):
    code, out, err = namm("report", *arguments)
    assert code == 2
    assert message in err
    assert not out
    assert not list(tmp_path.iterdir())


def test_help(namm):
    code, out, _ = namm("report", "--help")
    assert code == 0
    assert "usage: namm report RUN [options]" in out
    assert namm("report")[0] == 2
    assert "report" in namm("--help")[1]
