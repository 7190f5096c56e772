"""A run that somebody else made runs none of their Python, whatever command takes it, until it is allowed."""

import json
import os
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
import yaml
from own_files import MARK, OWN, TINY

from namm.cli import COMMANDS
from namm.experiments.engine.user_rule import record_path

SETTINGS = "stranger/runs/own/settings.yaml"
RUN = "stranger/runs/own"
SAMPLE = ["sample", RUN, "-n", "2", "-o", "s.h5", "--steps", "3"]
LOOKING = {
    "status": ["status", RUN],
    "list": ["list", "stranger/runs"],
    "evaluate": ["evaluate", RUN],
    "report": ["report", RUN],
    "trust": ["trust", RUN],
}
USING = {
    "sample": SAMPLE,
    "repair": ["repair", RUN, "stranger/ions.h5", "--key", "density", "--layout", "NCHW", "-o", "r.h5"],
    "export": ["export", RUN, "-o", "pipeline"],
    "assimilate": ["assimilate", RUN, "--observe", "mask:0.5", "--truths", "1", "-n", "2", "--steps", "2"],
    "studio": ["studio", RUN, "--no-open"],
    "run": ["run", "--config", SETTINGS, "--out", RUN],
    "train": ["train", "map", "--config", SETTINGS, "--out", RUN],
    "sweep": ["sweep", "--config", SETTINGS, "--vary", "map.sigma_max=0.1,0.2"],
}


