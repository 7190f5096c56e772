"""A user's own rule: what may be named, from where, and what is said of one that cannot be used."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from namm.errors import ConstraintError, MemoryShortage, RunFolderError, UsageError
from namm.experiments.engine.rule_source import locate
from namm.experiments.engine.user_rule import blamed_on, load_rule
from namm.experiments.own import OwnData, OwnRule, prepare
from namm.experiments.presets import OWN, preset

RULES = """
import threading
import torch
from namm import Constraint, constraint

FACTOR = 2.0

def plain(x):
    return FACTOR * x.abs().mean((1, 2, 3))

def optional(x=None):
    return x.abs().mean((1, 2, 3))

@constraint
def decorated(x):
    return x.abs().mean((1, 2, 3))

class Bounded(Constraint):
    def __init__(self, most=2.0):
        super().__init__()
        self.most = most

    def distance(self, x):
        return (x - self.most).clamp(min=0).mean((1, 2, 3))

made = Bounded(0.5)

def factory():
    return Bounded(0.25)

network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1), torch.nn.Flatten(0))

def raises(x):
    raise ValueError("no\\nsuch thing")

SEEN = []

class Placed(Bounded):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(1))

    def forward(self, x):
        SEEN.append((x.device.type, self.mask.device.type))
        return super().forward(x)

class Locked(Bounded):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

locked = Locked()

def fails(x):
    raise IndexError("too late")

def balanced(x):
    return x.mean((1, 2, 3)).abs()

late_residual = constraint(balanced, residual=fails)
late_project = constraint(balanced, project=fails)
odd_residual = constraint(balanced, residual=lambda x: x.sum())
odd_project = constraint(balanced, project=lambda x: x[:, :, :2])
whole = constraint(balanced, residual=lambda x: x, project=torch.zeros_like)
"""
X = torch.tensor([[[[1.0, -3.0], [0.0, 4.0]]]])


@pytest.fixture(autouse=True)
def _rules(tmp_path, monkeypatch):
    (tmp_path / "bag_of_rules.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("bag_of_rules", None)


@pytest.mark.parametrize(
    ("name", "distance"),
    [("plain", 4.0), ("optional", 2.0), ("decorated", 2.0), ("Bounded", 0.5), ("made", 1.0), ("factory", 1.125)],
)
def test_whatever_measures_images_can_be_named(name, distance):
    assert load_rule(f"bag_of_rules:{name}")(X).tolist() == pytest.approx([distance])


def test_a_network_is_a_rule_too():
    assert load_rule("bag_of_rules:network")(X).shape == (1,)


def test_what_is_done_to_a_rule_is_not_done_to_the_modules_own():
    load_rule("bag_of_rules:network").to(torch.float64)
    module = sys.modules["bag_of_rules"]
    assert module.network[1].weight.dtype == torch.float32
    load_rule("bag_of_rules:made").most = 7.0
    assert module.made.most == 0.5
    assert load_rule("bag_of_rules:locked").lock is module.locked.lock  # cannot be copied


def prepared(name):
    """The experiment with 40 images of mean 0 and that rule."""
    x = np.random.default_rng(0).standard_normal((40, 1, 8, 8))
    np.save("balanced.npy", (x - x.mean((1, 2, 3), keepdims=True)).astype(np.float32))
    asked = replace(preset(OWN).settings, data=OwnData(file="balanced.npy", constraint=f"bag_of_rules:{name}"))
    return prepare(asked, (), lambda line: None)


def test_a_rule_is_tried_where_it_will_be_trained_with(monkeypatch):
    """A device without values: that the rule came there with the images is seen, and that it is named."""
    monkeypatch.setattr("namm.experiments.engine.build.device", lambda: torch.device("meta"))
    with pytest.raises(ConstraintError, match="the rule bag_of_rules:Placed raised"):
        prepared("Placed")
    assert set(sys.modules["bag_of_rules"].SEEN) == {("meta", "meta")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("late_residual", "the rule bag_of_rules:late_residual raised IndexError: too late"),
        ("late_project", "the rule bag_of_rules:late_project raised IndexError: too late"),
        ("odd_residual", "the residual of balanced must be a tensor with one entry per image"),
        ("odd_project", r"project of balanced turned images \(2, 1, 8, 8\) into \(2, 1, 2, 8\)"),
    ],
)
def test_what_is_needed_after_the_training_is_tried_before_it(name, message):
    with pytest.raises(ConstraintError, match=message):
        prepared(name)
    assert prepared("whole").data.n_train == 32


def test_a_module_of_the_same_name_in_another_folder_is_another_module(tmp_path, monkeypatch):
    assert load_rule("bag_of_rules:plain")(X).item() == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "bag_of_rules.py").write_text(RULES.replace("2.0", "6.0"))
    monkeypatch.chdir(tmp_path / "other")
    assert load_rule("bag_of_rules:plain")(X).item() == 12


def test_a_rule_is_found_from_elsewhere_by_its_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="there is no module 'bag_of_rules'"):
        load_rule("bag_of_rules:plain")
    assert load_rule("bag_of_rules:plain", str(tmp_path))(X).item() == 4


@pytest.mark.parametrize("name", ["bag_of_rules", "bag_of_rules:", ":plain", ""])
def test_a_name_is_module_and_name(name):
    with pytest.raises(UsageError, match="named as module:name"):
        load_rule(name)


def test_a_rule_that_changed_is_refused_and_a_comment_is_no_change(tmp_path):
    load_rule("bag_of_rules:plain")
    rule = OwnRule("bag_of_rules:plain", str(tmp_path), locate("bag_of_rules:plain").code_hash)
    assert rule.build()(X).item() == 4
    (tmp_path / "bag_of_rules.py").write_text("# said again\n" + RULES)
    assert rule.build()(X).item() == 4
    (tmp_path / "bag_of_rules.py").write_text(RULES.replace("2.0", "6.0"))
    with pytest.raises(RunFolderError, match="the rule bag_of_rules:plain has changed since this run"):
        rule.build()


def test_what_a_rule_raises_is_laid_at_its_door_with_the_line():
    rule = load_rule("bag_of_rules:raises")
    line = RULES.splitlines().index("def raises(x):") + 2
    message = rf"bag_of_rules:raises raised ValueError: no such thing \(bag_of_rules.py, line {line}\)"
    with pytest.raises(ConstraintError, match=message), blamed_on("bag_of_rules:raises"):
        rule(X)


@pytest.mark.parametrize("error", [UsageError("mine"), MemoryError(), MemoryShortage("no")])
def test_what_is_not_the_rules_doing_is_not_blamed_on_it(error):
    with pytest.raises(type(error)), blamed_on("bag_of_rules:raises"):
        raise error
