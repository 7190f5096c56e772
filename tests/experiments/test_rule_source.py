"""The source of a rule: found without running it, hashed whole, and run from what was hashed."""

import json
import os
import py_compile
import subprocess
import sys
import sysconfig
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import namm
from namm.errors import ConstraintError, UntrustedRuleError, UsageError
from namm.experiments.engine.rule_source import FINDER, find_source, locate, without_comments
from namm.experiments.engine.user_rule import accepting, is_trusted, load_rule, read_trusted, record_path
from namm.experiments.own import OwnRule

X = torch.ones(1, 1, 2, 2)
MARK = "import builtins; builtins.marks.append(__name__)\n"
RULE = "def rule(x):\n    return FACTOR * x.abs().mean((1, 2, 3))\n"


@pytest.fixture(autouse=True)
def marks(tmp_path, monkeypatch):
    """The names of the modules that were run, in an empty folder and with nothing trusted."""
    import builtins

    found = []
    monkeypatch.setattr(builtins, "marks", found, raising=False)
    monkeypatch.setenv("NAMM_TRUST", str(tmp_path / "state" / "trusted.json"))
    monkeypatch.setenv("NAMM_TRUSTED", "")
    monkeypatch.setattr(FINDER, "sources", {})
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield found
    for name in set(sys.modules) - before:
        if "stranger" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def folder(tmp_path, **files):
    """A stranger's folder with these files; `__of__` in a name stands for the slash."""
    root = tmp_path / "stranger"
    for name, content in files.items():
        path = root.joinpath(*name.split("__of__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MARK + content)
    return root


TWO = "FACTOR = 2\n"
LAZY = "def rule(x):\n    import helper\n    return helper.FACTOR * x.mean((1, 2, 3))\n"
BY_NAME = "import importlib\nFACTOR = importlib.import_module('.helper', __name__).FACTOR\n" + RULE
PACK, IN_PACK, HELPER = "pack__of____init__", "pack__of__rules", "pack__of__helper"
PLACES = {
    "the module": ({"rules": TWO + RULE}, "rules"),
    "a helper": ({"rules": "from helper import FACTOR\n" + RULE, "helper": TWO}, "rules"),
    "a helper's helper": (
        {"rules": "import helper\nFACTOR = helper.FACTOR\n" + RULE, "helper": "from deep import *\n", "deep": TWO},
        "rules",
    ),
    "a helper in a function": ({"rules": LAZY, "helper": TWO}, "rules"),
    "a package": ({PACK: "", IN_PACK: TWO + RULE}, "pack.rules"),
    "a relative import": ({PACK: "", IN_PACK: "from .helper import FACTOR\n" + RULE, HELPER: TWO}, "pack.rules"),
    "a package's own way": ({PACK: BY_NAME, HELPER: TWO}, "pack"),
    "a folder without __init__": ({"loose__of__rules": TWO + RULE}, "loose.rules"),
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_run_before_it_is_allowed_and_every_file_counts(tmp_path, marks, place):
    files, module = PLACES[place]
    root = folder(tmp_path, **files)
    rule = OwnRule(f"{module}:rule", str(root))
    path = list(sys.path)
    with pytest.raises(UntrustedRuleError, match="neither run nor allowed"):
        rule.build()
    assert marks == []
    with accepting():
        assert rule.build()(X).item() == 2
    assert len(marks) == len(files)
    assert rule.build()(X).item() == 2
    assert len(marks) == len(files)  # each once
    for file in root.rglob("*.py"):
        before = file.read_text()
        file.write_text(before + "\nmarks.append('changed')\n")
        with pytest.raises(UntrustedRuleError, match=str(root)):
            rule.build()
        file.write_text(before + "# a comment changes nothing\n")
        assert rule.build()(X).item() == 2
        file.write_text(before)
    assert "changed" not in marks
    assert sys.path == path


def test_the_same_source_in_another_folder_is_trusted(tmp_path, marks):
    root = folder(tmp_path, **PLACES["a helper"][0])
    with accepting():
        OwnRule("rules:rule", str(root)).build()
    moved = root.rename(tmp_path / "moved stranger")
    assert OwnRule("rules:rule", str(moved)).build()(X).item() == 2
    assert sys.modules["helper"].__file__ == str(moved / "helper.py")


def test_a_rule_that_is_named_is_recorded(tmp_path, monkeypatch):
    root = folder(tmp_path, **PLACES["a helper"][0])
    monkeypatch.chdir(root)
    assert load_rule("rules:rule")(X).item() == 2
    (entry,) = read_trusted().values()
    assert entry["rule"] == "rules:rule"
    assert entry["files"] == [str(root / "helper.py"), str(root / "rules.py")]
    monkeypatch.setenv("NAMM_TRUSTED", "")  # the record alone
    assert OwnRule("rules:rule", str(root)).build()(X).item() == 2


def test_child_processes_inherit_what_was_allowed(tmp_path, monkeypatch):
    root = folder(tmp_path, **PLACES["the module"][0])
    monkeypatch.setenv("NAMM_TRUST", str(tmp_path / "a file" / "trusted.json"))
    (tmp_path / "a file").touch()
    with accepting():
        OwnRule("rules:rule", str(root)).build()
    code = (
        "import sys; from namm.experiments.engine.rule_source import locate; "
        "from namm.experiments.engine.user_rule import is_trusted; "
        "sys.exit(not is_trusted(locate('rules:rule', sys.argv[1])))"
    )

    def child(trusted):
        env = os.environ | {"NAMM_TRUST": str(tmp_path / "none"), "NAMM_TRUSTED": trusted}
        return subprocess.run([sys.executable, "-c", code, str(root)], env=env, check=False).returncode

    assert (child(os.environ["NAMM_TRUSTED"]), child("")) == (0, 1)


def test_neither_python_nor_an_installed_package_is_shadowed(tmp_path, marks, monkeypatch):
    """Nor are missing ones stood in for: what nobody's statement in the rule names is not found."""
    decoys = dict.fromkeys(("json", "torch", "numpy", "sitecustomize", "xformers", "colorsys"), "")
    root = folder(tmp_path, rules="import json, torch, colorsys\nFACTOR = 2\n" + RULE, **decoys)
    monkeypatch.chdir(root)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # Python's, and not imported yet
    assert load_rule("rules:rule")(X).item() == 2
    assert marks == ["rules"]
    assert set(locate("rules:rule").files) == {"rules"}
    assert Path(sys.modules["colorsys"].__file__).is_relative_to(sysconfig.get_path("stdlib"))
    with pytest.raises(ModuleNotFoundError):
        __import__("xformers")


def test_a_rule_may_have_the_name_of_an_installed_module(tmp_path, marks, monkeypatch):
    root = folder(tmp_path, json="from helper import FACTOR\n" + RULE, helper="import json\nFACTOR = json.loads('2')")
    monkeypatch.chdir(root)
    assert load_rule("json:rule")(X).item() == 2
    assert sys.modules["json"] is json
    assert marks == ["_namm_rule_json", "helper"]


def test_compiled_files_are_not_run(tmp_path, marks, monkeypatch):
    """A stranger's __pycache__ may hold anything: a hash that is not checked makes Python believe it."""
    root = folder(tmp_path, rules="FACTOR = 3\n" + RULE)
    py_compile.compile(
        str(root / "rules.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
    )
    (root / "rules.py").write_text("FACTOR = 2\n" + RULE)
    monkeypatch.chdir(root)
    assert load_rule("rules:rule")(X).item() == 2
    assert marks == []


def test_what_a_rule_hides_from_its_import_statements_is_not_found(tmp_path, marks, monkeypatch):
    root = folder(tmp_path, rules="import importlib\nimportlib.import_module('help' + 'er')\n" + RULE, helper="")
    monkeypatch.chdir(root)
    with pytest.raises(ConstraintError, match="No module named 'helper': what lies beside rules is found where"):
        load_rule("rules:rule")
    assert marks == ["rules"]


def test_installed_modules_need_to_be_named_too_and_namms_do_not():
    name = "this:s"
    assert "this" not in sys.modules
    with pytest.raises(UntrustedRuleError, match="the installed module this"):
        OwnRule(name).build()
    assert "this" not in sys.modules
    assert is_trusted(locate("namm.constraints:TotalFlux"))
    assert OwnRule("namm:Burgers").build()(torch.zeros(1, 1, 8, 8)).shape == (1,)
    assert load_rule("torch:norm") is not None
    assert OwnRule("torch:norm").build() is not None
    assert not is_trusted(locate("torch.nn:norm"))


def test_a_folder_called_namm_is_not_namm(tmp_path, marks, monkeypatch):
    root = folder(tmp_path, namm__of____init__=RULE)
    monkeypatch.chdir(root)
    with pytest.raises(UsageError, match="no name in namm called 'rule'"):
        load_rule("namm:rule")
    assert marks == []


def test_rules_of_ours_are_found_though_they_are_imported_when_asked_for(monkeypatch):
    for name in ("TotalFlux", "Count", "Burgers"):
        monkeypatch.delitem(vars(namm), name, raising=False)
    assert load_rule("namm:TotalFlux")(X).shape == (1,)
    with pytest.raises(UsageError, match=r"namm:Count is a class that cannot be made without arguments \("):
        load_rule("namm:Count")
    with pytest.raises(UsageError, match="Did you mean 'Burgers'"):
        load_rule("namm:Burger")


@pytest.mark.parametrize("module", ["../rules", "..rules", "a/b", "rules.", "ru les"])
def test_a_name_does_not_lead_out_of_the_folder(tmp_path, module):
    root = folder(tmp_path, rules=RULE)
    (root / "inner").mkdir()
    assert find_source(module, [root / "inner"]) is None


def test_a_record_that_cannot_be_understood_trusts_nothing(tmp_path):
    root = folder(tmp_path, rules=RULE)
    record_path().parent.mkdir()
    record_path().write_text("{")
    with pytest.raises(UntrustedRuleError, match="cannot be read"):
        OwnRule("rules:rule", str(root)).build()


CODE = st.sampled_from(["x = 1", "x = '#'", "def f():\n    return 1"])
COMMENT = st.text(st.characters(codec="ascii", exclude_characters="\r\n\0\f"))


@given(CODE, COMMENT)
def test_comments_are_left_out_of_the_hash_and_code_is_not(code, comment):
    assert without_comments(f"{code}\n# {comment}\n".encode()) == without_comments(code.encode())
    assert without_comments(f"{code}\ny = {comment!r}\n".encode()) != without_comments(code.encode())
