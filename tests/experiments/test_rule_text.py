"""Rules of the package written out on the command line, such as "namm:TotalFlux(80)"."""

import os

import pytest
import torch

from namm.constraints import Burgers, Periodic, TotalFlux
from namm.errors import UsageError
from namm.experiments.engine.rule_text import is_written_out, rule_from_text
from namm.experiments.engine.user_rule import known_rule, load_rule, read_trusted
from namm.simulators.burgers import euler


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("namm:TotalFlux(80)", TotalFlux(80)),
        ("namm:TotalFlux(total=-8e1)", TotalFlux(-80)),
        ("namm:Periodic((4,2))", Periodic((4, 2))),
        ("namm:Burgers(step='euler', nu=0.1)", Burgers(euler, nu=0.1)),
        ("namm:Burgers * 3", 3 * Burgers()),
        ("namm:TotalFlux(120) + 0.5*namm:Periodic((2,2))", TotalFlux(120) + 0.5 * Periodic((2, 2))),
        (" 2*(namm:TotalFlux(1)+namm:TotalFlux(2)) ", 2 * (TotalFlux(1) + TotalFlux(2))),
    ],
)
def test_what_is_written_is_what_is_made(text, rule):
    assert is_written_out(text)
    made, x = rule_from_text(text), torch.rand(3, 1, 16, 16)
    assert repr(made) == repr(rule)
    assert torch.equal(made(x), rule(x))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("namm:Totalflux(3)", "Did you mean 'TotalFlux'"),
        ("namm:Count(3)", "no rule with numbers in namm called 'Count'"),
        ("namm:TotalFlux(tota=3)", r"it is namm:TotalFlux\(total=120.0\)"),
        ("namm:TotalFlux(1, 2)", r"it is namm:TotalFlux\(total=120.0\)"),
        ("namm:TotalFlux('x')", "finite number"),
        ("namm:TotalFlux(10**9)", "not a literal"),
        ("namm:TotalFlux(namm.os.system('touch mark'))", "not a literal"),
        ("namm:TotalFlux(__import__('os').system('touch mark'))", "not a literal"),
        ("namm:__loader__(3)", "no rule with numbers"),
        ("namm:TotalFlux(*[3])", "not a literal"),
        ("namm:TotalFlux(**{'total': 3})", "cannot be made"),
        ("namm:TotalFlux(1) - namm:TotalFlux(2)", "neither a rule of ours, nor a sum"),
        ("0 * namm:TotalFlux(1)", "finite number > 0"),
        ("TotalFlux(3)", "rules of ours begin with namm:"),
        ("mine:rule(3)", "only rules of ours are written out"),
        ("mine:rule + namm:TotalFlux(3)", "only rules of ours are written out"),
        ("namm:TotalFlux(3", "never closed"),
        ("(" * 400, "nested"),
        ("namm:TotalFlux(3) + " * 100, "more than 1000"),
        ("namm:Burgers(step='rk4')", "crank_nicolson and euler"),
        ("namm:TotalFlux(" + "9" * 900 + ")", "too large"),
    ],
)
def test_anything_else_is_refused_with_a_remedy(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        rule_from_text(text)
    assert not os.listdir(tmp_path)


def test_it_needs_no_trust_and_records_none(monkeypatch):
    before = read_trusted()
    assert load_rule("namm:TotalFlux(80)").total == 80
    assert known_rule("namm:TotalFlux(80)").total == 80
    assert read_trusted() == before