@pytest.fixture
def mark(own_run, tmp_path, monkeypatch):
    """A stranger's folder in the current one, and the file that their code would make."""
    folder = shutil.copytree(own_run, tmp_path / "stranger")
    said = yaml.safe_load((folder / "runs/own/settings.yaml").read_text())
    said["data"]["folder"] = str(folder)
    (folder / "runs/own/settings.yaml").write_text(yaml.safe_dump(said))
    for name in ("json", "torch", "sitecustomize", "xformers"):
        for place in (folder, tmp_path):
            (place / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAMM_TRUST", str(tmp_path / "state" / "trusted.json"))
    monkeypatch.setenv("NAMM_TRUSTED", "")
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    sys.modules.pop("charges", None)
    yield tmp_path / "mark"
    sys.modules.pop("charges", None)


@pytest.mark.parametrize("command", LOOKING)
def test_looking_at_a_run_runs_nothing(mark, namm, command):
    code, said = namm(*LOOKING[command])
    assert (code, mark.exists()) == (0, False), said


@pytest.mark.parametrize("command", USING)
def test_a_rule_that_was_never_run_is_refused_with_its_place_and_the_remedy(mark, namm, command):
    code, said = namm(*USING[command])
    assert (code, mark.exists()) == (1, False), said
    assert "the rule charges:neutral is Python code" in said
    assert "stranger/charges.py" in said
    assert "--trust" in said
    assert "`namm trust RUN`" in said


def test_every_command_that_may_run_a_rule_takes_the_option():
    trusting = {name for name, command in COMMANDS.items() if command.trusts}
    assert trusting == {*USING, "evaluate", "report"}


def test_an_evaluation_that_is_missing_needs_the_rule(mark, namm):
    shutil.rmtree(mark.parent / RUN / "evaluate")
    code, said = namm("evaluate", RUN)
    assert (code, mark.exists(), "--trust" in said) == (1, False, True)
    assert "evaluate" in namm("status", RUN)[1]


def test_the_option_runs_it_and_is_remembered(mark, namm):
    code, said = namm(*SAMPLE, "--trust")
    assert (code, mark.exists()) == (0, True), said
    record = json.loads(record_path().read_text())["sources"]
    assert [entry["rule"] for entry in record.values()] == ["charges:neutral"]
    assert stat.S_IMODE(record_path().stat().st_mode) == 0o600
    assert namm(*USING["export"])[0] == 0


def test_trust_shows_the_code_and_runs_none_of_it(mark, namm, monkeypatch):
    monkeypatch.setenv("NAMM_TRUSTED", "")
    charges = mark.parent / "stranger/charges.py"
    charges.write_text(charges.read_text() + "# \x1b[2J\u202e hidden\n")
    code, said = namm("trust", RUN)
    assert (code, mark.exists()) == (0, False)
    assert str(charges) in said
    assert "def neutral(x):" in said
    assert r"# \x1b[2J\u202e hidden" in said
    assert namm(*SAMPLE)[0] == 0
    assert mark.exists()


def test_trust_takes_a_file_of_settings_and_says_where_there_is_nothing_to_allow(mark, namm):
    assert "def neutral(x):" in namm("trust", SETTINGS)[1]
    (mark.parent / "ours.yaml").write_text("experiment: burgers\n")
    code, said = namm("trust", "ours.yaml")
    assert (code, "one of namm's own" in said) == (0, True)


def test_a_record_that_cannot_be_written_is_said_and_the_call_goes_on(mark, namm):
    (mark.parent / "state").write_text("a file, where a folder should be")
    code, said = namm(*SAMPLE, "--trust")
    assert (code, mark.exists()) == (0, True), said
    assert "namm: warning:" in said
    assert "trusted for this call alone" in said
    code, said = namm("trust", RUN)
    assert code == 1
    assert "cannot be" in said


def test_what_the_user_names_is_trusted_from_then_on(mark, namm, monkeypatch):
    """Also in a run that moved: what counts is the source, not its place."""
    monkeypatch.chdir(mark.parent / "stranger")
    code, said = namm("check", "charges:neutral", "ions.h5", "--key", "density", "--layout", "NCHW")
    assert (code, mark.exists()) == (0, True), said
    monkeypatch.chdir(mark.parent)
    shutil.copytree("stranger", "moved")
    shutil.rmtree("stranger")
    monkeypatch.chdir(mark.parent / "moved")
    assert namm("sample", "own", "-n", "2", "-o", "s.h5", "--steps", "3")[0] == 0


def test_a_rule_that_the_user_names_is_not_looked_for_in_the_folder_of_a_file(mark, namm):
    code, said = namm("run", "--config", SETTINGS, "--data.constraint", "charges:neutral", "--out", "new")
    assert (code, mark.exists()) == (2, False), said
    assert "there is no module 'charges'" in said


@pytest.fixture
def reported(monkeypatch):
    """The contents of the reports that are written; drawing them takes seconds."""
    found = []
    monkeypatch.setattr(
        "namm.experiments.engine.stages.report.render_page", lambda contents: found.append(contents) or "drawn"
    )
    return found


def test_the_report_of_a_run_of_version_0_1_leaves_the_residual_out_unless_it_is_trusted(mark, namm, reported):
    (mark.parent / RUN / "evaluate/rule.json").unlink()
    shutil.rmtree(mark.parent / RUN / "report")
    code, said = namm("report", RUN)
    assert (code, mark.exists()) == (0, False), said
    (problem,) = reported[-1].problems
    assert problem.startswith("the rule's residual: UntrustedRuleError: the rule charges:neutral is Python code")
    assert len(reported[-1].methods) == 2
    assert namm("report", RUN, "--trust")[0] == 0
    assert mark.exists()
    assert not reported[-1].problems


def test_a_partial_report_of_a_stranger_needs_no_rule(mark, namm, reported):
    shutil.rmtree(mark.parent / RUN / "evaluate")
    code, said = namm("report", RUN)
    assert (code, mark.exists(), reported[-1].problems) == (0, False, []), said


def test_the_report_shows_residuals_as_they_were_kept(mark, namm, rewrite, reported):
    evaluated, names = mark.parent / RUN / "evaluate", ("ours_first", "ours_worst", "baseline_first", "baseline_worst")
    facts = json.loads((evaluated / "rule.json").read_text())
    assert (facts["name"], facts["has_residual"], facts["has_project"]) == ("neutral", False, False)
    np.savez(evaluated / "residuals.npz", **{name: np.full((4, 1, 8, 8), k) for k, name in enumerate(names)})
    facts |= {"shows": "velocity", "problem": "RuntimeError: too many"}
    rewrite(evaluated / "rule.json", facts)
    assert namm("report", RUN)[0] == 0
    seen = [method.residuals.mean() for method in (*reported[-1].methods, *reported[-1].worst)]
    assert (seen, reported[-1].view.label) == ([0, 2, 1, 3], "velocity u")
    assert reported[-1].problems == ["the rule's residual: RuntimeError: too many"]
    (evaluated / "residuals.npz").write_bytes(b"PK cut short")
    rewrite(evaluated / "rule.json", facts)
    assert namm("report", RUN)[0] == 0
    assert "residuals.npz cannot be read" in reported[-1].problems[0]
    assert not mark.exists()


def test_files_of_the_current_folder_are_nobodys_modules(mark):
    """`python -m` puts it first on the path: a json.py there is not the one that is imported."""
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, "-m", "namm", "status", RUN], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


def test_own_runs_are_as_before(mark, namm, monkeypatch):
    """The folder's owner, who named the rule, is asked for nothing."""
    monkeypatch.chdir(mark.parent / "stranger")
    code, said = namm("run", *OWN, *TINY)
    assert (code, said.count("done before")) == (0, 9)
    assert namm("run", "--config", "runs/own/settings.yaml")[0] == 0
