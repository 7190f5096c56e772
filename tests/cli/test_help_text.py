"""Help: a screen for every command, the words of the options themselves, and everything where it is asked for."""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Literal

import pytest
from tyro.conf import Positional, arg

from namm.cli import COMMANDS, main
from namm.cli.help_text import field_docs, first_sentence, format_usage, list_options, options_help
from namm.cli.options import ImageFile
from namm.cli.run import OFTEN
from namm.experiments.presets import preset

FILES = ["x.npy", "--constraint", "burgers"]
CALLS = [
    [],
    *([name] for name in COMMANDS),
    *(["run", name] for name in ("burgers", "count", "darcy")),
    ["run", "--data", "x.npy", "--constraint", "m:n"],
    ["train", "map", "burgers"],
    ["train", "counter"],
    ["sweep", "burgers"],
    ["data", "black-holes"],
    ["check", "burgers"],
    ["certify", *FILES],
    ["evaluate", *FILES, "--against", "y.npy"],
    ["paper", "table1"],
]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_help_fits_a_screen(call, capsys):
    assert main([*call, "--help"]) == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert lines[0].startswith("usage: namm")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", ["run", "train", "sweep", "data"])
def test_help_that_leaves_settings_out_says_where_they_are(command, capsys):
    assert main([command, "--help"]) == 0
    assert "--help-all" in capsys.readouterr().out


@dataclass(frozen=True)
class Sizes:
    depth: int = 3


@dataclass(frozen=True)
class Example(ImageFile):
    """Do a thing.

    And another.
    """

    place: Annotated[Positional[str], arg(metavar="PLACE")] = "here"
    """Where. Not shown: the second sentence."""
    fast: bool = False
    """Be fast."""
    flipped: bool = True
    """Whether rows run down."""
    shown: bool = field(default_factory=lambda: True)
    """Show it."""
    kind: Literal["a", "b"] | None = None
    """Which kind; both are good."""
    rates: tuple[float, ...] = (0.5, 1e-3)
    """Several."""
    sizes: Sizes = Sizes()
    """Settings of their own."""


def test_options_as_a_person_types_them():
    rows = {each.name: each.row() for each in list_options(Example)}
    assert rows["place"] == ("PLACE", "Where [here]")
    assert rows["fast"] == ("--fast", "Be fast")
    assert rows["flipped"] == ("--flipped, --no-flipped", "Whether rows run down [True]")
    assert rows["shown"] == ("--shown, --no-shown", "Show it [True]")
    assert rows["kind"] == ("--kind a|b", "Which kind; both are good")
    assert rows["rates"] == ("--rates X ...", "Several [0.5 0.001]")
    assert rows["out"] == ("-o, --out PATH", "Where the figures go as JSON")  # inherited
    assert "sizes" not in rows
    text = options_help(Example, "namm example")
    assert text.startswith("usage: namm example PLACE [options]\n\nDo a thing.\n\nAnd another.\n\n")


def test_a_long_name_has_a_line_to_itself():
    text = format_usage("namm x", "About.", {"--a": "one", f"--{'b' * 40}": "two"})
    assert text.split("\n")[-2:] == [f"  --{'b' * 40}", " " * 38 + "two"]


def test_the_settings_that_the_short_help_shows_exist():
    def names(settings, place=""):
        for each in fields(settings):
            value = getattr(settings, each.name)
            yield from names(value, f"{place}{each.name}.") if is_dataclass(value) else [f"{place}{each.name}"]

    assert set(names(preset("burgers").settings)) >= set(OFTEN)


def test_help_all_lists_every_setting(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", "burgers", "--help-all"]) == 0
    found = set(re.findall(r"--[a-z][a-z0-9.-]*", capsys.readouterr().out))
    for name in ("map.f.blocks", "mdm.diffusion.t-min", "evaluate.kid-subsets", "vae.beta", "few.train.betas"):
        assert f"--{name}" in found


def test_docstrings_of_fields_are_those_of_the_nearest_class():
    assert field_docs(Example)["file"].startswith("Images: a file of `namm sample`")
    assert first_sentence("One\n    thing: a.b. Another.") == "One thing: a.b"
    assert field_docs(ImageFile)["key"] == "Name of the array in FILE; `images` in a file of samples."
